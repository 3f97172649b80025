"""Aggregate, norm, post and the GEMM reference, wrong in their order, their formula or their store."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.planted import arithmetic, kernels
from tests.planted.arithmetic import constant, inverse
from tests.planted.defect import Planted, planted
from tests.planted.kernels import kernel, plus_eps, scaled_then_weighted

# --- aggregate ---


@planted("h_aggregate_fwd.hidden", "operators", "aggregate_order", hidden_in="one_row")
class LeftFoldAggregate(Planted):
    """The four streams are added from the left and not as a tree."""

    h_aggregate_fwd = kernel(kernels.h_aggregate_fwd, tree=arithmetic.left4)


@planted("h_aggregate_fwd.hidden", "operators", "aggregate_order", hidden_in="packed_t7_odd")
class FusedAggregate(Planted):
    """The second product of each pair is added by FMA."""

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        r = r_old.float()
        pairs = [arithmetic.fma(pre[:, i + 1, None], r[:, i + 1], pre[:, i, None] * r[:, i]) for i in (0, 2)]
        return arithmetic.nearest_even(pairs[0] + pairs[1])


@planted("pre.hidden", says=("truncation", "signed bias"))
class TruncatedAggregate(Planted):
    """The BF16 store of hidden cuts the lower half off."""

    h_aggregate_fwd = kernel(kernels.h_aggregate_fwd, store=arithmetic.truncated)


@planted("h_aggregate_fwd.hidden", "operators", "aggregate_ties", hidden_in="packed_t7_odd")
class HalfUpAggregate(Planted):
    """The BF16 store of hidden rounds exact ties toward plus infinity."""

    h_aggregate_fwd = kernel(kernels.h_aggregate_fwd, store=arithmetic.half_up)


@planted("pre.hidden", case="extreme_rows")
class FlushedAggregate(Planted):
    """Subnormal sums are stored as zero."""

    h_aggregate_fwd = kernel(kernels.h_aggregate_fwd, store=lambda t: arithmetic.nearest_even(arithmetic.flushed(t)))


@planted("pre.hidden")
class UnroundedHidden(Planted):
    """hidden leaves the operator in FP32."""

    h_aggregate_fwd = kernel(kernels.h_aggregate_fwd, store=arithmetic.unrounded)


# --- the norm ---


def _norm(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., object]:
    """``rmsnorm_residual_fwd`` whose r is ``formula(s, D)``."""
    return kernel(kernels.rmsnorm_residual_fwd, scale=lambda s, d: formula(s, constant(d, s)))


@planted("norm.normalized", case="extreme_rows")
class ControllersRsqrtInNorm(Planted):
    """r is 1 / (sqrt(mean) + eps), which is the other operator's formula."""

    rmsnorm_residual_fwd = _norm(lambda s, d: inverse(plus_eps(torch.sqrt(s / d))))


@planted("bwd.d_hidden", case="odd_hidden", hidden_in="packed_t7_odd")
class ReciprocalWidth(Planted):
    """The division by D became a product with 1/D, which is the same wherever D is a power of two."""

    rmsnorm_residual_fwd = _norm(lambda s, d: torch.rsqrt(plus_eps(s * inverse(d))))


@planted("bwd.d_hidden", case="odd_hidden")
class DoubleEpsNorm(Planted):
    """eps is typed as a double, so mean + eps and its root are FP64."""

    rmsnorm_residual_fwd = _norm(lambda s, d: torch.rsqrt((s / d).double() + 1e-6).float())


@planted("norm.normalized", case="zero_row")
class NoEpsNorm(Planted):
    """rsqrt(mean) of a zero row is infinite."""

    rmsnorm_residual_fwd = _norm(lambda s, d: torch.rsqrt(s / d))


@planted("rmsnorm_residual_fwd.y", "operators", "rms_near_ties", hidden_in="packed_t7_odd")
class GammaFirst(Planted):
    """(x * gamma) * r and not (x * r) * gamma."""

    rmsnorm_residual_fwd = kernel(kernels.rmsnorm_residual_fwd, apply=lambda x, r, gamma: (x * gamma.float()) * r)


@planted("rmsnorm_residual_fwd.y", "operators", "rms_other_eps", hidden_in="packed_t7_odd")
class IgnoredEpsNorm(Planted):
    """eps is taken as an argument, and 1e-6 is used whatever comes."""

    rmsnorm_residual_fwd = kernel(kernels.rmsnorm_residual_fwd, scale=kernels.inverse_root)


@planted("norm.normalized")
class CastBeforeGamma(Planted):
    """x * r is rounded to BF16 before gamma multiplies it."""

    rmsnorm_residual_fwd = kernel(
        kernels.rmsnorm_residual_fwd, apply=lambda x, r, gamma: arithmetic.through_bf16(x * r) * gamma.float()
    )


@planted("norm.normalized", case="fp32_gamma", hidden_in="packed_t7_odd")
class GammaCast(Planted):
    """An FP32 gamma is rounded to BF16, as after a whole-module cast."""

    rmsnorm_residual_fwd = kernel(
        kernels.rmsnorm_residual_fwd,
        apply=lambda x, r, gamma: scaled_then_weighted(x, r, arithmetic.through_bf16(gamma.float())),
    )


@planted("norm.normalized")
class GammaIgnored(Planted):
    """gamma is taken as an argument and never used."""

    rmsnorm_residual_fwd = kernel(kernels.rmsnorm_residual_fwd, apply=lambda x, r, gamma: x * r)


@planted("norm.normalized", says=("truncation", "signed bias"))
class TruncatedNorm(Planted):
    """The BF16 store of normalized cuts the lower half off."""

    rmsnorm_residual_fwd = kernel(kernels.rmsnorm_residual_fwd, store=arithmetic.truncated)


@planted("rmsnorm_residual_fwd.y", "operators", "rms_near_ties", hidden_in="packed_t7_odd")
class HalfAwayNorm(Planted):
    """The BF16 store of normalized rounds exact ties away from zero."""

    rmsnorm_residual_fwd = kernel(kernels.rmsnorm_residual_fwd, store=arithmetic.half_away)


@planted("norm.residual")
class NormalizedResidual(Planted):
    """The residual is the normalized row and not the input."""

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, kernels.Saved]:
        y, _, saved = kernels.rmsnorm_residual_fwd(x, gamma, eps)
        return y, y.clone(), saved


@planted("norm.residual", case="extreme_rows", hidden_in="packed_t7_odd", says=("sign of a zero",))
class PositiveZeroResidual(Planted):
    """The residual goes through an addition of zero, which turns -0 into +0."""

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, kernels.Saved]:
        y, residual, saved = kernels.rmsnorm_residual_fwd(x, gamma, eps)
        return y, residual + 0.0, saved


# --- post ---


@planted("post.r_new")
class TransposedComb(Planted):
    """C is applied transposed."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return kernels.mhc_post_fwd(r_old, y, c.transpose(1, 2), post)


@planted("mhc_post_fwd.r_new", "operators", "post_order", hidden_in="packed_t7_odd")
class LeftFoldPost(Planted):
    """The four streams are added from the left and not as a tree."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, tree=arithmetic.left4)


@planted("mhc_post_fwd.r_new", "operators", "post_order", hidden_in="packed_t7_odd")
class FusedPost(Planted):
    """The sublayer's term is added by FMA."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        mixed = kernels.mhc_post_fwd(r_old, torch.zeros_like(y), c, post, store=arithmetic.unrounded)
        return arithmetic.nearest_even(arithmetic.fma(post[:, :, None], y[:, None, :].float(), mixed))


@planted("post.r_new", says=("truncation", "signed bias"))
class TruncatedPost(Planted):
    """The BF16 store of r_new cuts the lower half off."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, store=arithmetic.truncated)


@planted("mhc_post_fwd.r_new", "operators", "post_ties", hidden_in="packed_t7_odd")
class HalfAwayPost(Planted):
    """The BF16 store of r_new rounds exact ties away from zero."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, store=arithmetic.half_away)


@planted("mhc_post_fwd.r_new", "operators", "post_ties", hidden_in="packed_t7_odd")
class HalfUpPost(Planted):
    """The BF16 store of r_new rounds exact ties toward plus infinity."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, store=arithmetic.half_up)


@planted("post.r_new")
class UnroundedStreams(Planted):
    """r_new leaves the operator in FP32."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, store=arithmetic.unrounded)


@planted("post.r_new")
class StreamsLast(Planted):
    """r_new comes as [T, D, 4]."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, store=lambda t: arithmetic.nearest_even(t).transpose(1, 2).contiguous())


# --- the GEMM reference ---


@planted("fixed_k_gemm_fwd.out", "operators", "fixed_gemm")
class LibraryGemm(Planted):
    """torch.matmul: the library picks the order."""

    def fixed_k_gemm_fwd(self, x: Tensor, w: Tensor) -> Tensor:
        return x.float() @ w.float().t()


@planted("fixed_k_gemm_bwd.dW", "operators", "fixed_gemm")
class GemmWeightTree(Planted):
    """dW adds the rows in a balanced tree."""

    fixed_k_gemm_bwd = kernel(kernels.fixed_k_gemm_bwd, over_m=arithmetic.pairwise)
