"""The scalar model against known encodings and against IEEE hardware, which torch's + - * / use."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from tests.reference.bridge import encodings, from_bits
from tests.reference.scalar import (
    F32,
    from_bits16,
    from_bits32,
    maximum,
    round_bf16,
    round_f32,
    sqrt_f32,
    to_bits16,
    to_bits32,
)

SPECIAL = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000, 0xBF800000,
    0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x5F800000, 0x1F800000, 0x34000000,
]  # fmt: skip


def random_bits(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**32, (count,), generator=generator, dtype=torch.int64).tolist()


def near_one_bits(seed: int, count: int) -> list[int]:
    """Numbers of similar size, so that additions round and cancel."""
    generator = torch.Generator().manual_seed(seed)
    return [b & 0xFFFFFFFF for b in torch.randn(count, generator=generator).view(torch.int32).tolist()]


PAIRS = [(a, b) for a in SPECIAL for b in SPECIAL]
PAIRS += list(zip(random_bits(1, 1500), random_bits(2, 1500), strict=True))
PAIRS += list(zip(near_one_bits(3, 1500), near_one_bits(4, 1500), strict=True))


@pytest.mark.parametrize(
    "fn",
    [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b],
    ids=["add", "sub", "mul", "div"],
)
def test_arithmetic_is_ieee(fn: Callable) -> None:
    left, right = [a for a, _ in PAIRS], [b for _, b in PAIRS]
    want = encodings(fn(from_bits(left), from_bits(right)))
    got = [to_bits32(fn(from_bits32(a), from_bits32(b))) for a, b in PAIRS]
    assert got == want


def test_maximum_agrees_with_torch_but_for_the_sign_of_zero() -> None:
    zeros = {0x00000000, 0x80000000}
    pairs = [(a, b) for a, b in PAIRS if not {a, b} <= zeros]
    want = encodings(torch.maximum(from_bits([a for a, _ in pairs]), from_bits([b for _, b in pairs])))
    assert [to_bits32(maximum(from_bits32(a), from_bits32(b))) for a, b in pairs] == want


def test_bf16_rounding_agrees_with_torch() -> None:
    bits = SPECIAL + random_bits(5, 2000)
    ties = [(b & 0xFFFF0000) | 0x8000 for b in random_bits(6, 500)]
    beside = [t + step for t in ties for step in (-1, 1)]
    tested = [b for b in bits + ties + beside if (b & 0x7F800000) != 0x7F800000] + [0x7F800000, 0xFF800000]
    want = encodings(from_bits(tested).to(torch.bfloat16))
    assert [to_bits16(round_bf16(from_bits32(b))) for b in tested] == want


def test_encodings_round_trip() -> None:
    for bits in SPECIAL + random_bits(7, 500):
        x = from_bits32(bits)
        assert to_bits32(x) == (0x7FC00000 if x.is_nan else bits)
    for bits in range(0, 0x10000, 7):
        x = from_bits16(bits)
        assert to_bits16(x) == (0x7FC0 if x.is_nan else bits)


def test_to_bits_refuses_a_value_that_the_format_lacks() -> None:
    with pytest.raises(ValueError, match="not a value of the format"):
        to_bits16(from_bits32(0x3F800001))


@pytest.mark.parametrize(
    ("exact", "bits"),
    [
        (1, 0x3F800000),
        (Fraction(1, 10), 0x3DCCCCCD),
        (Fraction(1, 10**6), 0x358637BD),
        (2**24 + 1, 0x4B800000),  # tie, even below
        (2**24 + 3, 0x4B800002),  # tie, even above
        (Fraction(1, 2**150), 0x00000000),  # half the smallest subnormal: tie to zero
        (Fraction(3, 2**150), 0x00000002),  # tie between subnormals
        (Fraction(2**24 - 1, 2**150), 0x00800000),  # the largest subnormal rounds up into the normals
        (2**128 - 2**103, 0x7F800000),  # tie between the largest finite and 2**128: overflow
        (2**128 - 2**103 - 1, 0x7F7FFFFF),
        (-(2**130), 0xFF800000),
    ],
)
def test_round_f32(exact: Fraction | int, bits: int) -> None:
    assert to_bits32(round_f32(exact)) == bits


def test_round_f32_agrees_with_the_c_conversion_of_doubles() -> None:
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(1000, generator=generator, dtype=torch.float64)
    scales = torch.logspace(-46, 38, 1000, dtype=torch.float64)
    for x in (values * scales / 4).tolist():
        (want,) = struct.unpack("<I", struct.pack("<f", x))
        assert to_bits32(round_f32(Fraction(x), negative_zero=x < 0)) == want


def test_zero_signs() -> None:
    plus, minus, one = from_bits32(0), from_bits32(0x80000000), from_bits32(0x3F800000)
    signs: list[tuple[F32, int]] = [
        (plus + minus, 0),
        (minus + minus, 0x80000000),
        (one - one, 0),
        (-one + one, 0),
        (minus * one, 0x80000000),
        (minus * minus, 0),
        (minus / one, 0x80000000),
        (minus - plus, 0x80000000),
        (minus - minus, 0),
        (-plus, 0x80000000),
    ]
    assert [to_bits32(x) for x, _ in signs] == [bits for _, bits in signs]


def test_sqrt_is_correctly_rounded() -> None:
    for bits in [0x00000001, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF, 0x40000000, *random_bits(9, 300)]:
        x = from_bits32(bits & 0x7FFFFFFF)
        if x.is_nan or x.is_inf or x.is_zero:
            continue
        root = sqrt_f32(x.value)
        below, above = from_bits32(to_bits32(root) - 1).value, from_bits32(to_bits32(root) + 1).value
        low, high = (below + root.value) / 2, (root.value + above) / 2
        assert low * low <= x.value <= high * high
    assert sqrt_f32(16384).value == 128
    assert to_bits32(sqrt_f32(2)) == 0x3FB504F3
