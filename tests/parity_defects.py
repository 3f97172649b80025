"""Defects planted in the strict model of ``examples/train_infer_parity.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from examples.parity.corpus import Batch
from rl_engine.mhc import block
from rl_engine.mhc.backends.native.provider import NativeProvider
from rl_engine.mhc.contract import P1_RMS, PORTABLE_PROFILE
from rl_engine.mhc.ops import fixed_k_gemm


class SplitsLargeBatches(NativeProvider):
    """Folds K of the controller's projection in two halves, kept in BF16, where a batch has more than 8 tokens."""

    name = "splits-large-batches"

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float, controller_rms: str = P1_RMS) -> Any:
        p, r, saved = super().fp32_gemm_rms_fwd(x_flat, weight, eps, controller_rms)
        return in_halves(self.fixed_k_gemm_fwd, x_flat, weight) if x_flat.shape[0] > 8 else p, r, saved

    def mhc_pre_fwd(self, batch: Any, ops: Any = None) -> Any:
        return block.mhc_pre_fwd(batch, self)

    def mhc_pre_rmsnorm_fused_fwd(self, batch: Any, ops: Any = None) -> Any:
        return block.mhc_pre_rmsnorm_fused_fwd(batch, self)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)


def split_for_many_rows(x: Tensor, w: Tensor) -> Tensor:
    """A product whose fold is split where there are more than 8 rows."""
    fold = partial(fixed_k_gemm, numeric_profile=PORTABLE_PROFILE)
    return in_halves(fold, x, w) if x.shape[0] > 8 else fold(x, w)


def in_halves(fold: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """The sum of two folds over half of K each, rounded to BF16 on their way, as some kernels that split K do."""
    left, right = (fold(a, b).bfloat16() for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True))
    return left.float() + right.float()


def blind_to_segments(batch: Batch, keys: Batch) -> Tensor:
    """A mask by position alone, which lets a token see other sequences of its row, and padding."""
    return (batch.positions[:, :, None] >= keys.positions[:, None, :]).unsqueeze(1)
