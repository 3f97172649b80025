"""``rmsnorm_residual`` as a differentiable operation."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import ORACLE_PROFILE, RMSNORM_EPS
from rl_engine.mhc.operators import Saved
from rl_engine.mhc.ops.define import BF16, FP32, arrived, define, differentiate, needed, stored
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor


def rmsnorm_residual(
    x: Tensor, gamma: Tensor, eps: float = RMSNORM_EPS, *, numeric_profile: str = ORACLE_PROFILE
) -> tuple[Tensor, Tensor]:
    """``(y[T, D], residual[T, D])``, BF16, of BF16 ``x[T, D]`` and ``gamma[D]`` (BF16 or FP32).

    ``y = (x * rsqrt(fold_d(x*x)/D + eps)) * gamma``, rounded to BF16 once; ``residual`` is a copy of ``x``. The
    gradient of ``x``, both legs summed in FP32, is rounded to BF16 once, that of ``gamma`` to its dtype. Errors: those
    of the operator, and ``NotImplementedError`` ("fail-closed") where no backend is registered.
    """
    y, residual, _ = _op(x, gamma, eps, numeric_profile)
    return y, residual


def saved_of(inv_rms: Tensor, d: int) -> Saved:
    """The ``saved`` of ``rmsnorm_residual_fwd`` as far as a backward reads it."""
    return {"r": inv_rms, "d": d}


def _forward(x: Tensor, gamma: Tensor, eps: float, numeric_profile: str) -> tuple[Tensor, Tensor, Tensor]:
    y, residual, saved = backend_for(x.device.type, numeric_profile).rmsnorm_residual_fwd(x, gamma, eps)
    return stored(y, BF16), stored(residual, BF16), stored(saved["r"], FP32)


def _forward_fake(x: Tensor, gamma: Tensor, eps: float, numeric_profile: str) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty((x.shape[0],), dtype=FP32)


def _backward(
    d_y: Tensor | None, d_residual: Tensor | None, x: Tensor, gamma: Tensor, inv_rms: Tensor, numeric_profile: str
) -> tuple[Tensor, Tensor]:
    ops = backend_for(x.device.type, numeric_profile)
    dy, skip = (arrived(grad, x, *x.shape, dtype=BF16) for grad in (d_y, d_residual))
    dx, d_gamma = ops.rmsnorm_residual_bwd(dy, skip, x, gamma, saved_of(inv_rms, x.shape[1]))
    return stored(dx, BF16), stored(d_gamma, gamma.dtype)


def _backward_fake(
    d_y: Tensor | None, d_residual: Tensor | None, x: Tensor, gamma: Tensor, inv_rms: Tensor, numeric_profile: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, gamma, _, ctx.numeric_profile = inputs
    inv_rms = output[2]
    ctx.mark_non_differentiable(inv_rms)
    ctx.save_for_backward(x, gamma, inv_rms)


def _formula(ctx: Any, d_y: Tensor | None, d_residual: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    return needed(ctx, _op_bwd(d_y, d_residual, *ctx.saved_tensors, ctx.numeric_profile))


_op, _op_bwd = define("rmsnorm_residual", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
