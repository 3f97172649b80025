"""Projections, RMS scales and affine maps that are wrong in their order, their formula or their precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.planted import arithmetic, kernels
from tests.planted.arithmetic import constant, inverse
from tests.planted.defect import OwnComposites, Planted, planted
from tests.planted.kernels import kernel, plus_eps

# --- the projection and the RMS scale ---


@planted("controller.p")
class DescendingK(Planted):
    """The projection adds K from its far end."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=arithmetic.descending)


@planted("controller.p")
class SplitK(Planted):
    """The projection adds four partial sums."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=arithmetic.split)


@planted("controller.p")
class InterleavedK(Planted):
    """The projection keeps two accumulators, for even and odd k."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=arithmetic.interleaved)


@planted("controller.p")
class PairwiseK(Planted):
    """The projection adds in a balanced tree."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=arithmetic.pairwise)


@planted("controller.p")
class FusedMultiplyAddK(Planted):
    """The projection rounds product and sum together."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=arithmetic.fused)


@planted("fp32_gemm_rms_fwd.r", "operators", "gemm_rms_rows", hidden_in="packed_t7_odd")
class FusedMultiplyAddSquares(Planted):
    """The sum of squares rounds square and sum together, which only FP32 inputs show: BF16 squares are exact."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, squares=arithmetic.fused)


@planted("controller.p")
class DoubleAccumulator(Planted):
    """The projection adds in FP64: more accurate, other bytes."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=arithmetic.fp64_accumulator)


@planted("controller.p")
class Bf16Projection(Planted):
    """P passes through BF16 between two FP32 operators."""

    fp32_gemm_rms_fwd = kernel(
        kernels.fp32_gemm_rms_fwd, fold=lambda a, b: arithmetic.through_bf16(arithmetic.ascending(a, b))
    )


@planted("controller.r", case="extreme_rows", hidden_in="one_row")
class RescaledSquares(Planted):
    """The sum of squares divides by the largest magnitude first where it would overflow, so rows of 1e20 survive."""

    fp32_gemm_rms_fwd = kernel(
        kernels.fp32_gemm_rms_fwd,
        squares=lambda a, b: _where_finite(arithmetic.ascending(a, b), arithmetic.rescaled(a, b).clamp(max=3.4e38)),
    )


@planted("controller.p", case="extreme_rows", hidden_in="one_row")
class FlushedProjection(Planted):
    """Subnormal inputs of the projection count as zero."""

    fp32_gemm_rms_fwd = kernel(
        kernels.fp32_gemm_rms_fwd, fold=lambda a, b: arithmetic.ascending(arithmetic.flushed(a), b)
    )


def _where_finite(value: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(torch.isfinite(value), value, otherwise)


def _scale(
    formula: Callable[[Tensor, Tensor, Tensor], Tensor], **hooks: Callable[..., Tensor]
) -> Callable[..., object]:
    """``fp32_gemm_rms_fwd`` whose r is ``formula(s, q, K)``."""

    def scale(s: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        norm, q, _ = kernels.inverse_rms(s, k)
        return norm, q, formula(s, q, constant(k, s))

    return kernel(kernels.fp32_gemm_rms_fwd, scale=scale, **hooks)


@planted("controller.r")
class NormsRsqrtInController(Planted):
    """r is rsqrt(mean + eps), which is the other operator's formula."""

    fp32_gemm_rms_fwd = _scale(lambda s, q, k: torch.rsqrt(plus_eps(s / k)))


@planted("controller.r")
class RootOfMean(Planted):
    """q is sqrt(s / K) and not sqrt(s) / sqrt(K)."""

    fp32_gemm_rms_fwd = _scale(lambda s, q, k: inverse(plus_eps(torch.sqrt(s / k))))


@planted("controller.r")
class ReciprocalRootK(Planted):
    """The division by sqrt(K) became a product with its reciprocal."""

    fp32_gemm_rms_fwd = _scale(lambda s, q, k: inverse(plus_eps(torch.sqrt(s) * inverse(torch.sqrt(k)))))


@planted("controller.r")
class DoubleEpsController(Planted):
    """eps is typed as a double, so q + eps and its inverse are FP64."""

    fp32_gemm_rms_fwd = _scale(lambda s, q, k: (1.0 / (q.double() + 1e-6)).float())


@planted("controller.r", case="zero_row")
class NoEpsController(Planted):
    """r is 1 / q, infinite on a zero row."""

    fp32_gemm_rms_fwd = _scale(lambda s, q, k: inverse(q))


@planted("fp32_gemm_rms_fwd.r", "operators", "gemm_rms_other_eps", hidden_in="packed_t7_odd")
class IgnoredEpsController(Planted):
    """eps is taken as an argument, and 1e-6 is used whatever comes."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, scale=kernels.inverse_rms)


@planted("controller.r")
class Bf16Scale(Planted):
    """r passes through BF16."""

    fp32_gemm_rms_fwd = _scale(lambda s, q, k: arithmetic.through_bf16(inverse(plus_eps(q))))


# --- the affine map: composites of their own ---


@planted("controller.h")
class FusedAffine(OwnComposites):
    """m * alpha + bias is one FMA."""

    def affine(self, m: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        return arithmetic.fma(m, alpha, bias)


@planted("controller.h")
class Bf16Affine(OwnComposites):
    """h passes through BF16 on its way to the split."""

    def affine(self, m: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
        return arithmetic.through_bf16((m * alpha) + bias)
