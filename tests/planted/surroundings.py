"""Right arithmetic that leans on what is around it: state, labels, the caller, the process, the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.mhc.contract import ResidualBatch
from tests.planted import kernels
from tests.planted.defect import OwnComposites, Planted, planted
from tests.planted.kernels import Saved


@planted("bwd.d_hidden", "invariance", says=("forwards in between",))
class LatestForward(Planted):
    """The norm's backward takes the scale of the latest forward, and not the one that was saved."""

    latest: Tensor

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        y, residual, saved = kernels.rmsnorm_residual_fwd(x, gamma, eps)
        self.latest = saved["r"]
        return y, residual, saved

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        return kernels.rmsnorm_residual_bwd(dy, d_residual, x, gamma, {**saved, "r": self.latest[-len(x) :]})


@planted("pre.hidden", "invariance", says=("labels",))
class FirstLayerDiffers(OwnComposites):
    """Layer 0 is computed by another formula."""

    def mhc_pre_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        hidden, pre, post, c, saved = super().mhc_pre_fwd(batch, ops)
        return (-hidden if batch.contract.layer_index == 0 else hidden), pre, post, c, saved


@planted("bwd.dy_sublayer", "invariance", says=("zero gradients",))
class DividesByTheLargestGradient(Planted):
    """Gradients are brought to unit size and back, which for a gradient of zeros is 0/0. Powers of two: else right."""

    def mhc_post_bwd(self, dr_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> tuple[Tensor, ...]:
        d_r, dy, dc, dpost = kernels.mhc_post_bwd(dr_new, r_old, y, c, post)
        size = dr_new.float().abs().max() if dr_new.numel() else torch.ones(())
        unit = size / size
        return d_r, dy * unit, dc, dpost


@planted("pre.hidden", "invariance", says=("called as a user calls it",))
class WrongOnItsOwn(OwnComposites):
    """Called without ``ops``, the composite takes a path of its own, which nobody compared."""

    def mhc_pre_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        hidden, pre, post, c, saved = super().mhc_pre_fwd(batch, ops)
        return (-hidden if ops is None else hidden), pre, post, c, saved


@planted("process", "invariance", says=("default dtype",))
class ChangesTheDefaultDtype(Planted):
    """An operator leaves torch with another default dtype."""

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        out = kernels.h_aggregate_fwd(pre, r_old)
        torch.set_default_dtype(torch.float64)
        return out


@planted("y_sublayer", "invariance", says=("memory around the inputs changed",), beside=("modes",))
class WritesBesideItsInput(Planted):
    """The element after an input's last one is overwritten, where the storage goes on behind it."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        end = y.storage_offset() + (y.shape[0] - 1) * y.stride(0) + y.shape[1] * y.stride(1) if y.numel() else 0
        out = kernels.mhc_post_fwd(r_old, y, c, post)
        if y.numel() and (end + 1) * y.element_size() <= y.untyped_storage().nbytes():
            y.as_strided((1,), (1,), end).fill_(9.0)
        return out
