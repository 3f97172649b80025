"""exp, rsqrt, sqrt and sigmoid of one FP32 encoding, in integers and decimals, and the inputs that try them.

Nothing here is shared with the recipe: exp is ``decimal``'s with 60 digits, roots are integer roots with a sticky bit,
and each result is rounded once by ``tests.reference.scalar``.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from tests.reference.scalar import floor_log2, from_bits32, power_of_two, round_f32, to_bits32

QUIET_NAN, PLUS_INF, MINUS_INF, MINUS_ZERO, ONE = 0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 0x3F800000
HARDEST = Path(__file__).with_name("hardest_inputs.txt")

_DIGITS = Context(prec=60)
_ROOT_BITS = 200

NANS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC12345, 0xFFA00000)
MAGNITUDES = (
    *(0x00000000, 0x00000001, 0x00000002, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001),
    *(0x33000000, 0x33800000, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000, 0x40490FDB),
    *(0x42AEAC50, 0x42B17217, 0x42B17218, 0x42CFF1B4, 0x42CFF1B5, 0x42D00000, 0x7EFFFFFF, 0x7F7FFFFF, 0x7F800000),
)
SPECIALS = (*MAGNITUDES, *(bits | MINUS_ZERO for bits in MAGNITUDES), *NANS)

# e^x overflows, is the smallest normal number, half the smallest subnormal; and the ties 1 +- half an ULP.
EXP_EDGES = (0x42B17217, 0xC2AEAC50, 0xC2CFF1B4, 0x33000000, 0x33800000, 0x34000000, 0xB2800000, 0xB3000000, 0xB3800000)
POWERS_OF_FOUR = tuple((127 + 2 * k) << 23 for k in range(-60, 61, 10))


def exp(bits: int) -> int:
    x = from_bits32(bits)
    if x.is_nan:
        return QUIET_NAN
    if x.is_inf:
        return 0 if x.negative else PLUS_INF
    if not -110 < x.value < 90:
        return PLUS_INF if x.value > 0 else 0
    return to_bits32(round_f32(Fraction(_DIGITS.exp(Decimal(float(x.value))))))


def _root(square: Fraction) -> Fraction:
    """The root, or where it is irrational a number on the same side of all FP32 rounding boundaries."""
    scaled = square * 4**_ROOT_BITS
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    return Fraction(2 * whole + (whole * whole != scaled), 2 ** (_ROOT_BITS + 1))


def sqrt(bits: int) -> int:
    x = from_bits32(bits)
    if x.is_nan or (x.negative and not x.is_zero):
        return QUIET_NAN
    return bits if x.is_zero or x.is_inf else to_bits32(round_f32(_root(x.value)))


def rsqrt(bits: int) -> int:
    x = from_bits32(bits)
    if x.is_zero:
        return PLUS_INF | (bits & MINUS_ZERO)
    if x.is_nan or x.negative:
        return QUIET_NAN
    return 0 if x.is_inf else to_bits32(round_f32(_root(1 / x.value)))


def sigmoid(bits: int) -> int:
    one = from_bits32(ONE)
    return to_bits32(one / (one + from_bits32(exp(bits ^ MINUS_ZERO))))


FUNCTIONS = {"exp": exp, "rsqrt": rsqrt, "sqrt": sqrt, "sigmoid": sigmoid}


# --- inputs ---


def around(*centres: int, reach: int = 20) -> list[int]:
    """The encodings within ``reach`` steps of each centre."""
    return [centre + step for centre in centres for step in range(-reach, reach + 1)]


def random_bits(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)


def uniform(seed: int, low: float, high: float, count: int) -> list[int]:
    """Encodings of numbers spread evenly over an interval."""
    values = np.random.default_rng(seed).uniform(low, high, count).astype(np.float32)
    return [int(bits) for bits in values.view(np.uint32)]


def margin(name: str, bits: int) -> float:
    """How near e^x or 1/sqrt(x) comes to the middle of two FP32 numbers, relative to the distance from zero."""
    x = from_bits32(bits).value
    value = _root(1 / x) if name == "rsqrt" else Fraction(_DIGITS.exp(Decimal(float(x))))
    steps = value / power_of_two(floor_log2(value) - 24)
    odd = 2 * math.floor(steps / 2) + 1
    return float(abs(steps - odd) / steps)


@functools.cache
def hardest(name: str, count: int = 200) -> tuple[int, ...]:
    """The inputs of the function that come nearest to a rounding boundary."""
    rows = (line.split() for line in HARDEST.read_text(encoding="utf-8").splitlines())
    return tuple([int(bits, 16) for function, bits in rows if function == name][:count])


@functools.cache
def inputs(name: str) -> tuple[int, ...]:
    """Thousands of encodings for the function: specials, thresholds, ties, subnormals, random and hardest."""
    chosen = [*SPECIALS, *map(int, random_bits(7, 1000))]
    if name in ("exp", "sigmoid"):
        sign = MINUS_ZERO if name == "sigmoid" else 0
        chosen += [bits ^ sign for bits in (*around(*EXP_EDGES), *uniform(1, -104, 89, 1500), *uniform(2, -1, 1, 500))]
        chosen += [bits ^ sign for bits in (*uniform(3, -103.98, -87.33, 500), *hardest("exp"))]
    else:
        chosen += [bits & 0x7FFFFFFF for bits in map(int, random_bits(8, 1500))]
        chosen += [bits & 0x007FFFFF for bits in map(int, random_bits(9, 500))]
        chosen += [*around(*POWERS_OF_FOUR, reach=5), *(hardest("rsqrt") if name == "rsqrt" else ())]
    return tuple(chosen)


@functools.cache
def expected(name: str) -> tuple[int, ...]:
    return tuple(map(FUNCTIONS[name], inputs(name)))


# --- between encodings and tensors ---


def tensor(encodings: tuple[int, ...] | list[int] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(encodings, dtype=np.uint32).view(np.float32).copy())


def bits_of(t: torch.Tensor) -> np.ndarray:
    """The encodings in row-major order, NaN payloads as they are."""
    assert t.dtype == torch.float32
    return t.detach().cpu().numpy().copy().view(np.uint32).reshape(-1)


def differences(got: np.ndarray, want: tuple[int, ...] | np.ndarray) -> list[int]:
    """The positions at which two lists of encodings differ."""
    return np.flatnonzero(got != np.array(want, dtype=np.uint32)).tolist()
