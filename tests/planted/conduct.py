"""Right arithmetic, wrong conduct: rows that depend on other rows, on history, on the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_engine.mhc.contract import ResidualBatch
from tests.planted import arithmetic, kernels
from tests.planted.arithmetic import ascending
from tests.planted.defect import OwnComposites, Planted, planted
from tests.planted.kernels import Saved, kernel

# --- the batch ---


def _from(tokens: int) -> arithmetic.Fold:
    """Ascending below that many tokens, split from there on. Axis 1 of the first operand is the token."""
    return lambda a, b: (arithmetic.split if a.shape[1] >= tokens else ascending)(a, b)


@planted("controller.p", case="odd_hidden", hidden_in="packed_t7_odd")
class SplitFrom32(Planted):
    """The projection splits K once there are 32 tokens."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=_from(32))


@planted("controller.p", "invariance", "packed_t16", hidden_in="odd_hidden")
class SplitFrom2048(Planted):
    """The projection splits K once there are 2048 tokens."""

    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd, fold=_from(2048))


@planted("controller.p", "invariance")
class SplitForOneRow(Planted):
    """A batch of one row goes through a matrix-vector kernel with a split of its own."""

    fp32_gemm_rms_fwd = kernel(
        kernels.fp32_gemm_rms_fwd, fold=lambda a, b: (arithmetic.split if a.shape[1] < 2 else ascending)(a, b)
    )


@planted("fixed_k_gemm_fwd.out", "operators", "fixed_gemm_many", hidden_in="fixed_gemm")
class GemmSplitFrom64(Planted):
    """The batch-invariant GEMM splits K once there are 64 rows."""

    fixed_k_gemm_fwd = kernel(kernels.fixed_k_gemm_fwd, fold=_from(64))


@planted("post.r_new")
class TruncatedTail(Planted):
    """The tail tile, after the last multiple of four rows, is truncated and not rounded."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        full = len(y) // 4 * 4
        out = kernels.mhc_post_fwd(r_old, y, c, post)
        out[full:] = kernels.mhc_post_fwd(r_old, y, c, post, store=arithmetic.truncated)[full:]
        return out


@planted("post.r_new", "invariance")
class NoTailTile(Planted):
    """Rows after the last multiple of seven are left at zero."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        out = kernels.mhc_post_fwd(r_old, y, c, post)
        out[len(y) // 7 * 7 if len(y) > 1 else 1 :] = 0.0
        return out


@planted("pre.hidden", "invariance", hidden_in="one_row")
class MaskedByZero(Planted):
    """Every row adds all other rows times zero, which a NaN survives."""

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        masked = (r_old.float() * 0.0).sum((0, 1))
        return kernels.h_aggregate_fwd(pre, r_old, store=lambda t: arithmetic.nearest_even(t + masked))


@planted("pre.hidden", "invariance")
class PaddingToken(OwnComposites):
    """Token 0 counts as padding, and its hidden row is zeroed."""

    def mhc_pre_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        hidden, *rest = super().mhc_pre_fwd(batch, ops)
        return torch.where(batch.token_id[:, None] == 0, torch.zeros_like(hidden), hidden), *rest


@planted("mhc_post_fwd", case="no_tokens")
class NoEmptyBatch(Planted):
    """A batch without tokens is an error."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        if not len(y):
            raise RuntimeError("invalid configuration argument: grid of 0 blocks")
        return kernels.mhc_post_fwd(r_old, y, c, post)


@planted("rmsnorm_residual_fwd")
class Crash(Planted):
    """The operator raises."""

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        raise RuntimeError("an illegal memory access was encountered")


@planted("rmsnorm_residual_fwd", says=("SystemExit",))
class Quits(Planted):
    """The operator ends the process."""

    code: int | None = 0

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        raise SystemExit(self.code)


# --- history and machine ---


class Counting(Planted):
    """Counts its calls, so that a defect can depend on them and still be the same in every run of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


@planted("controller.p", "invariance", says=("repeated runs",))
class RacingLanes(Counting):
    """Every third call adds in another order: a race that is lost now and then."""

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        fold = arithmetic.split if self.count() % 3 == 0 else ascending
        return kernels.fp32_gemm_rms_fwd(x_flat, weight, eps, fold=fold)


@planted("bwd.d_gamma", "invariance", beside=("modes",))
class AtomicGradient(Counting):
    """dgamma is added in whatever order the tokens finish in."""

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        turn = self.count() - 1
        fold: Callable[[Tensor, Tensor], Tensor] = lambda a, b: ascending(a.roll(turn, 0), b.roll(turn, 0))  # noqa: E731
        return kernels.rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved, over_t=fold)


@planted("controller.p", "invariance", says=("thread",))
class ThreadSplit(Planted):
    """K is split into as many parts as there are threads, from three on."""

    fp32_gemm_rms_fwd = kernel(
        kernels.fp32_gemm_rms_fwd,
        fold=lambda a, b: (arithmetic.split if torch.get_num_threads() > 2 else ascending)(a, b),
    )


@planted("split.c", "invariance", beside=("modes",))
class ModeMovesBytes(OwnComposites):
    """Under fusion C comes transposed."""

    def mhc_pre_rmsnorm_fused_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        hidden, normalized, residual, post, c, saved = super().mhc_pre_rmsnorm_fused_fwd(batch, ops)
        c = c.transpose(1, 2).contiguous()
        return hidden, normalized, residual, post, c, {**saved, "c": c}
