"""``hc_split_sinkhorn`` as a differentiable operation."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import HC_MULT, ORACLE_PROFILE
from rl_engine.mhc.ops.define import FP32, arrived, define, differentiate, needed, stored
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor
_Split = tuple[Tensor, Tensor, Tensor]


def hc_split_sinkhorn(h: Tensor, *, numeric_profile: str = ORACLE_PROFILE) -> _Split:
    """``(pre[T, 4], post[T, 4], c[T, 4, 4])``, FP32, of the controller outputs ``h[T, 24]``, FP32.

    Nothing is rounded beyond FP32, forward or backward. The backward keeps ``h`` alone and computes the rest again.
    Errors: those of the operator, and ``NotImplementedError`` ("fail-closed") where no backend is registered.
    """
    pre, post, c = _op(h, numeric_profile)
    return pre, post, c


def _forward(h: Tensor, numeric_profile: str) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, c, _ = backend_for(h.device.type, numeric_profile).hc_split_sinkhorn_fwd(h)
    return stored(pre, FP32), stored(post, FP32), stored(c, FP32)


def _forward_fake(h: Tensor, numeric_profile: str) -> _Split:
    tokens = h.shape[0]
    return h.new_empty((tokens, HC_MULT)), h.new_empty((tokens, HC_MULT)), h.new_empty((tokens, HC_MULT, HC_MULT))


def _backward(
    d_pre: Tensor | None, d_post: Tensor | None, d_c: Tensor | None, h: Tensor, numeric_profile: str
) -> Tensor:
    ops, tokens = backend_for(h.device.type, numeric_profile), h.shape[0]
    saved = ops.hc_split_sinkhorn_fwd(h)[-1]
    d_pre, d_post = (arrived(grad, h, tokens, HC_MULT) for grad in (d_pre, d_post))
    return stored(ops.hc_split_sinkhorn_bwd(d_pre, d_post, arrived(d_c, h, tokens, HC_MULT, HC_MULT), saved), FP32)


def _backward_fake(
    d_pre: Tensor | None, d_post: Tensor | None, d_c: Tensor | None, h: Tensor, numeric_profile: str
) -> Tensor:
    return h.new_empty(h.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    h, ctx.numeric_profile = inputs
    ctx.save_for_backward(h)


def _formula(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return needed(ctx, (_op_bwd(*grads, *ctx.saved_tensors, ctx.numeric_profile),))


_op, _op_bwd = define("hc_split_sinkhorn", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
