"""``fp32_gemm_rms`` as a differentiable operation."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import MHC_EPS, ORACLE_PROFILE, P1_RMS, PROD_CONTROLLER_N, RELEASED_RMS
from rl_engine.mhc.operators import Saved
from rl_engine.mhc.ops.define import FP32, arrived, define, differentiate, needed, stored
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor


def fp32_gemm_rms(
    x_flat: Tensor,
    weight: Tensor,
    eps: float = MHC_EPS,
    *,
    controller_rms: str = P1_RMS,
    numeric_profile: str = ORACLE_PROFILE,
) -> tuple[Tensor, Tensor]:
    """``(p[T, 24], r[T])``, FP32: the projection of ``x_flat[T, K]`` (BF16 or FP32) and its RMS scale.

    ``weight[24, K]`` is FP32. The gradient of a BF16 ``x_flat`` is rounded once, to BF16; all else is FP32. Errors:
    those of the operator, and ``NotImplementedError`` ("fail-closed") where no backend is registered.
    """
    p, r, _ = _op(x_flat, weight, eps, controller_rms, numeric_profile)
    return p, r


def scale_of(saved: Saved, controller_rms: str) -> Tensor:
    """What lies beneath the RMS scale in a forward's ``saved``: ``q[T]``, or ``mean[T]`` in the released formula."""
    scale: Tensor = saved[_SCALE[controller_rms]]
    return scale


def saved_of(r: Tensor, scale: Tensor, k: int, controller_rms: str) -> Saved:
    """The ``saved`` of ``fp32_gemm_rms_fwd`` as far as a backward reads it, of ``r[T]`` and the ``scale_of`` it."""
    return {"r": r, _SCALE[controller_rms]: scale, "k": k, **named_formula(controller_rms)}


def named_formula(controller_rms: str) -> dict[str, str]:
    """The formula by its name, as arguments and in ``saved``; nothing for P1's, as older operators know no other."""
    return {} if controller_rms == P1_RMS else {"controller_rms": controller_rms}


_SCALE = {P1_RMS: "q", RELEASED_RMS: "mean"}


def _forward(
    x_flat: Tensor, weight: Tensor, eps: float, controller_rms: str, numeric_profile: str
) -> tuple[Tensor, Tensor, Tensor]:
    ops = backend_for(x_flat.device.type, numeric_profile)
    p, r, saved = ops.fp32_gemm_rms_fwd(x_flat, weight, eps, **named_formula(controller_rms))
    # A copy of the last: a provider may return a tensor and save the same one.
    return stored(p, FP32), stored(r, FP32), scale_of(saved, controller_rms).clone()


def _forward_fake(
    x_flat: Tensor, weight: Tensor, eps: float, controller_rms: str, numeric_profile: str
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x_flat.shape[0]
    p, r, scale = (weight.new_empty(shape) for shape in ((tokens, PROD_CONTROLLER_N), (tokens,), (tokens,)))
    return p, r, scale


def _backward(
    d_p: Tensor | None,
    d_r: Tensor | None,
    x_flat: Tensor,
    weight: Tensor,
    r: Tensor,
    scale: Tensor,
    controller_rms: str,
    numeric_profile: str,
) -> tuple[Tensor, Tensor]:
    tokens, k = x_flat.shape
    dp, dr = arrived(d_p, x_flat, tokens, PROD_CONTROLLER_N), arrived(d_r, x_flat, tokens)
    saved = saved_of(r, scale, k, controller_rms)
    dx, dw = backend_for(x_flat.device.type, numeric_profile).fp32_gemm_rms_bwd(dp, dr, x_flat, weight, saved)
    return stored(dx, x_flat.dtype), stored(dw, FP32)


def _backward_fake(
    d_p: Tensor | None,
    d_r: Tensor | None,
    x_flat: Tensor,
    weight: Tensor,
    r: Tensor,
    scale: Tensor,
    controller_rms: str,
    numeric_profile: str,
) -> tuple[Tensor, Tensor]:
    return x_flat.new_empty(x_flat.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_flat, weight, _, *ctx.names = inputs
    _, r, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.save_for_backward(x_flat, weight, r, scale)


def _formula(ctx: Any, d_p: Tensor | None, d_r: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    return needed(ctx, _op_bwd(d_p, d_r, *ctx.saved_tensors, *ctx.names))


_op, _op_bwd = define("fp32_gemm_rms", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
