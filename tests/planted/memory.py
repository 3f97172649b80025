"""Right arithmetic on the wrong memory: strides ignored, memory unwritten, inputs and saved tensors overwritten."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.planted import kernels
from tests.planted.arithmetic import ascending
from tests.planted.defect import Planted, planted
from tests.planted.kernels import Saved, kernel

# --- memory ---


def linear(t: Tensor) -> Tensor:
    """The storage of ``t`` read from its start as if rows were packed, which a kernel that ignores strides does."""
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride(), 0)


@planted("post.r_new", "invariance")
class IgnoresStrides(Planted):
    """r_old and y are read as packed rows, whatever their strides."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return kernels.mhc_post_fwd(linear(r_old), linear(y), c, post)


@planted("bwd.dy_sublayer", "invariance")
class IgnoresStridesBackward(Planted):
    """The gradient that arrives is read as packed rows: a right forward, a wrong backward."""

    def mhc_post_bwd(self, dr_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> tuple[Tensor, ...]:
        return kernels.mhc_post_bwd(linear(dr_new), r_old, y, c, post)


@planted("controller.p", "invariance", also=("controller.h",))
class IgnoresWeightStrides(Planted):
    """The controller weight is read as packed rows."""

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        return kernels.fp32_gemm_rms_fwd(x_flat, linear(weight), eps)


def in_workspace(a: Tensor, b: Tensor) -> Tensor:
    """A fold whose accumulator lies in an uncleared workspace, and is cleared by a product with zero.

    The workspace is large enough to come from fresh pages, which the system clears: so it works until it does not.
    """
    total = torch.empty(1 << 24)[: ascending(a[:0], b[:0]).numel()].view(ascending(a[:0], b[:0]).shape)
    return total * 0.0 + ascending(a, b)


@planted("controller.p", "invariance")
class UnclearedWorkspace(Planted):
    """The accumulator starts as memory that nobody wrote, times zero."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=in_workspace)


@planted("grad.d_controller_weight", "invariance")
class UnclearedGradient(Planted):
    """dW starts as memory that nobody wrote, times zero."""

    fp32_gemm_rms_bwd = kernel(kernels.fp32_gemm_rms_bwd, over_t=in_workspace)


@planted("post.r_new", "invariance")
class StaticOutput(Planted):
    """r_new lives in one buffer, which the next call overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(1 << 20, dtype=torch.bfloat16)

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return self.buffer[: r_old.numel()].view(r_old.shape).copy_(kernels.mhc_post_fwd(r_old, y, c, post))


# --- inputs and saved ---


@planted("norm.residual", "invariance", says=("storage",))
class ResidualIsInput(Planted):
    """The residual is the input itself and not a copy."""

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        y, _, saved = kernels.rmsnorm_residual_fwd(x, gamma, eps)
        return y, x, saved


@planted("norm.residual", "invariance", "no_tokens", says=("storage",))
class EmptyResidualIsInput(Planted):
    """The residual of an empty batch is the input itself."""

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        y, residual, saved = kernels.rmsnorm_residual_fwd(x, gamma, eps)
        return y, residual if len(x) else x, saved


@planted("fixed_k_gemm_bwd.dX", "operators", "fixed_gemm", says=("storage",))
class GemmInPlace(Planted):
    """dX of the GEMM is written over x."""

    def fixed_k_gemm_bwd(self, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        dx, dw = kernels.fixed_k_gemm_bwd(dy, x, w)
        return (x.copy_(dx) if x.dtype == dx.dtype else dx), dw


@planted("x_flat", "invariance", also=("grad.d_controller_weight",), says=("saved tensors changed by backward",))
class GradientInPlace(Planted):
    """dX of the projection is written over x_flat, which the forward saved."""

    def fp32_gemm_rms_bwd(
        self, dp: Tensor, dr: Tensor, x_flat: Tensor, weight: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        dx, dw = kernels.fp32_gemm_rms_bwd(dp, dr, x_flat, weight, saved)
        return x_flat.copy_(dx), dw


@planted("y_sublayer", "invariance", says=("inputs changed",), beside=("boundaries",))
class InputScratch(Planted):
    """The forward uses y as scratch memory for its last stream."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        out = kernels.mhc_post_fwd(r_old, y, c, post)
        y.copy_(out[:, 3])
        return out


@planted("y_sublayer", "invariance", says=("inputs changed",))
class InputMutatedAtTheEnd(Planted):
    """The backward leaves its input changed once nobody reads it any more."""

    def mhc_post_bwd(self, dr_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> tuple[Tensor, ...]:
        grads = kernels.mhc_post_bwd(dr_new, r_old, y, c, post)
        y.neg_()
        return grads


@planted("sinkhorn.softmax", "invariance", says=("saved",))
class SavedMutated(Planted):
    """The backward negates the softmax that the forward saved, and undoes it only every other time."""

    def hc_split_sinkhorn_bwd(self, dpre: Tensor, dpost: Tensor, dc: Tensor, saved: Saved) -> Tensor:
        dh = kernels.hc_split_sinkhorn_bwd(dpre, dpost, dc, saved | {"softmax": saved["softmax"].abs()})
        saved["softmax"].neg_()
        return dh
