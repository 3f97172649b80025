"""``h_aggregate`` as a differentiable operation."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import ORACLE_PROFILE
from rl_engine.mhc.ops.define import BF16, FP32, define, differentiate, needed, stored
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor


def h_aggregate(pre: Tensor, r_old: Tensor, *, numeric_profile: str = ORACLE_PROFILE) -> Tensor:
    """BF16 ``hidden[T, D]`` of FP32 ``pre[T, 4]`` and BF16 ``r_old[T, 4, D]``: ``tree_i(PRE[i] * R[i])``.

    Rounded to BF16 once; so is the gradient of ``r_old``. That of ``pre`` is FP32. Errors: those of the operator, and
    ``NotImplementedError`` ("fail-closed") where no backend is registered.
    """
    hidden: Tensor = _op(pre, r_old, numeric_profile)
    return hidden


def _forward(pre: Tensor, r_old: Tensor, numeric_profile: str) -> Tensor:
    return stored(backend_for(r_old.device.type, numeric_profile).h_aggregate_fwd(pre, r_old), BF16)


def _forward_fake(pre: Tensor, r_old: Tensor, numeric_profile: str) -> Tensor:
    return r_old.new_empty((r_old.shape[0], r_old.shape[2]))


def _backward(d_hidden: Tensor, pre: Tensor, r_old: Tensor, numeric_profile: str) -> tuple[Tensor, Tensor]:
    d_r, d_pre = backend_for(r_old.device.type, numeric_profile).h_aggregate_bwd(d_hidden, pre, r_old)
    return stored(d_pre, FP32), stored(d_r, BF16)


def _backward_fake(d_hidden: Tensor, pre: Tensor, r_old: Tensor, numeric_profile: str) -> tuple[Tensor, Tensor]:
    return pre.new_empty(pre.shape), r_old.new_empty(r_old.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.numeric_profile = inputs
    ctx.save_for_backward(*tensors)


def _formula(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
    return needed(ctx, _op_bwd(d_hidden, *ctx.saved_tensors, ctx.numeric_profile))


_op, _op_bwd = define("h_aggregate", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
