"""The merging of the streams at a model's end as one differentiable operation.

The contract has no operator for it, and needs none: it is ``mhc_pre`` of a controller whose first four rows are the
head's and whose others are zero, its POST and C left unused. So every byte is one that the contract defines.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import HC_MULT, ORACLE_PROFILE, PROD_CONTROLLER_N, RELEASED_RMS, ResidualBatch
from rl_engine.mhc.operators import Saved
from rl_engine.mhc.ops.composite import Modes, batch_of, controller_grads, fakes_of, kept_fake, kept_of, saved_again
from rl_engine.mhc.ops.define import BF16, FP32, define, differentiate, needed, stored, unobserved
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor
_UNFUSED = "unfused"
_Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def mhc_head(
    r_old: Tensor,
    weight: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    controller_rms: str = RELEASED_RMS,
    numeric_profile: str = ORACLE_PROFILE,
) -> Tensor:
    """BF16 ``hidden[T, D]`` of BF16 ``r_old[T, 4, D]``: ``tree_i(PRE[i] * R[i])``, rounded to BF16 once.

    ``PRE = sigmoid(((r * P) * alpha) + bias) + eps`` of ``P = x W^T`` and the controller's scale r, as ``mhc_pre`` has
    it; FP32 ``weight[4, 4D]``, ``alpha[1]``, ``bias[4]``. The gradient of ``r_old`` is the FP32 sum of its legs,
    rounded to BF16 once; the others are FP32. Where no parameter needs a gradient the backward runs as
    ``mixer-frozen``. The fold computes all 24 rows.

    Errors: ``ValueError`` or ``TypeError`` for another shape or dtype; ``NotImplementedError`` ("fail-closed") where no
    backend is registered or the registered one does not declare what is asked for.
    """
    arguments = r_old, weight, alpha, bias, controller_rms, numeric_profile
    if unobserved(r_old, weight, alpha, bias):
        return _run(*arguments)[0]
    hidden: Tensor
    hidden, *_ = _op(*arguments)
    return hidden


def _padded(r_old: Tensor, weight: Tensor, alpha: Tensor, bias: Tensor, modes: Modes) -> ResidualBatch:
    k = HC_MULT * (r_old.shape[-1] if r_old.dim() else 0)
    for name, t, shape in (("weight", weight, (HC_MULT, k)), ("alpha", alpha, (1,)), ("bias", bias, (HC_MULT,))):
        if t.dtype != FP32:
            raise TypeError(f"mhc_head: {name}: got dtype {t.dtype}, want {FP32}")
        if t.shape != shape:
            raise ValueError(f"mhc_head: {name}: got shape {tuple(t.shape)}, want {shape}")
    rows = weight.new_zeros((PROD_CONTROLLER_N, k))
    rows[:HC_MULT] = weight
    biases, zero = bias.new_zeros(PROD_CONTROLLER_N), alpha.new_zeros(1)
    biases[:HC_MULT] = bias
    # The batch wants a gamma, which nothing here reads.
    gamma = r_old.new_ones(k // HC_MULT, dtype=BF16)
    parameters = (rows, alpha, zero, zero, biases, gamma)
    return batch_of(r_old, None, parameters, modes)


def _run(
    r_old: Tensor, weight: Tensor, alpha: Tensor, bias: Tensor, controller_rms: str, numeric_profile: str
) -> tuple[Tensor, Saved]:
    batch = _padded(r_old, weight, alpha, bias, Modes(controller_rms, _UNFUSED, numeric_profile))
    hidden, *_, saved = backend_for(r_old.device.type, numeric_profile).mhc_pre_fwd(batch)
    return stored(hidden, BF16), saved


def _forward(
    r_old: Tensor, weight: Tensor, alpha: Tensor, bias: Tensor, controller_rms: str, numeric_profile: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, saved = _run(r_old, weight, alpha, bias, controller_rms, numeric_profile)
    return hidden, *kept_of(saved, controller_rms)


def _forward_fake(r_old: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return r_old.new_empty((r_old.shape[0], r_old.shape[2])), *kept_fake(r_old, norm=False)


def _backward(
    d_hidden: Tensor,
    r_old: Tensor,
    weight: Tensor,
    alpha: Tensor,
    bias: Tensor,
    p: Tensor,
    h: Tensor,
    scales: Tensor,
    controller_rms: str,
    numeric_profile: str,
    trainable: bool,
) -> _Gradients:
    modes = Modes(controller_rms, _UNFUSED, numeric_profile).trained(trainable)
    batch = _padded(r_old, weight, alpha, bias, modes)
    ops = backend_for(r_old.device.type, numeric_profile)
    saved = saved_again(ops, batch, p, h, scales, hidden=False)
    d_post, d_c = torch.zeros_like(saved["post"]), torch.zeros_like(saved["c"])
    grads = ops.mhc_pre_bwd(d_hidden, d_post, d_c, batch, saved)
    d_rows, d_alpha, _, _, d_biases = controller_grads(grads, r_old)
    d_r = grads["d_r_old"]
    assert d_r is not None
    return stored(d_r, BF16), d_rows[:HC_MULT].clone(), d_alpha, d_biases[:HC_MULT].clone()


def _backward_fake(*inputs: Any) -> _Gradients:
    r_old, *parameters = inputs[1:5]
    d_weight, d_alpha, d_bias = fakes_of(parameters, trainable=inputs[-1])
    return r_old.new_empty(r_old.shape), d_weight, d_alpha, d_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.controller_rms, ctx.numeric_profile = inputs
    kept = output[1:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, *kept)


def _formula(ctx: Any, d_hidden: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    trainable = any(ctx.needs_input_grad[1:4])
    return needed(ctx, _op_bwd(d_hidden, *ctx.saved_tensors, ctx.controller_rms, ctx.numeric_profile, trainable))


_op, _op_bwd = define("mhc_head", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
