"""``fixed_k_gemm`` as a differentiable operation."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import ORACLE_PROFILE
from rl_engine.mhc.ops.define import FP32, define, differentiate, needed, stored
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor


def fixed_k_gemm(x: Tensor, w: Tensor, *, numeric_profile: str = ORACLE_PROFILE) -> Tensor:
    """FP32 ``[M, N]``: ``fold_k x[m, k] * w[n, k]`` of ``x[M, K]`` and ``w[N, K]``, each BF16 or FP32.

    A gradient is rounded once, to the dtype of its input. Errors: those of the operator, and ``NotImplementedError``
    ("fail-closed") where no backend is registered.
    """
    out: Tensor = _op(x, w, numeric_profile)
    return out


def _forward(x: Tensor, w: Tensor, numeric_profile: str) -> Tensor:
    return stored(backend_for(x.device.type, numeric_profile).fixed_k_gemm_fwd(x, w), FP32)


def _forward_fake(x: Tensor, w: Tensor, numeric_profile: str) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=FP32)


def _backward(d_out: Tensor, x: Tensor, w: Tensor, numeric_profile: str) -> tuple[Tensor, Tensor]:
    dx, dw = backend_for(x.device.type, numeric_profile).fixed_k_gemm_bwd(d_out, x, w)
    return stored(dx, x.dtype), stored(dw, w.dtype)


def _backward_fake(d_out: Tensor, x: Tensor, w: Tensor, numeric_profile: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.numeric_profile = inputs
    ctx.save_for_backward(*tensors)


def _formula(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return needed(ctx, _op_bwd(d_out, *ctx.saved_tensors, ctx.numeric_profile))


_op, _op_bwd = define("fixed_k_gemm", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
