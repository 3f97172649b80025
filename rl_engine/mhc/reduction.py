"""The two reduction trees of the contract, and no others.

- **Long reductions** (over K, D, N or tokens): one FP32 accumulator starting at ``+0``, indices ascending,
  ``acc = acc + a*b``; the product and the sum are rounded separately.
- **Four-element stream reductions**: ``(a0 + a1) + (a2 + a3)``.

A long reduction is a Python loop over the reduced axis only. Everything else is a lane: chains that share an axis are
stacked into one fold, and each lane's bits depend on its own operands alone.

BF16 operands are widened (exactly) to FP32; any other floating dtype is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from rl_engine.mhc.float_mode import require_subnormals

HC_MULT = 4
LONG_REDUCTION_ORDER = "serial-ascending-left-fold"
STREAM4_TREE = "(a0+a1)+(a2+a3)"

_LANES_AT_ONCE = 1 << 11
_TERMS_AT_ONCE = (1 << 15) - 1
"""Lanes folded side by side, and terms formed ahead of the fold.

They bound memory and keep every torch call small enough to stay in a cache and on one thread. They cannot move a bit:
lanes are independent and each step is still one add.
"""


def widen(name: str, t: torch.Tensor) -> torch.Tensor:
    """``t`` as FP32: BF16 is widened exactly, FP32 is returned as it is, anything else is a ``TypeError``."""
    if t.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{name}: got dtype {t.dtype}, want torch.float32 or torch.bfloat16")
    return t.to(torch.float32)


def serial_fold(
    terms: Callable[[int, int, slice], torch.Tensor], length: int, lanes: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Left fold of ``length`` FP32 terms, ascending, from ``+0``, in every lane; one rounding per step.

    The result has shape ``lanes``, at least 1-D. ``terms(start, stop, some)`` returns the already rounded FP32 terms of
    those steps for the lanes that the slice ``some`` of the first lane axis selects: ``[stop - start, *lanes[some]]``.
    """
    result = torch.zeros(tuple(lanes), dtype=torch.float32, device=device)
    width = max(1, math.prod(lanes[1:]))
    rows = max(1, _LANES_AT_ONCE // width)
    for first in range(0, lanes[0], rows):
        some = slice(first, min(first + rows, lanes[0]))
        acc = result[some]
        steps = max(1, _TERMS_AT_ONCE // (width * (some.stop - first)))
        for start in range(0, length, steps):
            for term in terms(start, min(start + steps, length), some).unbind(0):
                acc.add_(term)
    return result


@torch.no_grad()
def fixed_sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over ``dim`` in ascending order: FP32 or BF16 ``[..., n, ...]`` to FP32 ``[...]``.

    Rounds once per addition. A ``TypeError`` names another dtype, a ``ValueError`` a 0-d tensor or a bad ``dim``.
    """
    require_subnormals()
    steps = _along(widen("x", x), dim)
    lanes = steps.reshape(steps.shape[0], math.prod(steps.shape[1:]))
    folded = serial_fold(lambda lo, hi, some: lanes[lo:hi, some], lanes.shape[0], lanes.shape[1:], x.device)
    return folded.reshape(steps.shape[1:])


@torch.no_grad()
def fixed_sumsq(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum of squares over ``dim`` in ascending order, FP32 ``[...]``; each square rounds before it is added."""
    require_subnormals(x.numel())
    wide = widen("x", x)
    return fixed_sum(wide * wide, dim)


@torch.no_grad()
def fixed_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``out[m, n] = fold_k a[m, k] * b[n, k]``: ``a[M, K]``, ``b[N, K]`` (FP32 or BF16) to FP32 ``[M, N]``.

    K ascending from ``+0``; product and sum round separately. A rank other than 2, or a K mismatch, is a
    ``ValueError``.
    """
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"fixed_dot: got shapes {tuple(a.shape)} and {tuple(b.shape)}, want [M, K] and [N, K]")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"fixed_dot: K of a is {a.shape[1]}, K of b is {b.shape[1]}; they must agree")
    require_subnormals()
    rows, columns = _along(widen("a", a), 1), _along(widen("b", b), 1)
    return serial_fold(
        lambda lo, hi, some: rows[lo:hi, some, None] * columns[lo:hi, None, :],
        a.shape[1],
        (a.shape[0], b.shape[0]),
        a.device,
    )


@torch.no_grad()
def stream4_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``(a0 + a1) + (a2 + a3)`` of four FP32 tensors that broadcast; another number of parts is a ``ValueError``."""
    a0, a1, a2, a3 = _four("stream4_sum", parts)
    require_subnormals(a0.numel())
    return (a0 + a1) + (a2 + a3)


@torch.no_grad()
def stream4_sum_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``stream4_sum`` over an axis of length 4, which is removed: FP32 ``[..., 4, ...]`` to FP32 ``[...]``."""
    return stream4_sum(_split4(x, dim))


@torch.no_grad()
def stream4_max(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The maximum over an axis of length 4 on the same tree, FP32; a NaN wins, and of two equal values the later."""
    a0, a1, a2, a3 = _four("stream4_max", _split4(x, dim))
    return _larger(_larger(a0, a1), _larger(a2, a3))


def _along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A contiguous copy of ``x`` with ``dim`` first, so that a step of the fold is one contiguous row."""
    if x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise ValueError(f"cannot reduce over dim {dim} of a tensor of shape {tuple(x.shape)}")
    return x.movedim(dim, 0).contiguous()


def _split4(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    if x.dim() == 0 or not -x.dim() <= dim < x.dim() or x.shape[dim] != HC_MULT:
        raise ValueError(f"stream reduction over dim {dim} of shape {tuple(x.shape)}: want an axis of length {HC_MULT}")
    return x.unbind(dim)


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The larger of two; ``torch.maximum`` leaves the sign of a zero to its code path."""
    return torch.where((a > b) | torch.isnan(a), a, b)


def _four(name: str, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if len(parts) != HC_MULT:
        raise ValueError(f"{name}: got {len(parts)} parts, want {HC_MULT}")
    for i, part in enumerate(parts):
        if part.dtype != torch.float32:
            raise TypeError(f"{name}: parts[{i}] has dtype {part.dtype}, want torch.float32")
    return tuple(parts)
