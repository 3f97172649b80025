"""The recipe of ``portable-fp32-mhc-v1``: functions defined by mathematics, not by a library.

``exp``, ``rsqrt`` and ``sqrt`` are the correctly rounded (nearest even) FP32 values, ``sigmoid(x) = 1 / (1 +
exp(-x))`` with each step rounded, ``div`` is IEEE. Subnormals are kept, infinities are as in IEEE 754, a NaN result
is the canonical quiet NaN (``0x7fc00000``). Any other recipe that meets this definition gives the same bytes.

This one uses FP64 add, multiply, divide and square root without FMA, and integer operations. Each function brings
its result to an unevaluated sum ``hi + lo`` of two FP64 numbers whose error is far below the distance at which any
FP32 input comes to a rounding boundary, and rounds that sum once: ``hi`` is rounded to odd, after which FP64 to
FP32 cannot round twice (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd", 2008).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from rl_engine.mhc.elementary.recipe import Elementary
from rl_engine.mhc.float_mode import require_subnormals

_CHUNK = 1 << 14
"""Elements worked on at a time, so that the temporaries stay in a cache. No bit depends on it."""

_TABLE_BITS = 7
_STEPS = 1 << _TABLE_BITS
_INVERSE_STEP = float.fromhex("0x1.71547652b82fep+7")
"""128 / ln 2."""
_STEP_HIGH = float.fromhex("0x1.62e42fefa0000p-8")
_STEP_LOW = float.fromhex("0x1.cf79abc9e3b3ap-47")
"""ln 2 / 128 in two parts; the first has 38 bits, so its product with a step count below 2^15 is exact."""
_ROUND_TO_INTEGER = 1.5 * 2.0**52
_EXP_LOWEST, _EXP_HIGHEST = -104.0, 89.0
"""Beyond these e^x rounds to 0 and to infinity."""
_LEADING_24_BITS = -(1 << 29)
"""Mask that keeps the leading 24 of 53 significand bits: either part times an FP32 number is exact in FP64."""


@functools.cache
def exp_table() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """``2^(j/128)`` for j = 0..127 as sums of two FP64 numbers, from integer arithmetic alone."""
    scale = 2 * 160
    root = 1 << (scale + 1)
    for _ in range(_TABLE_BITS):
        root = math.isqrt(root << scale)
    high, low, power = [], [], 1 << scale
    for _ in range(_STEPS):
        top = float(power)
        high.append(math.ldexp(top, -scale))
        low.append(math.ldexp(float(power - int(top)), -scale))
        power = (power * root) >> scale
    return tuple(high), tuple(low)


def exp(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded FP32 value of e^x, elementwise, any shape.

    ``x = k ln2/128 + r``, ``e^x = 2^(k/128) * e^r`` with a table for the fraction of ``k/128`` and a polynomial of
    degree 6 in ``r``; relative error below 2^-59 before the one rounding.
    """
    return _by_chunk("exp", _exp_chunk, x)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded FP32 value of 1/sqrt(x), elementwise, any shape; ``rsqrt(-0)`` is ``-inf``.

    A first value with 24 bits, its exact residual ``1 - x*y*y``, and two terms of the series in it.
    """
    return _by_chunk("rsqrt", _rsqrt_chunk, x)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The IEEE FP32 square root, elementwise, any shape.

    The FP64 root rounded to FP32. No FP32 input has a root within 3 FP64 ULPs of a rounding boundary, so this holds
    for a library root that is off by one too.
    """
    return _by_chunk("sqrt", lambda part: torch.sqrt(part.double()).to(torch.float32), x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))`` with each step rounded to FP32, elementwise, any shape."""
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return div(one, one + exp(-_fp32("sigmoid", x)))


def div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The IEEE FP32 quotient of two tensors that broadcast."""
    require_subnormals(max(a.numel(), b.numel()))
    return _canonical(torch.div(_fp32("dividend", a), _fp32("divisor", b)))


def _exp_chunk(part: torch.Tensor) -> torch.Tensor:
    x = part.double().clamp(_EXP_LOWEST, _EXP_HIGHEST)
    steps = (x * _INVERSE_STEP + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER
    r, r_low = _two_sum(x - steps * _STEP_HIGH, steps * -_STEP_LOW)
    series = 1 / 24 + r * (1 / 120 + r * (1 / 720))
    tail = r_low + (r * r) * (0.5 + r * (1 / 6 + r * series))
    count = steps.to(torch.int64)
    high, low = _table_on(part.device)
    row = count & (_STEPS - 1)
    top, below = high[row], low[row]
    rest = top * r + (top * tail + (below + below * r))
    hi = top + rest
    lo = rest - (hi - top)
    scale = ((count >> _TABLE_BITS) + 1023 << 52).view(torch.float64)
    return torch.where(torch.isnan(part), part, _round_once(hi * scale, lo * scale))


def _rsqrt_chunk(part: torch.Tensor) -> torch.Tensor:
    x = part.double()
    library = 1.0 / torch.sqrt(x)
    y = library.to(torch.float32).double()
    square = y * y
    high = (square.view(torch.int64) & _LEADING_24_BITS).view(torch.float64)
    residual = (1.0 - x * high) - x * (square - high)
    correction = y * (residual * 0.5 + (residual * residual) * 0.375)
    hi = y + correction
    lo = correction - (hi - y)
    ordinary = (x > 0) & (x < math.inf)
    return torch.where(ordinary, _round_once(hi, lo), library.to(torch.float32))


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``a + b`` rounded, and its exact error (Knuth)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _round_once(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """``hi + lo`` (``hi > 0``, ``|lo|`` at most half an ULP of it) rounded to FP32: ``hi`` to odd first."""
    bits = hi.view(torch.int64)
    odd = (bits - (lo < 0).to(torch.int64)) | 1
    return torch.where(lo == 0, bits, odd).view(torch.float64).to(torch.float32)


def _by_chunk(name: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    require_subnormals()
    flat = _fp32(name, x).reshape(-1)
    result = torch.empty_like(flat)
    for start in range(0, flat.numel(), _CHUNK):
        result[start : start + _CHUNK] = function(flat[start : start + _CHUNK])
    return _canonical(result).reshape(x.shape)


def _canonical(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.isnan(x), math.nan)


def _fp32(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"{name}: got dtype {x.dtype}, want torch.float32")
    return x.detach().contiguous()


def _table_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = exp_table()
    return torch.tensor(high, dtype=torch.float64, device=device), torch.tensor(low, dtype=torch.float64, device=device)


PORTABLE = Elementary("correctly-rounded", exp, sigmoid, rsqrt, sqrt, div)
