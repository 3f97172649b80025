"""What torch's elementary functions do, in counts: the measurements that motivate ``portable-fp32-mhc-v1``.

    python benchmarks/elementary_profiles.py [--count N] [--profiles [ID ...]] [--repeats N] [--markdown]

Inputs are words of a counter-based generator scaled by exact arithmetic, so they are the same on every machine; what
torch makes of them is not. The one timing is taken in the same process, after both functions were shown to be right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from rl_engine.mhc.bits import differing, ordinals
from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE, for_profile
from rl_engine.mhc.fixtures import golden_manifest, load_manifest, moved_hashes

REPOSITORY = Path(__file__).resolve().parents[1]
COUNT = 1 << 20
SAMPLED_ROOTS = 256
"""Roots that are held against exact rational arithmetic, to see that numpy's is IEEE's."""
UNSURE = 2.0**-48
"""Relative error that an FP64 evaluation of sigmoid or exp surely stays below."""
PORTABLE = for_profile(PORTABLE_PROFILE)


@dataclass(frozen=True)
class Measured:
    """``moved`` of ``total`` things are not what they were compared with."""

    what: str
    moved: int
    total: int

    @property
    def share(self) -> str:
        return f"{100 * self.moved / self.total:.4g} %" if self.total else "-"


@dataclass(frozen=True)
class Timing:
    """Medians in seconds of one call on ``count`` elements."""

    count: int
    threads: int
    repeats: int
    torch_exp: float
    portable_exp: float

    @property
    def ratio(self) -> float:
        return self.portable_exp / self.torch_exp


def uniform(name: str, count: int, low: float, high: float) -> torch.Tensor:
    """FP32 numbers from [low, high), the same on every machine; ``high - low`` is a power of two."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(count) >> np.uint64(40)
    return torch.from_numpy((words.astype(np.float64) * 2.0**-24 * (high - low) + low).astype(np.float32))


def moved(what: str, got: torch.Tensor, want: torch.Tensor) -> Measured:
    """How many elements of ``got`` have other encodings than those of ``want``."""
    return Measured(what, int(differing(got, want).sum()), want.numel())


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, two elements apart."""
    wide = torch.zeros(x.numel(), 2)
    wide[:, 0] = x
    return wide[:, 0]


def sigmoid_paths(count: int) -> Iterator[Measured]:
    """``torch.sigmoid`` of the same values in other memory."""
    x = uniform("sigmoid", count, -16.0, 16.0)
    yield moved("torch.sigmoid, contiguous against strided", torch.sigmoid(x), torch.sigmoid(strided(x)))
    h = uniform("h", max(2, count // 64) * 24, -4.0, 4.0).reshape(-1, 24)
    view, copy = torch.sigmoid(h[:, :4]), torch.sigmoid(h[:, :4].contiguous())
    yield moved("torch.sigmoid, a copy of h's first 4 columns against the view", copy, view)
    few, shorter = 0, 0
    for tokens in range(1, min(40, h.shape[0] - 1) + 1):
        alone = torch.sigmoid(h[:tokens, :4].contiguous())
        more = torch.sigmoid(h[: tokens + 1, :4].contiguous())[:tokens]
        few, shorter = few + int(differing(alone, more).sum()), shorter + alone.numel()
    yield Measured("torch.sigmoid, copies of T rows against the same rows of T + 1, T to 40", few, shorter)


def ieee_root(x: np.ndarray) -> np.ndarray:
    """numpy's square root, a sample of it proven to be the nearest by exact arithmetic."""
    roots: np.ndarray = np.sqrt(x)
    for value, root in zip(x[:SAMPLED_ROOTS], roots[:SAMPLED_ROOTS], strict=True):
        below, above = np.nextafter(root, root.dtype.type(0)), np.nextafter(root, root.dtype.type(np.inf))
        middle_low = (Fraction(float(below)) + Fraction(float(root))) / 2
        middle_high = (Fraction(float(root)) + Fraction(float(above))) / 2
        if value and not middle_low**2 < Fraction(float(value)) < middle_high**2:
            raise RuntimeError(f"numpy's square root of {value!r} is not the nearest: {root!r}")
    return roots


def roots(count: int) -> Iterator[Measured]:
    """``torch.sqrt`` against the square root of IEEE 754, in both formats."""
    x = uniform("sqrt", count, 0.0, 128.0)
    root32 = torch.from_numpy(ieee_root(x.numpy()))
    yield moved("torch.sqrt of FP32 against IEEE 754", torch.sqrt(x), root32)
    wide = x.double() + uniform("sqrt low", count, 0.0, 1.0).double() * 2.0**-24
    yield moved("torch.sqrt of FP64 against IEEE 754", torch.sqrt(wide), torch.from_numpy(ieee_root(wide.numpy())))
    yield moved("portable sqrt of FP32 against IEEE 754", PORTABLE.sqrt(x), root32)


def not_nearest(what: str, got: torch.Tensor, exact: np.ndarray) -> Measured:
    """How many of ``got`` are not the FP32 number nearest to ``exact`` (FP64); those too close to call are left out."""
    low, high = (torch.from_numpy((exact * (1 + side * UNSURE)).astype(np.float32)) for side in (-1, 1))
    sure = ~differing(low, high)
    return moved(what, got[sure], low[sure])


def rounding(count: int) -> Iterator[Measured]:
    """Which functions return the nearest FP32 number, and how far the two profiles are apart."""
    x = uniform("exp", count, -64.0, 64.0)
    exact = np.exp(x.double().numpy())
    yield not_nearest("torch.exp not the nearest FP32 number", torch.exp(x), exact)
    yield not_nearest("portable exp not the nearest FP32 number", PORTABLE.exp(x), exact)
    yield moved("torch.exp against portable exp", torch.exp(x), PORTABLE.exp(x))
    x = uniform("sigmoid", count, -16.0, 16.0)
    exact = 1 / (1 + np.exp(-x.double().numpy()))
    yield not_nearest("torch.sigmoid, contiguous, not the nearest FP32 number", torch.sigmoid(x), exact)
    yield not_nearest("torch.sigmoid, strided, not the nearest FP32 number", torch.sigmoid(strided(x)), exact)
    yield not_nearest("portable sigmoid not the nearest FP32 number (its steps round)", PORTABLE.sigmoid(x), exact)
    yield moved("torch.sigmoid, strided, against portable sigmoid", torch.sigmoid(strided(x)), PORTABLE.sigmoid(x))


def hashes(profile: str) -> Measured:
    """Golden hashes that change when torch is told to use no vector instructions, in a process of its own."""
    command = [sys.executable, "-m", "rl_engine.mhc.fixtures", "--profile", profile]
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, env=variables, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    total = sum(map(len, load_manifest(numeric_profile=profile)["cases"].values()))
    changed = moved_hashes(golden_manifest(numeric_profile=profile), json.loads(done.stdout))
    return Measured(f"hashes of {profile} under ATEN_CPU_CAPABILITY=default", len(changed), total)


def median_seconds(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, repeats: int) -> float:
    """The median over ``repeats`` calls, after one that warms up."""
    function(x)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def timing(count: int, repeats: int) -> Timing:
    """Portable exp beside ``torch.exp``. ``RuntimeError`` instead of a figure where either result is wrong."""
    x = uniform("exp", count, -64.0, 64.0)
    portable = PORTABLE.exp(x)
    if not_nearest("", portable, np.exp(x.double().numpy())).moved:
        raise RuntimeError("portable exp is not correctly rounded here: no timing")
    if int((ordinals(torch.exp(x)) - ordinals(portable)).abs().max()) > 1:
        raise RuntimeError("torch.exp is more than one ULP off here: no timing")
    seconds = (median_seconds(torch.exp, x, repeats), median_seconds(PORTABLE.exp, x, repeats))
    return Timing(count, torch.get_num_threads(), repeats, *seconds)


def measure(count: int, profiles: Sequence[str]) -> Iterator[Measured]:
    """Every count, one after the other."""
    yield from sigmoid_paths(count)
    yield from roots(count)
    yield from rounding(count)
    yield from map(hashes, profiles)


def rows(measured: Sequence[Measured], markdown: bool) -> Iterator[str]:
    """The lines of the table."""
    if markdown:
        yield "| measured | differ | of | share |"
        yield "|---|---|---|---|"
        yield from (f"| {m.what.replace('|', '/')} | {m.moved} | {m.total} | {m.share} |" for m in measured)
        return
    width = max(len(m.what) for m in measured)
    yield from (f"{m.what:<{width}}  {m.moved:>9} of {m.total:>9}  {m.share:>10}" for m in measured)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="values for each function (default: %(default)s)")
    known = (ORACLE_PROFILE, PORTABLE_PROFILE)
    parser.add_argument("--profiles", nargs="*", default=known, choices=known, help="whose hashes (default: both)")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each function; 0 for no timing")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args(argv)
    if options.count < 64 or options.repeats < 0:
        parser.error("--count must be at least 64, --repeats at least 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    measured = []
    for one in measure(options.count, options.profiles):
        measured.append(one)
        if sys.stderr.isatty():
            print(f"\r\033[K{one.what}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {capability}, {torch.get_num_threads()} threads\n")
    print("\n".join(rows(measured, options.markdown)))
    if options.repeats:
        t = timing(options.count, options.repeats)
        print(
            f"\nexp of {t.count} elements, {t.threads} threads, median of {t.repeats}: torch {1e3 * t.torch_exp:.3g} "
            f"ms, portable {1e3 * t.portable_exp:.3g} ms, ratio {t.ratio:.3g}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
