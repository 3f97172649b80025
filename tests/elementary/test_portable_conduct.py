"""The portable recipe in company: layouts, sizes, threads, modes and arguments move no bit of a result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.mhc.elementary import PORTABLE_PROFILE, for_profile
from tests.elementary import exact_functions as exact
from tests.elementary.exact_functions import bits_of, differences, tensor
from tests.threads import on_threads

ROOT = Path(__file__).resolve().parents[2]
RECIPE = for_profile(PORTABLE_PROFILE)
UNARY = {name: getattr(RECIPE, name) for name in exact.FUNCTIONS}
CHUNK = 8192
LARGE = 1_000_003
GRID = (*exact.SPECIALS, *exact.hardest("exp", 44), *exact.hardest("rsqrt", 20))
WANTED = {
    name: np.array([function(bits) for bits in GRID], dtype=np.uint32) for name, function in exact.FUNCTIONS.items()
}


@contextmanager
def flushing() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def grid(count: int = len(GRID)) -> Tensor:
    """That many numbers, the grid's over and over."""
    return tensor(np.resize(np.array(GRID, dtype=np.uint32), count))


def assert_bits(label: object, got: Tensor, want: np.ndarray) -> None:
    assert got.is_contiguous() and got.dtype == torch.float32, label
    assert differences(bits_of(got), want.reshape(-1)) == [], label


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The numbers of ``x[120]``, in their order, in shapes and strides that lead ATen down different paths."""
    cube = x.reshape(4, 5, 6)
    wide = torch.full((120, 3), float("nan"))
    wide[:, 1] = x
    padded = torch.full((12, 17), float("nan"))
    padded[:, 3:13] = x.reshape(12, 10)
    shifted = torch.full((121,), float("nan"))
    shifted[1:] = x
    return {
        "contiguous": x,
        "strided": wide[:, 1],
        "sliced": padded[:, 3:13],
        "one element off": shifted[1:],
        "transposed": x.reshape(12, 10).t().contiguous().t(),
        "permuted": cube.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "backwards": x.flip(0).contiguous().flip(0),
        "a row of an expanded one": x[None].expand(7, 120)[3],
        "5-d": x.reshape(1, 120, 1, 1, 1),
        "channels last": x.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "negated lazily": torch._neg_view(-x),
    }


def test_the_grid_has_what_matters() -> None:
    assert len(GRID) == 120
    assert {0x00000001, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000} <= set(GRID)


@pytest.mark.parametrize("name", UNARY)
def test_every_layout(name: str) -> None:
    for label, moved in layouts(grid()).items():
        got = UNARY[name](moved)
        assert got.shape == moved.shape, label
        assert_bits(label, got, WANTED[name])
    wide = UNARY[name](grid()[:, None].expand(120, 9))
    assert_bits("expanded", wide, np.repeat(WANTED[name], 9))
    for bits, want in zip(GRID[:8], WANTED[name][:8], strict=True):
        alone = UNARY[name](tensor([bits])[0])
        assert alone.shape == ()
        assert_bits(hex(bits), alone, want)


@pytest.mark.parametrize("name", UNARY)
def test_every_small_size_and_alignment(name: str) -> None:
    x = grid()
    for count in range(41):
        for start in (0, 1, 3):
            got = UNARY[name](x[start : start + count])
            assert got.shape == (count,)
            assert_bits((start, count), got, WANTED[name][start : start + count])
    for shape in ((0,), (0, 4), (3, 0, 2)):
        assert UNARY[name](torch.empty(shape)).shape == shape


@pytest.mark.parametrize("name", UNARY)
def test_sizes_around_the_chunk_and_any_number_of_threads(name: str) -> None:
    for count in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 4 * CHUNK - 1):
        assert_bits(count, UNARY[name](grid(count)), np.resize(WANTED[name], count))
    x, want = grid(LARGE), np.resize(WANTED[name], LARGE)
    for count in (1, 2, 7):
        with on_threads(count):
            assert_bits(f"{count} threads", UNARY[name](x), want)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_division_in_any_layout_and_number_of_threads(count: int) -> None:
    a, b = grid(LARGE), grid(LARGE).roll(17)
    with np.errstate(all="ignore"):
        quotient = a.numpy() / b.numpy()
    want = np.where(np.isnan(quotient), np.uint32(exact.QUIET_NAN), quotient.view(np.uint32))
    with on_threads(count):
        assert_bits("large", RECIPE.div(a, b), want)
        for (label, left), right in zip(layouts(a[:120]).items(), layouts(b[:120]).values(), strict=True):
            assert_bits(label, RECIPE.div(left, right), want[:120])


# --- surroundings ---


@pytest.mark.parametrize("name", UNARY)
def test_defaults_and_gradients_do_not_matter(name: str) -> None:
    function, x = UNARY[name], grid()
    assert_bits("requires grad", function(x.clone().requires_grad_()), WANTED[name])
    assert not function(x.clone().requires_grad_()).requires_grad
    assert_bits("a parameter", function(torch.nn.Parameter(x.clone())), WANTED[name])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = function(x)
        with torch.inference_mode():
            again = function(x)
    finally:
        torch.set_default_dtype(before)
    assert_bits("float64 by default", got, WANTED[name])
    assert_bits("inference mode", again, WANTED[name])
    assert_bits("and after", function(x), WANTED[name])


def test_the_argument_is_left_alone() -> None:
    x = grid()
    for name, function in UNARY.items():
        result = function(x)
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name
        result.fill_(1.0)
        assert differences(bits_of(x), np.array(GRID, dtype=np.uint32)) == [], name
    RECIPE.div(x, x).fill_(1.0)
    assert differences(bits_of(x), np.array(GRID, dtype=np.uint32)) == []
    leaf = torch.ones(3, requires_grad=True)
    assert not RECIPE.div(leaf, leaf).requires_grad


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64]
)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    bad, good = torch.ones(3).to(dtype), torch.ones(3)
    for name, function in UNARY.items():
        with pytest.raises(TypeError, match=f"{name}: got dtype {dtype}, want torch.float32"):
            function(bad)
    with pytest.raises(TypeError, match=f"dividend: got dtype {dtype}, want torch.float32"):
        RECIPE.div(bad, good)
    with pytest.raises(TypeError, match=f"divisor: got dtype {dtype}, want torch.float32"):
        RECIPE.div(good, bad)


@pytest.mark.parametrize("count", [1, CHUNK + 1])
def test_a_thread_that_flushes_subnormals_is_refused(count: int) -> None:
    x, one = grid(count), torch.ones(count)
    calls: list[Callable[[], Tensor]] = [lambda f=f: f(x) for f in UNARY.values()]
    for call in (*calls, lambda: RECIPE.div(x, one)):
        with flushing(), pytest.raises(RuntimeError, match="flushes subnormal numbers to zero"):
            call()
        assert call().shape == (count,)


FLUSHING_WORKERS = """
import numpy as np
import torch
torch.set_num_threads(4)
torch.set_flush_denormal(True)
torch.ones(1 << 20).mul_(0.5)  # the workers start here and keep the mode
torch.set_flush_denormal(False)
flushed = torch.full((1 << 20,), 2.0**-126).mul_(0.5).numpy().view(np.uint32)
assert (flushed == 0).any() and (flushed != 0).any(), "the workers do not flush: nothing is tested"

from rl_engine.mhc.elementary import PORTABLE_PROFILE, for_profile
from tests.elementary import exact_functions as exact

recipe = for_profile(PORTABLE_PROFILE)
x = exact.tensor([0xC2C80000, 0x80000001, 0x00000001, 0x00400000, 0xC2B17217])
calls = {name: (getattr(recipe, name), [f(int(b)) for b in exact.bits_of(x)]) for name, f in exact.FUNCTIONS.items()}
calls["div"] = (lambda t: recipe.div(t, torch.full((), 1.0)), exact.bits_of(x))
for name, (function, want) in calls.items():
    for count in (5, 2500, 8190, 8195, 40_000, 1_000_000):
        try:
            got = exact.bits_of(function(x.repeat(count // 5)))
        except RuntimeError as error:
            print(name, count, "refused" if "worker thread" in str(error) else error)
        else:
            print(name, count, "right" if not exact.differences(got, np.resize(want, got.size)) else "WRONG")
"""


def test_worker_threads_that_flush_subnormals_change_nothing() -> None:
    """The mode is a thread's own, and workers keep the one they were started in: right bits or a refusal."""
    command = [sys.executable, "-c", FLUSHING_WORKERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = {tuple(line.split()[:2]): line.split(maxsplit=2)[2] for line in done.stdout.splitlines()}
    assert len(outcomes) == 5 * 6 and set(outcomes.values()) == {"right", "refused"}, outcomes
    assert outcomes["div", "1000000"] == outcomes["sigmoid", "1000000"] == "refused"
    assert {outcomes[name, "5"] for name in (*UNARY, "div")} == {"right"}
