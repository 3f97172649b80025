"""Two numeric profiles of one's own, and a provider for each. Importing this module registers the profiles.

Try ``--provider examples.own_profiles:TolerantFold`` and ``--provider examples.own_profiles:RoundedMixKernel``.
"""

import torch

from rl_engine.mhc.elementary import PORTABLE_PROFILE
from rl_engine.mhc.operators import ReferenceOperators, Saved
from rl_engine.mhc.operators.interface import check_arguments
from rl_engine.mhc.operators.reference import reference_operator
from rl_engine.mhc.profiles import NumericProfile, Tolerance, register_profile
from rl_engine.mhc.provider import ReferenceProvider
from rl_engine.mhc.reduction import fixed_sumsq, stream4_sum_dim

TOLERANT = NumericProfile(
    "example-tolerant-v1",
    elementary="correctly-rounded",
    base=PORTABLE_PROFILE,
    tolerance={"*": Tolerance(ulp=1, rtol=1e-5, atol=1e-5)},
)
"""Near the portable profile: BF16 within one ULP, FP32 within 1e-5."""

ROUNDED_MIX = NumericProfile(
    "example-rounded-mix-v1",
    elementary="correctly-rounded",
    downcast_points=("pre.hidden", "norm.normalized", "post.mix", "post.r_new"),
    operators="examples.own_profiles:RoundedMix",
)
"""The portable profile with one rounding more: ``mhc_post`` rounds the mix of the streams to BF16 too."""


class RoundedMix(ReferenceOperators):
    """The oracle of ``ROUNDED_MIX``: the contract's operators, and a post of its own."""

    @reference_operator
    def mhc_post_fwd(self, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
        """``r_new[j] = BF16(tree_i(C[i, j] * R[i])) + POST[j] * y``, rounded to BF16 again."""
        check_arguments("mhc_post_fwd", r_old=r_old, y=y, c=c, post=post)
        mix = stream4_sum_dim(c[:, :, :, None] * r_old.float()[:, :, None, :], 1).to(torch.bfloat16)
        return (mix.float() + post[:, :, None] * y.float()[:, None, :]).to(torch.bfloat16)


class TolerantFold(ReferenceProvider):
    """A projection that is folded from the last element to the first, under a profile that allows it."""

    name = "tolerant-fold"

    def __init__(self) -> None:
        super().__init__(TOLERANT.id)

    def fp32_gemm_rms_fwd(
        self, x_flat: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """P in another order; r and saved as the contract has them."""
        x = x_flat.float()
        p = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
        for k in reversed(range(x.shape[1])):
            p += x[:, k, None] * weight[:, k]
        s = fixed_sumsq(x)
        norm = torch.sqrt(s)
        q = norm / torch.full_like(norm, x.shape[1] ** 0.5)
        r = torch.ones_like(q) / (q + torch.full_like(q, eps))
        return p, r, {"s": s, "norm": norm, "q": q, "r": r, "k": x.shape[1]}


class RoundedMixKernel(ReferenceProvider):
    """A kernel for ``ROUNDED_MIX``, stream by stream."""

    name = "rounded-mix"

    def __init__(self) -> None:
        super().__init__(ROUNDED_MIX.id)

    def mhc_post_fwd(self, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
        """Both roundings of the profile."""
        r = r_old.float()
        a = [c[:, i, :, None] * r[:, i, None, :] for i in range(4)]
        mix = ((a[0] + a[1]) + (a[2] + a[3])).to(torch.bfloat16).float()
        return (mix + post[:, :, None] * y.float()[:, None, :]).to(torch.bfloat16)


register_profile(TOLERANT)
register_profile(ROUNDED_MIX)
