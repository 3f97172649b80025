"""The whole block in a few calls of the library, with the least that the backward needs kept between its two halves.

Under ``portable-fp32-mhc-v1`` a forward is one call. Under ``oracle-fp32-mhc-v1`` exp, sigmoid, sqrt and rsqrt are
torch's, so it goes by blocks of tokens through the four stages of ``mhc_block_forward``, those functions in between.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch

from rl_engine.mhc.backends.native import memory
from rl_engine.mhc.backends.native.call import (
    NO_ROWS,
    RowsTriple,
    dense,
    new_bf16,
    new_fp32,
    one_row,
    row_contiguous,
    rows,
)
from rl_engine.mhc.backends.native.operators import NativeOperators, kept, scale_of
from rl_engine.mhc.block import CONTROLLER_GRADS, Grads, require_formula
from rl_engine.mhc.checks import FP32, FP32_OR_BF16, check_tensor
from rl_engine.mhc.contract import (
    HC_MULT,
    MHC_EPS,
    PROD_CONTROLLER_N,
    RELEASED_RMS,
    ControllerParams,
    GradBoundary,
    ResidualBatch,
)
from rl_engine.mhc.operators.interface import Saved, check_arguments
from rl_engine.mhc.operators.reference import need

_FORWARD = struct.Struct("=5q2d9q5q6q2q4q2q4q")
_BACKWARD = struct.Struct("=5q9q12q3q4q8q6q7q5q")
_NO_POST, _POST, _POST_LEG = range(3)
_LAST_STAGE = 3
_BLOCK = 512
"""Tokens that go through the stages together: enough to spread the cost of a stage, few enough for the last cache."""

_SCALARS = ("s", "norm", "q", "r", "mean", "inv_rms")
_SHAPES = {"p": (24,), "h": (24,), "sig": (8,), "softmax": (4, 4), "pre": (4,), "post": (4,), "c": (4, 4)}
_ORDER = ("p", "s", "norm", "q", "r", "h", "sig", "softmax", "softmax", "pre", "post", "c", "mean", "inv_rms")
"""The small FP32 tensors in the order of ``struct mhc_block_forward_args``; exp and softmax are taken in place."""

_WIDTHS = {name: math.prod(shape) for name, shape in _SHAPES.items()} | dict.fromkeys(_SCALARS, 1)


class Forward(NamedTuple):
    """What a forward leaves: the small FP32 tensors by name, and the BF16 outputs (``None`` where not asked for).

    Under ``rsqrt-mean-plus-eps`` the mean lies in ``norm``, and ``q`` holds nothing.
    """

    small: dict[str, torch.Tensor]
    hidden: torch.Tensor
    normalized: torch.Tensor | None
    residual: torch.Tensor | None
    r_new: torch.Tensor | None


def forward(ops: NativeOperators, batch: ResidualBatch, norm: bool, mix: bool) -> Forward:
    """The forward of a validated batch: pre, then the norm and the mixing of the streams where asked for."""
    contract = batch.contract
    tokens, d = batch.tokens, contract.hidden
    small = {name: new_fp32(tokens, *shape) for name, shape in _SHAPES.items()}
    small |= zip(_SCALARS, new_fp32(len(_SCALARS), tokens).unbind(), strict=True)
    hidden, normalized, residual = (new_bf16(tokens, d) if wanted else None for wanted in (True, norm, norm))
    assert hidden is not None
    r_new = new_bf16(tokens, HC_MULT, d) if mix else None
    r_old, y = row_contiguous(batch.r_old), row_contiguous(batch.y_sublayer)
    gamma, parameters = dense(batch.norm.gamma), _parameters(batch.controller)
    outputs = ((hidden, d), (normalized, d), (residual, d), (r_new, HC_MULT * d))
    released = contract.controller_rms == RELEASED_RMS
    written = [(small[name].data_ptr(), 4 * _WIDTHS[name]) for name in _ORDER]
    if released:
        written[_ORDER.index("q")] = (0, 0)
    written += [(0, 0) if t is None else (t.data_ptr(), 2 * width) for t, width in outputs]
    read = (*one_row(gamma), *(p.data_ptr() for p in parameters))

    def call(first: int, last: int, begin: int, end: int) -> None:
        streams, sublayer = _from_row(rows(r_old), begin, 2), _from_row(rows(y), begin, 2)
        numbers = (end - begin, d, first, last, int(ops.portable), contract.mhc_eps, contract.rmsnorm_eps)
        pointers = [start + begin * step for start, step in written]
        ops.run("mhc_block_forward", _FORWARD.pack(*numbers, *streams, *sublayer, *read, *pointers))

    if ops.portable or tokens == 0:
        call(0, _LAST_STAGE, 0, tokens)
        return Forward(small, hidden, normalized, residual, r_new)
    with ops.default_float_mode():
        for begin in range(0, tokens, _BLOCK):
            end = min(begin + _BLOCK, tokens)
            part = small if tokens <= _BLOCK else {name: t[begin:end] for name, t in small.items()}
            call(0, 0, begin, end)
            if released:
                ops.fill(part["r"], "rsqrt", part["norm"])
            else:
                ops.fill(part["norm"], "sqrt", part["s"])
            call(1, 1, begin, end)
            ops.split_gates(part["h"], part["sig"], part["softmax"])
            call(2, 2, begin, end)
            if norm:
                ops.fill(part["inv_rms"], "rsqrt", part["mean"])
                call(3, 3, begin, end)
    return Forward(small, hidden, normalized, residual, r_new)


def saved_of(batch: ResidualBatch, done: Forward) -> Saved:
    """The ``saved`` dict of ``mhc_pre``: no FP32 copy of the streams, no Sinkhorn matrices."""
    small, k = done.small, batch.contract.flat_k
    formula, scale = {}, {"norm": small["norm"], "q": small["q"]}
    if batch.contract.controller_rms == RELEASED_RMS:
        formula, scale = {"controller_rms": RELEASED_RMS}, {"mean": small["norm"]}
    gemm = {"s": small["s"], **scale, "r": small["r"], "k": k, **formula}
    sig_pre, sig_post = small["sig"].split_with_sizes((HC_MULT, HC_MULT), 1)
    split = {"sig_pre": sig_pre, "sig_post": sig_post, "softmax": small["softmax"], "eps": MHC_EPS}
    named = {name: small[name] for name in ("p", "r", "h", "pre", "post", "c")}
    return {"x_flat": row_contiguous(batch.r_old).flatten(1), **named, "gemm": gemm, "sinkhorn": split, **formula}


def pre_backward(
    ops: NativeOperators,
    dhidden: torch.Tensor,
    dpost: torch.Tensor,
    dc: torch.Tensor,
    batch: ResidualBatch,
    saved: Saved,
) -> Grads:
    """The gradients of ``mhc_pre`` in one call."""
    sizes = check_arguments("mhc_pre_bwd", dhidden=dhidden, dpost=dpost, dc=dc)
    wanted = (batch.tokens, batch.contract.hidden)
    if (sizes["T"], sizes["D"]) != wanted:
        raise ValueError(f"mhc_pre_bwd: dhidden: got shape {tuple(dhidden.shape)}, want {wanted} = [T, D] of the batch")
    arriving = row_contiguous(dhidden)
    held = _Kept("mhc_pre_bwd", batch, saved)
    result = _pre_results(batch)
    small = (dense(dc), dense(dpost))
    inputs = (NO_ROWS, NO_ROWS, NO_ROWS, rows(arriving))
    outputs = (None, result["d_r_old"], None, None, None, *small)
    ops.run("mhc_block_backward", _pack(batch, held, _NO_POST, inputs, None, outputs, result))
    return result


def pre_norm_backward(
    ops: NativeOperators,
    arriving: dict[str, torch.Tensor],
    batch: ResidualBatch,
    saved: Saved,
    d_r_new: torch.Tensor | None,
    streams_dtype: torch.dtype,
) -> Grads:
    """The gradients of the norm and ``mhc_pre``, and of ``mhc_post``'s leg where ``d_r_new`` is given, in one call.

    ``arriving``: ``d_normalized, d_residual, d_post, d_c``.
    """
    operator, tokens, d = "mhc_pre_rmsnorm_fused_bwd", batch.tokens, batch.contract.hidden
    need(operator, saved, "norm")
    if streams_dtype not in FP32_OR_BF16:
        raise TypeError(f"{operator}: streams_dtype: got {streams_dtype}, want torch.float32 or torch.bfloat16")
    if d_r_new is not None:
        check_tensor(f"{operator}: d_r_new", d_r_new, (tokens, HC_MULT, d), FP32_OR_BF16)
    for name, dims in (("d_normalized", (d,)), ("d_residual", (d,)), ("d_post", (4,)), ("d_c", (4, 4))):
        check_tensor(f"{operator}: {name}", arriving[name], (tokens, *dims), FP32_OR_BF16 if dims == (d,) else FP32)
    held = _Kept(operator, batch, saved)
    inv_rms = dense(kept(operator, saved["norm"], "r", tokens))
    result = _pre_results(batch, streams_dtype)
    result["d_gamma"], d_hidden = new_fp32(d), new_fp32(tokens, d)
    again = None if "hidden" in saved else new_bf16(tokens, d)
    hidden = again if again is not None else kept(operator, saved, "hidden", tokens, d, dtype=torch.bfloat16)
    leg = None if d_r_new is None else row_contiguous(d_r_new)
    through_norm = [row_contiguous(arriving[name]) for name in ("d_normalized", "d_residual")]
    small = [dense(arriving[name]) for name in ("d_c", "d_post")]
    inputs = (NO_ROWS if leg is None else rows(leg), *map(rows, through_norm), NO_ROWS)
    outputs = (again, result["d_r_old"], None, d_hidden, result["d_gamma"], *small)
    part = _NO_POST if leg is None else _POST_LEG
    ops.run("mhc_block_backward", _pack(batch, held, part, inputs, (hidden, inv_rms), outputs, result))
    return result


def backward(ops: NativeOperators, batch: ResidualBatch, saved: Saved, grads: GradBoundary) -> Grads:
    """The gradients of the whole block in one call."""
    operator, tokens, d = "mhc_block_backward", batch.tokens, batch.contract.hidden
    need(operator, saved, "norm")
    held = _Kept(operator, batch, saved)
    hidden = kept(operator, saved, "hidden", tokens, d, dtype=torch.bfloat16)
    inv_rms = dense(kept(operator, saved["norm"], "r", tokens))
    arriving = [row_contiguous(t) for t in (grads.d_r_new, grads.d_normalized, grads.d_residual)]
    result = _pre_results(batch)
    new = {"dy_sublayer": (tokens, d), "d_hidden": (tokens, d), "d_gamma": (d,)}
    new |= {"d_c": (tokens, HC_MULT, HC_MULT), "d_post": (tokens, HC_MULT)}
    result |= {name: new_fp32(*shape) for name, shape in new.items()}
    outputs = (None, *(result[name] for name in ("d_r_old", *new)))
    inputs = (*(rows(t) for t in arriving), NO_ROWS)
    ops.run("mhc_block_backward", _pack(batch, held, _POST, inputs, (hidden, inv_rms), outputs, result))
    return result


class _Kept:
    """The tensors of ``saved`` that the backward reads, dense, and alive for as long as their pointers are used."""

    def __init__(self, operator: str, batch: ResidualBatch, saved: Saved) -> None:
        tokens = batch.tokens
        need(operator, saved, "gemm", "sinkhorn")
        require_formula(operator, batch, saved)
        split = saved["sinkhorn"]
        self.p = dense(kept(operator, saved, "p", tokens, PROD_CONTROLLER_N))
        self.q = scale_of(operator, saved["gemm"], tokens)
        small = [kept(operator, saved, "r", tokens), kept(operator, split, "softmax", tokens, HC_MULT, HC_MULT)]
        small += [kept(operator, saved, name, tokens, HC_MULT) for name in ("pre", "post")]
        small += [kept(operator, saved, "c", tokens, HC_MULT, HC_MULT)]
        self.small = [dense(t) for t in small]
        self.sig = [kept(operator, split, name, tokens, HC_MULT) for name in ("sig_pre", "sig_post")]
        self.streams = [row_contiguous(batch.r_old), row_contiguous(batch.y_sublayer)]
        self.gamma = dense(batch.norm.gamma)
        self.parameters = _parameters(batch.controller)


def _pack(
    batch: ResidualBatch,
    held: _Kept,
    post_part: int,
    arriving: tuple[RowsTriple, ...],
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    outputs: tuple[torch.Tensor | None, ...],
    result: Grads,
) -> bytes:
    """``struct mhc_block_backward_args``; ``norm``: (hidden, 1/rms) where the norm is a part of it."""
    streams = [number for t in held.streams for number in rows(t)]
    hidden, inv_rms = (NO_ROWS, 0) if norm is None else (rows(norm[0]), norm[1].data_ptr())
    incoming = [number for triple in (*arriving, hidden) for number in triple]
    weights = [p.data_ptr() for p in held.parameters[:-1]]
    q = 0 if held.q is None else held.q.data_ptr()
    small = [held.p.data_ptr(), q, *(t.data_ptr() for t in held.small)]
    sig = [number for t in held.sig for number in rows(t)]
    written = [0 if t is None else t.data_ptr() for t in (*outputs, *(result[name] for name in CONTROLLER_GRADS))]
    d_r_old = outputs[1]
    assert d_r_old is not None
    sizes = (batch.tokens, batch.contract.hidden, post_part, int(norm is not None), rows(d_r_old)[2])
    return _BACKWARD.pack(*sizes, *streams, *one_row(held.gamma), *incoming, *weights, *small, inv_rms, *sig, *written)


def _pre_results(batch: ResidualBatch, streams_dtype: torch.dtype = torch.float32) -> Grads:
    result: Grads = {"d_r_old": memory.new_tensor(tuple(batch.r_old.shape), streams_dtype)}
    if batch.contract.trainability == "mixer-frozen":
        return result | dict.fromkeys(CONTROLLER_GRADS)
    shapes = {name: (1,) for name in CONTROLLER_GRADS}
    shapes |= {"d_controller_weight": (PROD_CONTROLLER_N, batch.contract.flat_k), "d_bias": (PROD_CONTROLLER_N,)}  # type: ignore[dict-item]
    return result | {name: new_fp32(*shape) for name, shape in shapes.items()}


def _parameters(controller: ControllerParams) -> list[torch.Tensor]:
    named = (controller.weight, controller.alpha_pre, controller.alpha_post, controller.alpha_res, controller.bias)
    return [dense(t) for t in named]


def _from_row(triple: tuple[int, int, int], row: int, size: int) -> tuple[int, int, int]:
    data, stride, dtype = triple
    return data + row * stride * size, stride, dtype
