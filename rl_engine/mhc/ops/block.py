"""The whole block as one differentiable operation, the sublayer's output being data."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc import block as composition
from rl_engine.mhc.contract import CANONICAL_FUSION_MODE, ORACLE_PROFILE, P1_RMS, GradBoundary
from rl_engine.mhc.ops.composite import (
    Modes,
    batch_of,
    controller_fakes,
    controller_grads,
    kept_fake,
    kept_of,
    saved_again,
)
from rl_engine.mhc.ops.define import BF16, arrived, define, differentiate, needed, stored
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor
_Outputs = tuple[Tensor, Tensor, Tensor]
_WithKept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def mhc_block(
    r_old: Tensor,
    y: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    gamma: Tensor,
    *,
    fusion_mode: str = CANONICAL_FUSION_MODE,
    controller_rms: str = P1_RMS,
    numeric_profile: str = ORACLE_PROFILE,
) -> _Outputs:
    """``(r_new[T, 4, D], normalized[T, D], residual[T, D])``, BF16, of BF16 ``r_old[T, 4, D]`` and ``y[T, D]``.

    ``mhc_pre``, ``rmsnorm_residual``, then ``mhc_post`` with ``y``, which is the sublayer's output and no function of
    ``normalized`` here. FP32 ``weight[24, 4D]``, ``alpha_*[1]``, ``bias[24]``; ``gamma[D]`` BF16 or FP32. Each output
    is rounded to BF16 once.

    The gradients are those of ``mhc_block_backward``, of zeros for one that does not arrive. That of ``r_old``, summed
    in FP32, and that of ``y`` are rounded to BF16 once, that of ``gamma`` to its dtype; the others are FP32. Where no
    controller parameter needs a gradient the backward runs as ``mixer-frozen``.

    Errors: those of ``ResidualBatch.validate``; ``NotImplementedError`` ("fail-closed") where no backend is registered
    or the registered one does not declare what is asked for.
    """
    tensors = (r_old, y, weight, alpha_pre, alpha_post, alpha_res, bias, gamma)
    r_new, normalized, residual, *_ = _op(*tensors, controller_rms, fusion_mode, numeric_profile)
    return r_new, normalized, residual


def _forward(
    r_old: Tensor,
    y: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    gamma: Tensor,
    controller_rms: str,
    fusion_mode: str,
    numeric_profile: str,
) -> _WithKept:
    parameters = (weight, alpha_pre, alpha_post, alpha_res, bias, gamma)
    batch = batch_of(r_old, y, parameters, Modes(controller_rms, fusion_mode, numeric_profile))
    ops: Any = backend_for(r_old.device.type, numeric_profile)
    if hasattr(ops, "mhc_block_forward"):
        r_new, saved = ops.mhc_block_forward(batch)
    else:
        r_new, saved = composition.mhc_block_forward(batch, ops=ops)
    outputs = (stored(t, BF16) for t in (r_new, saved["normalized"], saved["residual"]))
    return (*outputs, *kept_of(saved, controller_rms))  # type: ignore[return-value]


def _forward_fake(r_old: Tensor, y: Tensor, *_: object) -> _WithKept:
    return (r_old.new_empty(r_old.shape), y.new_empty(y.shape), y.new_empty(y.shape), *kept_fake(r_old))


def _backward(
    d_r_new: Tensor | None,
    d_normalized: Tensor | None,
    d_residual: Tensor | None,
    r_old: Tensor,
    y: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    gamma: Tensor,
    p: Tensor,
    h: Tensor,
    scales: Tensor,
    controller_rms: str,
    fusion_mode: str,
    numeric_profile: str,
    trainable: bool,
) -> _Gradients:
    parameters = (weight, alpha_pre, alpha_post, alpha_res, bias, gamma)
    batch = batch_of(r_old, y, parameters, Modes(controller_rms, fusion_mode, numeric_profile).trained(trainable))
    arriving = GradBoundary(
        arrived(d_r_new, r_old, *r_old.shape, dtype=BF16),
        arrived(d_normalized, r_old, *y.shape, dtype=BF16),
        arrived(d_residual, r_old, *y.shape, dtype=BF16),
    )
    ops: Any = backend_for(r_old.device.type, numeric_profile)
    saved = saved_again(ops, batch, p, h, scales)
    if hasattr(ops, "mhc_block_backward"):
        grads = ops.mhc_block_backward(batch, saved, arriving)
    else:
        grads = composition.mhc_block_backward(batch, saved, arriving, ops=ops)
    d_r, d_y = stored(grads["d_r_old"], BF16), stored(grads["dy_sublayer"], BF16)
    return (d_r, d_y, *controller_grads(grads, r_old), stored(grads["d_gamma"], gamma.dtype))


def _backward_fake(*inputs: Any) -> _Gradients:
    r_old, y, *controller, gamma = inputs[3:11]
    fakes = controller_fakes(controller, trainable=inputs[-1])
    return (r_old.new_empty(r_old.shape), y.new_empty(y.shape), *fakes, gamma.new_empty(gamma.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.controller_rms, ctx.fusion_mode, ctx.numeric_profile = inputs
    kept = output[3:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, *kept)


def _formula(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    trainable = any(ctx.needs_input_grad[2:7])
    names = ctx.controller_rms, ctx.fusion_mode, ctx.numeric_profile, trainable
    return needed(ctx, _op_bwd(*grads[:3], *ctx.saved_tensors, *names))


_op, _op_bwd = define("mhc_block", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
