"""Providers with a planted fault, to see what the acceptance command says about it.

Try ``--provider examples.faulty_providers:TruncatingStore``.
"""

import torch

from rl_engine.mhc.operators import Saved
from rl_engine.mhc.provider import ReferenceProvider
from rl_engine.mhc.reduction import fixed_sumsq


class TruncatingStore(ReferenceProvider):
    """Its post operator cuts the low 16 bits of an FP32 value off instead of rounding to the nearest BF16 value."""

    name = "truncating-store"

    def mhc_post_fwd(self, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
        """The contract's arithmetic with a round-toward-zero store."""
        a = [c[:, i, :, None] * r_old[:, i, None, :].float() for i in range(4)]
        r_new = ((a[0] + a[1]) + (a[2] + a[3])) + post[:, :, None] * y[:, None, :].float()
        return (r_new.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


class DescendingFold(ReferenceProvider):
    """Its controller projection folds K from the last element to the first."""

    name = "descending-fold"

    def fp32_gemm_rms_fwd(
        self, x_flat: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """P in the wrong order; r and saved as the contract has them."""
        x = x_flat.float()
        p = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
        for k in reversed(range(x.shape[1])):
            p += x[:, k, None] * weight[:, k]
        s = fixed_sumsq(x)
        norm = torch.sqrt(s)
        q = norm / torch.full_like(norm, x.shape[1] ** 0.5)
        r = torch.ones_like(q) / (q + torch.full_like(q, eps))
        return p, r, {"s": s, "norm": norm, "q": q, "r": r, "k": x.shape[1]}
