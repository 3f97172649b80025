"""A caller that rounds another way or flushes subnormals: eps and rows meet the default mode all the same."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import itertools
import math
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from rl_engine.mhc.contract import CONTROLLER_RMS, GradBoundary, ResidualBatch
from tests.backends.random_shapes import Shape
from tests.backends.support import (
    PROFILES,
    assert_same,
    composed,
    composites,
    differences,
    drawn,
    provider,
    reference_composites,
    reference_ops,
    whole,
)
from tests.backends.test_native_conduct import subnormal
from tests.threads import on_threads

Results = dict[str, torch.Tensor | None]
Run = Callable[[], Results]

_X86, _ARM = {"up": 0x800, "down": 0x400, "to zero": 0xC00}, {"up": 0x400000, "down": 0x800000, "to zero": 0xC00000}
_ROUNDINGS = _X86 if platform.machine() == "x86_64" else _ARM
_LIBM = ctypes.CDLL(ctypes.util.find_library("m"))


class Mode(NamedTuple):
    """A floating-point mode of a thread: how to set it, and whether the thread is in it."""

    enter: Callable[[], bool]
    holds: Callable[[], bool]


def flushes() -> bool:
    smallest, half, two = sys.float_info.min, *map(float, ("0.5", "2"))
    return (smallest * half) * two == 0.0


def rounds(way: int) -> Mode:
    return Mode(lambda: _LIBM.fesetround(way) == 0, lambda: _LIBM.fegetround() == way)


MODES = {f"rounds {name}": rounds(way) for name, way in _ROUNDINGS.items()}
MODES["flushes"] = Mode(lambda: torch.set_flush_denormal(True), flushes)


def under(mode: Mode, run: Run, threads: int = 1) -> Results:
    """``run()`` on a thread of its own, which sets the mode, still has it behind the call, and ends with it."""

    def body() -> Results:
        with on_threads(threads):
            assert mode.enter() and mode.holds(), "the mode cannot be set"
            result = run()
            assert mode.holds(), "the caller's mode is gone"
            return result

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result()


# --- eps ---

LOW = torch.tensor(1e-6).item() - 2.0**-43  # an FP32 number with an even significand; 1e-6 is between the next two
EPS = {
    "below its middle": 1e-6,
    "above its middle": LOW + 0.75 * 2.0**-43,
    "halfway, down to even": LOW + 0.5 * 2.0**-43,
    "halfway, up to even": LOW + 1.5 * 2.0**-43,
    "a hair above halfway": math.nextafter(LOW + 0.5 * 2.0**-43, 1.0),
    "subnormal in FP32": 5e-39,
}
"""Doubles that are no FP32 number."""


def neighbours(eps: float) -> tuple[float, float]:
    """The FP32 numbers below and above ``eps``."""
    near = torch.tensor(eps, dtype=torch.float32)
    one_on = torch.nextafter(near, torch.tensor(math.inf if near.item() < eps else 0.0))
    low, high = sorted((near.item(), one_on.item()))
    return low, high


def rows_for(eps: float, tokens: int, width: int) -> torch.Tensor:
    """BF16 rows, each fourth zero, whose mean square is near ``eps`` or far below it, so that its last bit counts."""
    values = Shape(5).fp32(tokens, width).clamp(-2, 2).double()
    scale = math.sqrt(eps) * 2.0 ** -(torch.arange(tokens, dtype=torch.float64) % 4)
    scale[::4] = 0.0
    return (values * scale[:, None]).to(torch.bfloat16)


def gemm(ops: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, formula: str) -> Results:
    p, r, saved = ops.fp32_gemm_rms_fwd(x, weight, eps, formula)
    return {"p": p, "r": r, **{name: t for name, t in saved.items() if isinstance(t, torch.Tensor)}}


def norm(ops: Any, x: torch.Tensor, gamma: torch.Tensor, eps: float) -> Results:
    y, residual, saved = ops.rmsnorm_residual_fwd(x, gamma, eps)
    return {"y": y, "residual": residual, "r": saved["r"]}


def operators_of_eps(eps: float) -> dict[str, Callable[[Any, float], Results]]:
    """The three formulas with an eps, of operators and eps; the rows are drawn for ``eps``."""
    x, shape = rows_for(eps, 64, 24), Shape(6)
    runs: dict[str, Callable[[Any, float], Results]] = {}
    for formula in CONTROLLER_RMS:
        weight = shape.fp32(24, 24)
        runs[formula] = lambda ops, e, w=weight, f=formula: gemm(ops, x, w, e, f)  # type: ignore[misc]
    gamma = shape.bf16(24)
    runs["rmsnorm"] = lambda ops, e: norm(ops, x, gamma, e)
    return runs


def test_the_doubles_that_stand_for_eps_have_two_fp32_neighbours() -> None:
    """The guard of the next test: nearest even is the lower neighbour for some of them, the upper for others."""
    nearest = {name: torch.tensor(eps, dtype=torch.float32).item() for name, eps in EPS.items()}
    for name, eps in EPS.items():
        low, high = neighbours(eps)
        assert low < eps < high and nearest[name] in (low, high), name
    down = {name for name, eps in EPS.items() if nearest[name] < eps}
    assert {"below its middle", "halfway, down to even"} <= down
    assert not {"above its middle", "halfway, up to even", "a hair above halfway"} & down
    assert 0 < nearest["subnormal in FP32"] < 2.0**-126


@pytest.mark.parametrize("name", EPS)
@pytest.mark.parametrize("profile", PROFILES)
def test_eps_is_rounded_once_to_nearest_even_in_every_mode_of_the_caller(profile: str, name: str) -> None:
    """fp32_gemm_rms_fwd under both formulas and rmsnorm_residual_fwd: the oracle's bytes under the default mode."""
    ops, reference, eps = provider(profile), reference_ops(profile), EPS[name]
    for operator, run in operators_of_eps(eps).items():
        low, high = (run(reference, e) for e in neighbours(eps))
        assert differences(low, high), f"{operator}: the rounding of eps {eps!r} shows in no byte"
        want = run(reference, eps)
        assert_same(run(ops, eps), want, f"{operator} by default")
        for mode, entered in MODES.items():
            assert_same(under(entered, functools.partial(run, ops, eps)), want, f"{operator} {mode}")


# --- the workers ---

TOKENS, THREADS, TIMES = 1024, 3, 5


class Case(NamedTuple):
    """Inputs of subnormal rows, and what the oracle makes of them under the default mode."""

    batch: ResidualBatch
    grads: GradBoundary
    block: Results
    composites: Results


@functools.cache
def all_subnormal(profile: str) -> Case:
    batch, grads = subnormal(*drawn("subnormal rows", TOKENS, 24, profile))
    rows = torch.arange(TOKENS) % 3 != 0  # the others are subnormal already
    for t in (batch.r_old, batch.y_sublayer, grads.d_r_new, grads.d_normalized, grads.d_residual):
        t[rows] = (t[rows].double() * 2.0**-127).to(t.dtype)
    with on_threads(1):
        return Case(batch, grads, composed(None, batch, grads), without_widened(reference_composites(batch, grads)))


def without_widened(results: Results) -> Results:
    """Without the gradients of the FP32 tensor that ``composites`` makes by torch, in the caller's mode."""
    return {name: t for name, t in results.items() if not name.startswith("pre_bwd of FP32")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("profile", PROFILES)
def test_workers_compute_under_the_default_mode_whatever_the_caller_has_set(profile: str, mode: str) -> None:
    """Every one of 1,024 subnormal rows, wherever it is computed, has the oracle's bytes."""
    case, ops = all_subnormal(profile), provider(profile)
    for name in ("post.r_new", "pre.hidden"):
        t = case.block[name]
        assert t is not None and int(((t != 0) & (t.abs() < 2.0**-126)).sum()) > TOKENS, name
    for _ in range(TIMES):
        assert_same(under(MODES[mode], lambda: whole(ops, case.batch, case.grads), THREADS), case.block, mode)
    got = under(MODES[mode], lambda: composites(ops, case.batch, case.grads), THREADS)
    assert_same(without_widened(got), case.composites, mode)


def test_callers_in_different_modes_share_the_workers_and_get_the_same_bytes() -> None:
    """The mode of a call is that of no other, though the workers serve them in turn."""
    case, ops = all_subnormal(PROFILES[1]), provider(PROFILES[1])
    turns = list(itertools.islice(itertools.cycle(MODES), 12))
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(under, MODES[mode], lambda: whole(ops, case.batch, case.grads), THREADS) for mode in turns]
        for mode, run in zip(turns, runs, strict=True):
            assert_same(run.result(), case.block, mode)
