"""The embedding as four equal streams, with the contract's tree as its gradient."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import HC_MULT, ORACLE_PROFILE
from rl_engine.mhc.ops.define import BF16, FP32, define, differentiate, needed, stored
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor


def expand_streams(x: Tensor, *, numeric_profile: str = ORACLE_PROFILE) -> Tensor:
    """BF16 ``[T, 4, D]`` of BF16 ``x[T, D]``: each stream a copy of ``x``.

    The gradient of ``x`` is ``(G[0] + G[1]) + (G[2] + G[3])`` in FP32, rounded to BF16 once; ``torch.sum`` would pin
    no order. Errors: ``ValueError`` or ``TypeError`` for another rank or dtype, and ``NotImplementedError``
    ("fail-closed") where no backend is registered.
    """
    if x.dim() != 2:
        raise ValueError(f"expand_streams: x: got shape {tuple(x.shape)}, want [T, D]")
    if x.dtype != BF16:
        raise TypeError(f"expand_streams: x: got dtype {x.dtype}, want {BF16}")
    streams: Tensor = _op(x, numeric_profile)
    return streams


def _forward(x: Tensor, numeric_profile: str) -> Tensor:
    backend_for(x.device.type, numeric_profile)
    return x.unsqueeze(1).expand(x.shape[0], HC_MULT, x.shape[1]).clone(memory_format=torch.contiguous_format)


def _forward_fake(x: Tensor, numeric_profile: str) -> Tensor:
    return x.new_empty((x.shape[0], HC_MULT, x.shape[1]))


def _backward(d_streams: Tensor, numeric_profile: str) -> Tensor:
    # The aggregation with PRE = 1, whose products are exact: its tree, its one rounding.
    ones = torch.ones(d_streams.shape[0], HC_MULT, dtype=FP32, device=d_streams.device)
    return stored(backend_for(d_streams.device.type, numeric_profile).h_aggregate_fwd(ones, d_streams), BF16)


def _backward_fake(d_streams: Tensor, numeric_profile: str) -> Tensor:
    return d_streams.new_empty((d_streams.shape[0], d_streams.shape[2]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.numeric_profile = inputs


def _formula(ctx: Any, d_streams: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_streams is None:
        return None, None
    return needed(ctx, (_op_bwd(d_streams, ctx.numeric_profile),))


_op, _op_bwd = define("expand_streams", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
