"""The first half of a block as one differentiable operation: ``mhc_pre``, then ``rmsnorm_residual``.

Why there is a link. The contract sums both legs of the gradient of ``r_old``, the one through ``mhc_pre`` and the one
through ``mhc_post``, in FP32 and rounds to BF16 once. Autograd would round each leg to BF16 and add in BF16. So the
second half, ``mhc_post_linked``, hands the gradient that arrives at it to the backward of the first, as the gradient of
``link``, an output without memory or content of its own; that backward computes the second leg too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_engine.mhc.block import Grads
from rl_engine.mhc.contract import HC_MULT, ORACLE_PROFILE, P1_RMS, ResidualBatch
from rl_engine.mhc.operators import Saved
from rl_engine.mhc.ops.composite import (
    Modes,
    Parameters,
    batch_of,
    controller_fakes,
    controller_grads,
    kept_fake,
    kept_of,
    saved_again,
)
from rl_engine.mhc.ops.define import BF16, FP32, arrived, define, differentiate, needed, stored, unobserved
from rl_engine.mhc.ops.registry import backend_for
from rl_engine.mhc.provider import MHCProvider

Tensor = torch.Tensor
_FUSION_MODE = "fused-pre-norm"
_Ran = tuple[Tensor, Tensor, Tensor, Tensor]
_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_WithKept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def mhc_pre_rmsnorm(
    r_old: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    gamma: Tensor,
    *,
    controller_rms: str = P1_RMS,
    numeric_profile: str = ORACLE_PROFILE,
) -> _Outputs:
    """``(normalized[T, D], residual[T, D], post[T, 4], c[T, 4, 4], link)`` of BF16 ``r_old[T, 4, D]``.

    FP32 ``weight[24, 4D]``, ``alpha_*[1]``, ``bias[24]``; ``gamma[D]`` BF16 or FP32. normalized and residual are BF16,
    each rounded once; post and c are FP32. ``link``, BF16 ``[T, 4, D]`` of stride 0, is for one ``mhc_post_linked``.

    The gradient of ``r_old`` is the FP32 sum of every leg, the link's last, rounded to BF16 once; that of ``gamma`` is
    rounded to its dtype, the others are FP32. Where no controller parameter needs a gradient the backward runs as
    ``mixer-frozen``. A gradient that does not arrive is one of zeros; a link's that does not is no leg at all.

    Errors: those of ``ResidualBatch.validate``; ``NotImplementedError`` ("fail-closed") where no backend is registered
    or the registered one does not declare what is asked for.
    """
    tensors = (r_old, weight, alpha_pre, alpha_post, alpha_res, bias, gamma)
    if unobserved(*tensors):
        outputs, _ = _run(r_old, tensors[1:], controller_rms, numeric_profile)
        return *outputs, _zero(r_old.device).expand_as(r_old)
    normalized, residual, post, c, link, *_ = _op(*tensors, controller_rms, numeric_profile)
    return normalized, residual, post, c, link


def _run(r_old: Tensor, parameters: Parameters, controller_rms: str, numeric_profile: str) -> tuple[_Ran, Saved]:
    batch = batch_of(r_old, None, parameters, Modes(controller_rms, _FUSION_MODE, numeric_profile))
    ops = backend_for(r_old.device.type, numeric_profile)
    _, normalized, residual, post, c, saved = ops.mhc_pre_rmsnorm_fused_fwd(batch)
    return (stored(normalized, BF16), stored(residual, BF16), stored(post, FP32), stored(c, FP32)), saved


@functools.lru_cache(maxsize=16)
def _zero(device: torch.device) -> Tensor:
    """For links that no gradient will pass: they may share it, as nothing can be written to an expanded tensor."""
    with torch.inference_mode(False):  # whoever comes first, later calls may record gradients
        return torch.zeros((), dtype=BF16, device=device)


def _new_link(r_old: Tensor) -> Tensor:
    return r_old.new_zeros(()).expand_as(r_old)


def _forward(
    r_old: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    gamma: Tensor,
    controller_rms: str,
    numeric_profile: str,
) -> _WithKept:
    parameters = (weight, alpha_pre, alpha_post, alpha_res, bias, gamma)
    outputs, saved = _run(r_old, parameters, controller_rms, numeric_profile)
    return (*outputs, _new_link(r_old), *kept_of(saved, controller_rms))


def _forward_fake(r_old: Tensor, *_: object) -> _WithKept:
    tokens, hidden = r_old.shape[0], r_old.shape[2]
    normalized, residual = (r_old.new_empty((tokens, hidden)) for _ in range(2))
    post = r_old.new_empty((tokens, HC_MULT), dtype=FP32)
    c = r_old.new_empty((tokens, HC_MULT, HC_MULT), dtype=FP32)
    return (normalized, residual, post, c, _new_link(r_old), *kept_fake(r_old))


def _backward(
    d_normalized: Tensor | None,
    d_residual: Tensor | None,
    d_post: Tensor | None,
    d_c: Tensor | None,
    d_r_new: Tensor | None,
    r_old: Tensor,
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
    numeric_profile: str,
    trainable: bool,
) -> _Gradients:
    parameters = (weight, alpha_pre, alpha_post, alpha_res, bias, gamma)
    modes = Modes(controller_rms, _FUSION_MODE, numeric_profile).trained(trainable)
    batch = batch_of(r_old, None, parameters, modes)
    ops = backend_for(r_old.device.type, numeric_profile)
    fused: Any = getattr(ops, "mhc_pre_rmsnorm_fused_bwd", None)
    saved = saved_again(ops, batch, p, h, scales, hidden=fused is None)
    tokens, _, hidden = r_old.shape
    arriving = (
        arrived(d_normalized, r_old, tokens, hidden, dtype=BF16),
        arrived(d_residual, r_old, tokens, hidden, dtype=BF16),
        arrived(d_post, r_old, tokens, HC_MULT),
        arrived(d_c, r_old, tokens, HC_MULT, HC_MULT),
    )
    if fused is not None:
        grads: Grads = fused(*arriving, batch, saved, d_r_new=d_r_new, streams_dtype=BF16)
    else:
        grads = _composed(ops, *arriving, batch, saved, d_r_new)
    d_r, d_gamma = grads["d_r_old"], grads["d_gamma"]
    assert d_r is not None and d_gamma is not None
    return (stored(d_r, BF16), *controller_grads(grads, r_old), stored(d_gamma, gamma.dtype))


def _composed(
    ops: MHCProvider,
    d_normalized: Tensor,
    d_residual: Tensor,
    d_post: Tensor,
    d_c: Tensor,
    batch: ResidualBatch,
    saved: Saved,
    d_r_new: Tensor | None,
) -> Grads:
    """The gradients over the contract's operators, all FP32; ``d_r_old`` is the sum that ``mhc_block_backward`` has."""
    d_hidden, d_gamma = ops.rmsnorm_residual_bwd(
        d_normalized, d_residual, saved["hidden"], batch.norm.gamma, saved["norm"]
    )
    grads = ops.mhc_pre_bwd(d_hidden, d_post, d_c, batch, saved)
    d_r = grads["d_r_old"]
    if d_r is not None and d_r_new is not None:
        # No value of y reaches this leg: the stand-in of the batch will do.
        d_r = d_r + ops.mhc_post_bwd(d_r_new, batch.r_old, batch.y_sublayer, saved["c"], saved["post"])[0]
    return {**grads, "d_r_old": d_r, "d_gamma": d_gamma}


def _backward_fake(*inputs: Any) -> _Gradients:
    r_old, *controller, gamma = inputs[5:12]
    fakes = controller_fakes(controller, trainable=inputs[-1])
    return (r_old.new_empty(r_old.shape), *fakes, gamma.new_empty(gamma.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.controller_rms, ctx.numeric_profile = inputs
    kept = output[5:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, *kept)


def _formula(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    trainable = any(ctx.needs_input_grad[1:6])
    names = ctx.controller_rms, ctx.numeric_profile, trainable
    return needed(ctx, _op_bwd(*grads[:5], *ctx.saved_tensors, *names))


_op, _op_bwd = define("mhc_pre_rmsnorm", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
