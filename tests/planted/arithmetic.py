"""Arithmetic in the contract's order and in the orders that kernels are wrongly written in.

A fold takes ``a`` and ``b`` and adds the products over their first axis: ``[K, ...] x [K, ...] -> [...]``, broadcast. A
store turns FP32 into BF16. Each of the wrong ones is what a real kernel does, spelled out step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Fold = Callable[[Tensor, Tensor], Tensor]
Store = Callable[[Tensor], Tensor]
Tree = Callable[[Sequence[Tensor]], Tensor]


def constant(value: float, like: Tensor) -> Tensor:
    """``value`` rounded to FP32 once, as a tensor, so that no operation widens it or inverts it."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def inverse(x: Tensor) -> Tensor:
    return constant(1.0, x) / x


# --- folds ---


def _start(a: Tensor, b: Tensor) -> Tensor:
    return torch.zeros(torch.broadcast_shapes(a.shape[1:], b.shape[1:]), dtype=torch.float32, device=a.device)


def ascending(a: Tensor, b: Tensor) -> Tensor:
    """The contract's: one accumulator from +0, product and sum rounded separately."""
    total = _start(a, b)
    for x, y in zip(a, b, strict=True):
        total = total + x * y
    return total


def descending(a: Tensor, b: Tensor) -> Tensor:
    return ascending(a.flip(0), b.flip(0))


def split(a: Tensor, b: Tensor) -> Tensor:
    """Split-K: four partial folds, added at the end."""
    total = _start(a, b)
    for x, y in zip(a.tensor_split(4), b.tensor_split(4), strict=True):
        total = total + ascending(x, y)
    return total


def interleaved(a: Tensor, b: Tensor) -> Tensor:
    """Two accumulators, for even and odd indices: what an unrolled loop does."""
    return ascending(a[0::2], b[0::2]) + ascending(a[1::2], b[1::2])


def pairwise(a: Tensor, b: Tensor) -> Tensor:
    """A balanced tree over the whole axis."""
    terms = a * b
    if not len(terms):
        return _start(a, b)
    while len(terms) > 1:
        half = len(terms) // 2
        terms = torch.cat((terms[: 2 * half : 2] + terms[1 : 2 * half : 2], terms[2 * half :]))
    return terms[0]


def fused(a: Tensor, b: Tensor) -> Tensor:
    """Ascending, with each product and sum rounded once: FMA."""
    total = _start(a, b)
    for x, y in zip(a, b, strict=True):
        total = fma(x, y, total)
    return total


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x*y + z`` of finite FP32 tensors, rounded once.

    The product is exact in FP64. The sum is rounded to odd there (to nearest, then moved to the odd neighbour on the
    side of the error, which Knuth's two-sum gives exactly), so rounding it again to FP32 is as good as rounding once.
    """
    product, addend = x.double() * y.double(), z.double()
    product, addend = torch.broadcast_tensors(product, addend)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    outward = torch.where((error > 0) == (total > 0), 1, -1)
    to_odd = (error != 0) & (bits % 2 == 0)
    return torch.where(to_odd, bits + outward, bits).view(torch.float64).float()


def bf16_accumulator(a: Tensor, b: Tensor) -> Tensor:
    total = _start(a, b)
    for x, y in zip(a, b, strict=True):
        total = through_bf16(total + x * y)
    return total


def fp64_accumulator(a: Tensor, b: Tensor) -> Tensor:
    """More accurate than the contract, and therefore wrong."""
    return (a.double() * b.double()).sum(0).float()


def rescaled(a: Tensor, b: Tensor) -> Tensor:
    """A fold that divides by the largest magnitude first, as ``hypot`` does, so that no square overflows."""
    largest = a.abs().amax(0).clamp(min=1e-30)
    return ascending(a / largest, b / largest) * largest * largest


# --- four streams ---


def tree4(parts: Sequence[Tensor]) -> Tensor:
    """The contract's: ``(a0 + a1) + (a2 + a3)``."""
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


def left4(parts: Sequence[Tensor]) -> Tensor:
    return ((parts[0] + parts[1]) + parts[2]) + parts[3]


# --- stores ---


def nearest_even(t: Tensor) -> Tensor:
    """The contract's."""
    return t.to(torch.bfloat16)


def through_bf16(t: Tensor) -> Tensor:
    return t.to(torch.bfloat16).float()


def truncated(t: Tensor) -> Tensor:
    """Round toward zero: the upper half of the encoding."""
    return (t.contiguous().view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)


def half_away(t: Tensor) -> Tensor:
    """Round to nearest, exact ties away from zero."""
    return truncated((t.contiguous().view(torch.int32) + 0x8000).view(torch.float32))


def half_up(t: Tensor) -> Tensor:
    """Round to nearest, exact ties toward plus infinity."""
    bits = t.contiguous().view(torch.int32)
    return truncated((bits + 0x8000 - (bits < 0).to(torch.int32)).view(torch.float32))


def unrounded(t: Tensor) -> Tensor:
    """No store at all: FP32 leaves the operator."""
    return t


def flushed(t: Tensor) -> Tensor:
    """FP32 with every subnormal made zero."""
    return torch.where(t.abs() < 2.0**-126, t * 0.0, t)
