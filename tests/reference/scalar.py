"""One FP32 number in exact arithmetic, without floating point hardware.

A finite value is a sign and a `fractions.Fraction`; infinity and NaN are kinds of their own, and both zeros exist.
Each of `+ - * /` forms the exact rational result and rounds it once to FP32 (nearest, ties to even, subnormals kept,
overflow to infinity). NaN carries no payload. Nothing here imports torch or numpy: the tests hold torch against this
file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

FINITE, INFINITE, NAN_KIND = "finite", "inf", "nan"


@dataclass(frozen=True)
class Format:
    """A binary floating point format: significand bits with the leading one, and exponents of normal numbers."""

    precision: int
    min_exponent: int
    max_exponent: int
    exponent_bits: int


BINARY32 = Format(precision=24, min_exponent=-126, max_exponent=127, exponent_bits=8)
BFLOAT16 = Format(precision=8, min_exponent=-126, max_exponent=127, exponent_bits=8)


def power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def floor_log2(x: Fraction) -> int:
    """The largest e with 2**e <= x, for x > 0."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if power_of_two(exponent) <= x else exponent - 1


def round_magnitude(x: Fraction, fmt: Format) -> Fraction | None:
    """Nearest representable value to x >= 0, ties to even; None where it overflows."""
    if x == 0:
        return x
    quantum = power_of_two(max(floor_log2(x), fmt.min_exponent) - (fmt.precision - 1))
    rounded = round(x / quantum) * quantum  # round() of a Fraction is half to even
    return None if rounded >= power_of_two(fmt.max_exponent + 1) else rounded


class F32:
    """An FP32 value. Build it with `from_bits32`, `from_bits16` or `round_f32`."""

    __slots__ = ("kind", "magnitude", "negative")

    def __init__(self, kind: str, negative: bool, magnitude: Fraction) -> None:
        self.kind = kind
        self.negative = negative
        self.magnitude = magnitude

    @property
    def is_nan(self) -> bool:
        return self.kind == NAN_KIND

    @property
    def is_inf(self) -> bool:
        return self.kind == INFINITE

    @property
    def is_zero(self) -> bool:
        return self.kind == FINITE and self.magnitude == 0

    @property
    def value(self) -> Fraction:
        """The exact value of a finite number (both zeros are 0)."""
        if self.kind != FINITE:
            raise ValueError(f"{self} has no rational value")
        return -self.magnitude if self.negative else self.magnitude

    def __repr__(self) -> str:
        sign = "-" if self.negative else "+"
        return f"F32({sign}{float(self.magnitude)!r})" if self.kind == FINITE else f"F32({sign}{self.kind})"

    def __neg__(self) -> F32:
        return F32(self.kind, not self.negative, self.magnitude)

    def __add__(self, other: F32) -> F32:
        if self.is_nan or other.is_nan:
            return NAN
        if self.is_inf or other.is_inf:
            if self.is_inf and other.is_inf and self.negative != other.negative:
                return NAN
            return self if self.is_inf else other
        total = self.value + other.value
        if total == 0:  # exact zero: +0 unless both operands are negative (then both are -0)
            return F32(FINITE, self.negative and other.negative, total)
        return round_f32(total)

    def __sub__(self, other: F32) -> F32:
        return self + (-other)

    def __mul__(self, other: F32) -> F32:
        negative = self.negative != other.negative
        if self.is_nan or other.is_nan:
            return NAN
        if self.is_inf or other.is_inf:
            return NAN if self.is_zero or other.is_zero else F32(INFINITE, negative, Fraction(0))
        return _rounded(negative, self.magnitude * other.magnitude, BINARY32)

    def __truediv__(self, other: F32) -> F32:
        negative = self.negative != other.negative
        if self.is_nan or other.is_nan or (self.is_inf and other.is_inf) or (self.is_zero and other.is_zero):
            return NAN
        if self.is_inf or other.is_zero:
            return F32(INFINITE, negative, Fraction(0))
        if other.is_inf:
            return F32(FINITE, negative, Fraction(0))
        return _rounded(negative, self.magnitude / other.magnitude, BINARY32)


NAN = F32(NAN_KIND, False, Fraction(0))


def _rounded(negative: bool, magnitude: Fraction, fmt: Format) -> F32:
    rounded = round_magnitude(magnitude, fmt)
    if rounded is None:
        return F32(INFINITE, negative, Fraction(0))
    return F32(FINITE, negative, rounded)


def round_f32(x: Fraction | int, *, negative_zero: bool = False) -> F32:
    """The FP32 nearest to a rational; `negative_zero` is the sign taken when x itself is 0."""
    exact = Fraction(x)
    return _rounded(exact < 0 or (exact == 0 and negative_zero), abs(exact), BINARY32)


def round_bf16(x: F32) -> F32:
    """The BF16 nearest to an FP32 value, given back as the FP32 of the same value."""
    return _rounded(x.negative, x.magnitude, BFLOAT16) if x.kind == FINITE else x


def sqrt_f32(x: Fraction | int) -> F32:
    """Correctly rounded FP32 square root of a rational >= 0."""
    exact = Fraction(x)
    if exact == 0:
        return round_f32(exact)
    # A root of about 64 bits; a sticky half below it keeps an inexact one off every rounding boundary.
    shift = 2 * (64 - floor_log2(exact) // 2)
    scaled = exact * power_of_two(shift)
    root = math.isqrt(scaled.numerator // scaled.denominator)
    sticky = 0 if Fraction(root * root) == scaled else 1
    return round_f32(Fraction(2 * root + sticky, 2) / power_of_two(shift // 2))


def maximum(a: F32, b: F32) -> F32:
    """The larger of two; NaN if either is. Between zeros it gives the first (no caller can see which)."""
    if a.is_nan or b.is_nan:
        return NAN
    return b if _order(b) > _order(a) else a


def _order(x: F32) -> tuple[int, Fraction]:
    """A sort key of a number that is not NaN."""
    if x.is_inf:
        return (-1 if x.negative else 1, Fraction(0))
    return (0, x.value)


def _from_bits(bits: int, fmt: Format) -> F32:
    fraction_bits = fmt.precision - 1
    negative = bool(bits >> (fraction_bits + fmt.exponent_bits))
    biased = (bits >> fraction_bits) & ((1 << fmt.exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    if biased == (1 << fmt.exponent_bits) - 1:
        return NAN if fraction else F32(INFINITE, negative, Fraction(0))
    significand = fraction if biased == 0 else fraction | (1 << fraction_bits)
    exponent = max(biased, 1) - fmt.max_exponent - fraction_bits
    return F32(FINITE, negative, significand * power_of_two(exponent))


def _to_bits(x: F32, fmt: Format) -> int:
    fraction_bits = fmt.precision - 1
    sign = int(x.negative) << (fraction_bits + fmt.exponent_bits)
    all_ones = ((1 << fmt.exponent_bits) - 1) << fraction_bits
    if x.is_nan:
        return all_ones | (1 << (fraction_bits - 1))
    if x.is_inf:
        return sign | all_ones
    if x.is_zero:
        return sign
    exponent = max(floor_log2(x.magnitude), fmt.min_exponent)
    significand = x.magnitude / power_of_two(exponent - fraction_bits)
    if significand.denominator != 1 or significand >= (2 << fraction_bits):
        raise ValueError(f"{x} is not a value of the format {fmt}")
    # A subnormal has exponent field 0; the leading one of a normal number adds 1 to the field.
    return sign | (((exponent - fmt.min_exponent) << fraction_bits) + int(significand))


def from_bits32(bits: int) -> F32:
    return _from_bits(bits, BINARY32)


def from_bits16(bits: int) -> F32:
    return _from_bits(bits, BFLOAT16)


def to_bits32(x: F32) -> int:
    """Encoding of the value; NaN becomes the quiet 0x7FC00000."""
    return _to_bits(x, BINARY32)


def to_bits16(x: F32) -> int:
    """Encoding of a value that BF16 holds; NaN becomes the quiet 0x7FC0."""
    return _to_bits(x, BFLOAT16)


ZERO = round_f32(0)
ONE = round_f32(1)
TWO = round_f32(2)

ScalarFunction = Callable[[F32], F32]


@dataclass(frozen=True)
class Elementary:
    """The four functions that a numeric profile supplies; the reference takes them as given."""

    exp: ScalarFunction
    sigmoid: ScalarFunction
    sqrt: ScalarFunction
    rsqrt: ScalarFunction
