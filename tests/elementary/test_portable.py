"""The elementary functions of the portable profile: every bit of every result is the one that mathematics gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.mhc.elementary import PORTABLE_PROFILE, for_profile, portable
from tests.elementary import exact_functions as exact
from tests.elementary.exact_functions import QUIET_NAN, bits_of, differences, tensor

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "csrc" / "mhc" / "include" / "mhc" / "exp_table.hpp"
RECIPE = for_profile(PORTABLE_PROFILE)
UNARY = {name: getattr(RECIPE, name) for name in exact.FUNCTIONS}


# --- the values ---


@pytest.mark.parametrize("name", UNARY)
def test_every_result_is_the_exact_one(name: str) -> None:
    given, want = exact.inputs(name), exact.expected(name)
    got = bits_of(UNARY[name](tensor(given)))
    wrong = differences(got, want)
    assert wrong == [], [f"{name}(0x{given[i]:08x}): 0x{got[i]:08x}, want 0x{want[i]:08x}" for i in wrong[:5]]
    assert len(given) > 3000


def test_the_inputs_reach_where_it_is_hard() -> None:
    """Subnormal and infinite results, results next to 1, and NaN are all among those compared."""
    for name, subnormal in {"exp": 500, "sigmoid": 20}.items():
        results = exact.expected(name)
        assert sum(0 < bits < 0x00800000 for bits in results) >= subnormal, name
        assert {0, 0x3F800000, QUIET_NAN} <= set(results)
    assert {0x00000001, 0x007FFFE6, 0x00800026, 0x7F7FFF84, 0x7F800000} <= set(exact.expected("exp"))
    assert {0x3F7FFFFE, 0x3F7FFFFF, 0x3F800001, 0x3F800002} <= set(exact.expected("exp"))
    assert {0x7F800000, 0xFF800000, 0x00000000, QUIET_NAN} <= set(exact.expected("rsqrt"))
    for name in ("rsqrt", "sqrt"):
        assert sum(0 < bits < 0x00800000 for bits in exact.inputs(name)) > 300
    assert len(exact.hardest("exp")) == len(exact.hardest("rsqrt")) == 200


@pytest.mark.parametrize(
    ("name", "given", "want"),
    [
        ("exp", 0x42B17217, 0x7F7FFF84),
        ("exp", 0x42B17218, 0x7F800000),
        ("exp", 0xC2AEAC4F, 0x00800026),
        ("exp", 0xC2AEAC50, 0x007FFFE6),
        ("exp", 0xC2CFF1B4, 0x00000001),
        ("exp", 0xC2CFF1B5, 0x00000000),
        ("exp", 0x33000000, 0x3F800000),
        ("exp", 0x33800000, 0x3F800001),
        ("exp", 0xB3000000, 0x3F800000),
        ("exp", 0xB3000001, 0x3F7FFFFF),
        ("exp", 0xFF800000, 0x00000000),
        ("rsqrt", 0x00000000, 0x7F800000),
        ("rsqrt", 0x80000000, 0xFF800000),
        ("rsqrt", 0x00000001, 0x64B504F3),
        ("rsqrt", 0x7F800000, 0x00000000),
        ("sqrt", 0x80000000, 0x80000000),
        ("sqrt", 0x00000001, 0x1A3504F3),
        ("sigmoid", 0x00000000, 0x3F000000),
        ("sigmoid", 0xFF800000, 0x00000000),
        ("sigmoid", 0xC2B17217, 0x00200010),
        ("sigmoid", 0xC2B17218, 0x00000000),
    ],
)
def test_known_values(name: str, given: int, want: int) -> None:
    """e^x at its thresholds, ties next to 1, both zeros; sigmoid ends where e^-x overflows."""
    assert f"{int(bits_of(UNARY[name](tensor([given])))[0]):08x}" == f"{want:08x}"


def test_sigmoid_is_composed_of_the_parts() -> None:
    x = tensor(exact.inputs("sigmoid"))
    one = torch.ones(())
    assert differences(bits_of(RECIPE.sigmoid(x)), bits_of(RECIPE.div(one, one + RECIPE.exp(-x)))) == []
    rounded_once = torch.sigmoid(x.double()).float()
    assert len(differences(bits_of(RECIPE.sigmoid(x)), bits_of(rounded_once))) > 20


def canonical(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), np.uint32(QUIET_NAN), values.view(np.uint32))


def test_sqrt_and_division_are_ieee() -> None:
    a, b = (exact.random_bits(seed, 1 << 18) for seed in (21, 22))
    a[::7] &= 0x807FFFFF  # subnormal dividends, and divisors that bring quotients down to them
    b[::5] = (b[::5] & 0x80FFFFFF) | 0x7E000000
    b[::11] &= 0x807FFFFF
    specials = np.array(exact.SPECIALS, dtype=np.uint32)
    a = np.concatenate((a, np.repeat(specials, specials.size)))
    b = np.concatenate((b, np.tile(specials, specials.size)))
    with np.errstate(all="ignore"):
        quotient = canonical(a.view(np.float32) / b.view(np.float32))
        root = canonical(np.sqrt(a.view(np.float32)))
    assert differences(bits_of(RECIPE.div(tensor(a), tensor(b))), quotient) == []
    assert differences(bits_of(RECIPE.sqrt(tensor(a))), root) == []
    magnitude = quotient & 0x7FFFFFFF
    assert int(((magnitude > 0) & (magnitude < 0x00800000)).sum()) > 1000


def test_division_broadcasts_and_is_no_reciprocal() -> None:
    a, b = tensor(exact.random_bits(23, 60)).reshape(5, 4, 3), tensor(exact.random_bits(24, 12)).reshape(4, 3)
    with np.errstate(all="ignore"):
        want = canonical(a.numpy() / b.numpy()).reshape(-1)
    for divisor in (b, b.t().contiguous().t(), b[None].expand(5, 4, 3)):
        assert differences(bits_of(RECIPE.div(a, divisor)), want) == []
    x, three = tensor(exact.uniform(25, 0, 1, 500)), torch.tensor(3.0)
    assert differences(bits_of(RECIPE.div(x, three)), bits_of(x * RECIPE.div(torch.ones(()), three))) != []
    assert RECIPE.div(torch.empty(0, 4), torch.ones(4)).shape == (0, 4)


def test_every_nan_is_the_canonical_one() -> None:
    nans, invalid = tensor(exact.NANS), tensor([0xBF800000, 0xFF800000, 0x80000001, 0x80800000])
    for name, function in UNARY.items():
        assert set(bits_of(function(nans)).tolist()) == {QUIET_NAN}, name
    for name in ("sqrt", "rsqrt"):
        assert set(bits_of(UNARY[name](invalid)).tolist()) == {QUIET_NAN}, name
    one = torch.ones(())
    zero, inf = tensor([0, 0x80000000]), tensor([0x7F800000, 0xFF800000])
    pairs = [(nans, one), (one, nans), (nans, nans.flip(0)), (zero, zero.flip(0)), (zero, zero), (inf, inf.flip(0))]
    for a, b in pairs:
        assert set(bits_of(RECIPE.div(a, b)).tolist()) == {QUIET_NAN}


# --- the table, and recipes that are wrong ---


def derived_table() -> list[tuple[float, float]]:
    context = Context(prec=90)
    step = context.divide(context.ln(Decimal(2)), Decimal(128))
    powers = [Fraction(context.exp(context.multiply(step, Decimal(j)))) for j in range(128)]
    return [(float(power), float(power - Fraction(float(power)))) for power in powers]


def test_the_tables_are_the_powers_of_two() -> None:
    want = derived_table()
    assert list(zip(*portable.exp_table(), strict=True)) == want
    hexadecimal = r"(-?0x[01]\.[0-9a-f]+p[+-]\d+)"
    rows = re.findall(rf"^    \{{{hexadecimal}, {hexadecimal}\}},$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(float.fromhex(high), float.fromhex(low)) for high, low in rows] == want
    assert want[0] == (1.0, 0.0) and want[64][0] == float.fromhex("0x1.6a09e667f3bcdp+0")


def wrong_on_hardest(name: str, function: Callable[[Tensor], Tensor]) -> int:
    given = exact.hardest(name)
    want = np.array([exact.FUNCTIONS[name](bits) for bits in given], dtype=np.uint32)
    return len(differences(bits_of(function(tensor(given))), want))


@pytest.mark.parametrize(("name", "exponent"), [("exp", -52.6448), ("rsqrt", -51.7366)])
def test_the_hardest_inputs_are_that_hard(name: str, exponent: float) -> None:
    """A relative error of 2^-59 is safe, one of FP32 size is not; what is rounded to FP64 and then to FP32 just is."""
    margins = [exact.margin(name, bits) for bits in exact.hardest(name)]
    assert 2.0**exponent < min(margins) < 2.0 ** (exponent + 0.001) and max(margins) < 2.0**-40
    assert wrong_on_hardest(name, UNARY[name]) == 0


def in_fp32_steps(x: Tensor) -> Tensor:
    return 1.0 / torch.sqrt(x)


def exp_of_a_fraction(x: Tensor) -> Tensor:
    """Argument reduction in FP64 with ln 2 in one part, the rest in FP32: what a fast kernel does."""
    steps = torch.round(x.double() * 1.4426950408889634)
    return torch.exp((x.double() - steps * 0.6931471805599453).float()) * torch.exp2(steps).float()


WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "torch.exp": ("exp", torch.exp),
    "exp with FP32 parts": ("exp", exp_of_a_fraction),
    "torch.rsqrt": ("rsqrt", torch.rsqrt),
    "1/sqrt in FP32 steps": ("rsqrt", in_fp32_steps),
}


@pytest.mark.parametrize("label", WRONG)
def test_an_fp32_recipe_is_caught(label: str) -> None:
    assert wrong_on_hardest(*WRONG[label]) > 10


PLANTED: dict[str, tuple[str, object]] = {
    "rounded toward zero": (
        "_round_once",
        lambda hi, lo: (hi.view(torch.int64) & -(1 << 29)).view(torch.float64).float(),
    ),
    "rounded to odd in FP32": (
        "_round_once",
        lambda hi, lo: (hi.view(torch.int64) | 1 << 29).view(torch.float64).float(),
    ),
    "ln 2 in one part": ("_STEP_LOW", 0.0),
    "a coarse table": ("_table_on", lambda device: tuple(torch.tensor(part).double() for part in portable.exp_table())),
}


@pytest.mark.parametrize("label", PLANTED)
def test_a_recipe_with_one_part_wrong_is_caught(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    monkeypatch.setattr(portable, *PLANTED[label])
    assert wrong_on_hardest("exp", RECIPE.exp) > 0
    if "rounded" in label:
        assert wrong_on_hardest("rsqrt", RECIPE.rsqrt) > 0


def test_a_recipe_without_subnormals_is_caught() -> None:
    results = UNARY["exp"](tensor(exact.inputs("exp")))
    flushed = torch.where(results.abs() < 2.0**-126, 0.0, results)
    assert len(differences(bits_of(flushed), exact.expected("exp"))) >= 300
