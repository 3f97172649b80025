"""The elementary functions of the oracle profile: a value's bits depend on the value alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.mhc import elementary, fixtures
from rl_engine.mhc.profiles import get_profile, known_profiles
from tests.operators.support import BF16, Draws, tensors
from tests.reference.bridge import assert_same_tensor, encodings
from tests.threads import on_threads

PROFILE = "oracle-fp32-mhc-v1"
REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = elementary.for_profile(PROFILE)
UNARY = {name: getattr(RECIPE, name) for name in ("exp", "sigmoid", "sqrt", "rsqrt")}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 1e-30, 88.0, -88.0, -104.0, 100.0, 3e38, -3e38]


def samples(name: str, count: int) -> Tensor:
    x = Draws(f"elementary {name}")(count, scale=4.0)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)[:count]
    return x.abs() if name in ("sqrt", "rsqrt") else x


def one_by_one(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Each value on its own: one element never fills a vector register."""
    return torch.stack([fn(v.clone()) for v in x.reshape(-1)]).reshape(x.shape)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The values of ``x[60]`` in shapes and strides that lead ATen down different paths."""
    grid = x.reshape(6, 10)
    wide = torch.full((60, 3), float("nan"))
    wide[:, 1] = x
    return {
        "strided": wide[:, 1],
        "grid": grid,
        "transposed": grid.t().contiguous().t(),
        "reversed order": x.flip(0).contiguous().flip(0),
        "columns": torch.cat([grid, grid], dim=1)[:, :10],
        "cube": x.reshape(3, 4, 5).permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "expanded": x[None].expand(7, 60)[3],
        "4-d": x.reshape(1, 60, 1, 1),
    }


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("count", [*range(0, 41), 63, 64, 65, 127, 1000])
def test_a_value_has_the_same_bits_at_every_size(name: str, count: int) -> None:
    x, fn = samples(name, 1000), UNARY[name]
    got = fn(x[:count].clone())
    if count:
        assert_same_tensor("one by one", got[-8:], one_by_one(fn, x[:count][-8:]))
    assert_same_tensor("inside more", got, fn(x)[:count])
    assert got.shape == (count,)


@pytest.mark.parametrize("name", UNARY)
def test_a_value_has_the_same_bits_in_every_layout(name: str) -> None:
    x, fn = samples(name, 60), UNARY[name]
    want = one_by_one(fn, x)
    for layout, moved in layouts(x).items():
        got = fn(moved)
        assert got.shape == moved.shape and got.is_contiguous(), layout
        assert_same_tensor(layout, got.reshape(-1), want)
    assert_same_tensor("expanded rows", fn(x[:5, None].expand(5, 9)), want[:5, None].repeat(1, 9))
    assert fn(torch.tensor(0.5)).shape == ()


@pytest.mark.parametrize("name", UNARY)
def test_a_value_has_the_same_bits_at_every_alignment(name: str) -> None:
    x, fn = samples(name, 80), UNARY[name]
    want = fn(x)
    for start in range(17):
        for stop in range(start + 1, 81, 7):
            assert_same_tensor(f"{start}:{stop}", fn(x[start:stop]), want[start:stop])


@pytest.mark.parametrize("name", UNARY)
def test_a_huge_tensor_on_any_number_of_threads(name: str) -> None:
    x, fn = samples(name, 1 << 20), UNARY[name]
    with on_threads(1):
        want = fn(x)
        parts = torch.cat([fn(part) for part in x.split(977)])
    assert torch.equal(parts.view(torch.int32), want.view(torch.int32))
    for count in (2, 7):
        with on_threads(count):
            assert torch.equal(fn(x).view(torch.int32), want.view(torch.int32)), count


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 16, 31, 64])
def test_sigmoid_is_the_one_of_the_strided_view(tokens: int) -> None:
    """The published bytes are those of ``torch.sigmoid(h[:, 0:4])`` of a contiguous [T, 24] tensor."""
    h = Draws("elementary h")(64, 24, scale=3.0)[:tokens].clone()
    for columns in (slice(0, 4), slice(4, 8)):
        view = h[:, columns]
        assert_same_tensor("view", RECIPE.sigmoid(view), torch.sigmoid(view))
        assert_same_tensor("copy", RECIPE.sigmoid(view.contiguous()), torch.sigmoid(view))


def test_how_torch_itself_behaves(record_property: Callable[[str, object], None]) -> None:
    """For information: in how many of these values torch's own answer depends on the layout. Nothing is asserted."""
    x = samples("sigmoid", 4096)
    spaced = torch.zeros(4096, 2)
    spaced[:, 0] = x
    for name in UNARY:
        fn = getattr(torch, name)
        record_property(f"torch.{name} by layout", int((fn(x) != fn(spaced[:, 0])).sum()))


@pytest.mark.parametrize("name", UNARY)
def test_values_are_right_to_a_few_units(name: str) -> None:
    exact = {"exp": np.exp, "sigmoid": lambda v: 1 / (1 + np.exp(-v)), "sqrt": np.sqrt, "rsqrt": lambda v: v**-0.5}
    x = samples(name, 2000)[len(SPECIAL) :]
    want = exact[name](x.numpy().astype(np.float64))
    error = np.abs(UNARY[name](x).numpy().astype(np.float64) - want) / np.abs(want)
    assert error.max() < 4 * 2.0**-24


def test_special_values() -> None:
    inf = float("inf")
    x = torch.tensor([inf, -inf, float("nan"), 0.0, -0.0])
    assert RECIPE.exp(x).tolist()[:2] == [inf, 0.0] and RECIPE.exp(x)[3:].tolist() == [1.0, 1.0]
    assert RECIPE.sigmoid(x).tolist()[:2] == [1.0, 0.0] and RECIPE.sigmoid(x)[3:].tolist() == [0.5, 0.5]
    assert encodings(RECIPE.sqrt(x[3:])) == [0, 0x80000000] and RECIPE.sqrt(x)[0].item() == inf
    assert RECIPE.rsqrt(x).tolist()[0] == 0.0 and RECIPE.rsqrt(x)[3].item() == inf
    for name, fn in UNARY.items():
        assert fn(x)[2].isnan(), name
    assert RECIPE.sqrt(x)[1].isnan() and RECIPE.rsqrt(x)[1].isnan()


# --- division ---


def divided(a: Tensor, b: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.divide(a.numpy(), b.numpy(), dtype=np.float32))


@settings(max_examples=50)
@given(tensors(24), tensors(24))
def test_division_is_ieee(a: Tensor, b: Tensor) -> None:
    assert_same_tensor("div", RECIPE.div(a, b), divided(a, b))


@settings(max_examples=25)
@given(tensors(24, low=0, high=30), tensors(24, low=100, high=160))
def test_division_keeps_subnormals(a: Tensor, b: Tensor) -> None:
    got = RECIPE.div(a, b)
    assert_same_tensor("div", got, divided(a, b))
    assert_same_tensor("subnormal divisor", RECIPE.div(b, a), divided(b, a))


def test_division_of_many_random_patterns() -> None:
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(-(1 << 31), 1 << 31, (2, 1 << 18), generator=generator).to(torch.int32)
    a, b = bits.view(torch.float32)
    want = divided(a, b)
    for got in (RECIPE.div(a, b), RECIPE.div(a.view(-1, 64).t(), b.view(-1, 64).t()).t().reshape(-1)):
        different = (got.view(torch.int32) != want.view(torch.int32)) & ~(got.isnan() & want.isnan())
        assert int(different.sum()) == 0


@pytest.mark.parametrize("divisor", [3.0, 7.0, 11.313708305358887, 4096.0, 49.0])
def test_a_constant_divisor_is_no_reciprocal(divisor: float) -> None:
    x = Draws("elementary divisor")(4000)
    got = RECIPE.div(x, torch.tensor(divisor))
    assert_same_tensor("div", got, divided(x, torch.tensor(divisor)))
    reciprocal = x * (torch.tensor(1.0) / torch.tensor(divisor))
    assert bool((reciprocal != got).any()) == (divisor != 4096.0)


def test_division_broadcasts() -> None:
    a, b = Draws("broadcast a")(5, 4, 1), Draws("broadcast b")(4, 6)
    wide = [t.contiguous() for t in torch.broadcast_tensors(a, b)]
    assert_same_tensor("div", RECIPE.div(a, b), divided(*wide))
    assert RECIPE.div(torch.empty(0, 4), torch.ones(4)).shape == (0, 4)


# --- what is refused, and where it runs ---


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64, torch.int32, torch.bool])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    bad, good = torch.ones(3).to(dtype), torch.ones(3)
    for name, fn in UNARY.items():
        with pytest.raises(TypeError, match=f"{name}: got dtype {dtype}, want torch.float32"):
            fn(bad)
    with pytest.raises(TypeError, match=f"dividend: got dtype {dtype}"):
        RECIPE.div(bad, good)
    with pytest.raises(TypeError, match=f"divisor: got dtype {dtype}"):
        RECIPE.div(good, bad)


@settings(max_examples=30)
@given(st.text())
def test_an_unknown_profile_lists_the_known_ones(name: str) -> None:
    assert known_profiles()
    if name in known_profiles():
        return
    for find in (elementary.for_profile, get_profile):
        with pytest.raises(ValueError, match=f"want one of: .*{PROFILE}"):
            find(name)


def test_profiles_and_recipes_name_one_another() -> None:
    for profile in known_profiles():
        assert elementary.for_profile(profile).name == get_profile(profile).elementary
        assert get_profile(profile).id == profile
    oracle = get_profile(PROFILE)
    assert (oracle.elementary, oracle.fma) == ("torch-library", "forbidden")
    assert oracle.downcast_points == ("pre.hidden", "norm.normalized", "post.r_new")
    assert (oracle.long_reduction_order, oracle.stream_tree) == ("serial-ascending-left-fold", "(a0+a1)+(a2+a3)")


def test_defaults_do_not_matter() -> None:
    x = samples("sigmoid", 50)
    want = [fn(x) for fn in UNARY.values()] + [RECIPE.div(x, x.flip(0))]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = [fn(x) for fn in UNARY.values()]
        got.append(RECIPE.div(x, x.flip(0)))
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert_same_tensor("defaults", a, b)
    assert {fn(x.to("meta")).device.type for fn in UNARY.values()} == {"meta"}


def test_avx2_gives_the_published_hashes() -> None:
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "rl_engine.mhc.fixtures"]
    run = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == fixtures.load_manifest()
