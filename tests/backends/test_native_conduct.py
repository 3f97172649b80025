"""Repeats, concurrent callers, forks, and a caller that flushes subnormals: the same bytes, and nothing left behind."""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rl_engine.mhc.acceptance import operator_cases as cases
from rl_engine.mhc.bits import tensor_bytes
from tests.backends.checkers import concurrent_differences, repeat_differences
from tests.backends.random_shapes import Shape
from tests.backends.support import (
    PROFILES,
    assert_same,
    composed,
    drawn,
    native_block_runs,
    provider,
    whole,
)
from tests.threads import on_threads

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_hundred_repeats_of_a_block_have_the_same_bytes(profile: str, threads: int) -> None:
    batch, grads = drawn("repeats", 67, 36, profile)
    with on_threads(threads):
        assert repeat_differences(lambda: whole(provider(profile), batch, grads)) == []


def test_a_hundred_repeats_of_each_operator_have_the_same_bytes() -> None:
    inputs = Shape(11).operator_inputs()
    with on_threads(3):
        for runner, given in inputs.items():
            run = getattr(cases, runner)
            assert repeat_differences(lambda run=run, given=given: run(provider(PROFILES[1]), given)) == [], runner


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("profile", PROFILES)
def test_concurrent_callers_get_the_same_bytes(profile: str, threads: int) -> None:
    batch, grads = drawn("concurrent", 130, 60, profile)
    want = composed(None, batch, grads)
    with on_threads(threads):
        for path, run in native_block_runs(profile).items():
            assert concurrent_differences(lambda run=run: run(batch, grads), want) == [], path


def test_a_call_lets_other_python_threads_run() -> None:
    batch, grads = drawn("gil", 64, 512, PROFILES[1])
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        whole(provider(PROFILES[1]), batch, grads)
    finally:
        stop.set()
        counter.join()
    assert counted[0] > 0


def digest(results: dict[str, Any]) -> str:
    total = hashlib.sha256()
    for name in sorted(results):
        total.update(name.encode() + (b"none" if results[name] is None else tensor_bytes(results[name])))
    return total.hexdigest()


def child(pipe: Any, ops: Any, batch: Any, grads: Any) -> None:
    pipe.send([digest(whole(ops, batch, grads)) for _ in range(3)])
    pipe.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("profile", PROFILES)
def test_a_forked_child_and_its_parent_get_the_same_bytes(profile: str) -> None:
    """The whole-block path: the canonical composition adds with torch, whose own threads do not survive a fork."""
    batch, grads = drawn("forked", 300, 36, profile)
    context, ops = multiprocessing.get_context("fork"), provider(profile)
    with on_threads(3):
        want = digest(whole(ops, batch, grads))  # threads have been started before the fork
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(theirs, ops, batch, grads))
        process.start()
        during = digest(whole(ops, batch, grads))
        try:
            assert ours.poll(20), "the forked child did not answer"
            assert ours.recv() == [want] * 3
        finally:
            process.join(5)
            process.kill()
        assert process.exitcode == 0
        assert during == digest(whole(ops, batch, grads)) == want


FLUSHED = """
import sys, torch
from tests.backends.support import PROFILES, composed, composites, differences, drawn, native_block_runs
from tests.backends.support import provider, reference_composites, reference_ops
from tests.threads import on_threads
from tests.backends.test_native_conduct import subnormal
from rl_engine.mhc.acceptance import operator_cases as cases

def flushes():
    return (sys.float_info.min * 0.5) * 2.0 == 0.0

work = []
for profile in PROFILES:
    batch, grads = subnormal(*drawn("flushed", 2500, 12, profile))
    leaf = cases.OPERATOR_CASES[4].inputs(64, profile)
    want = (composed(None, batch, grads), reference_composites(batch, grads),
            cases.run_gemm_rms(reference_ops(profile), leaf))
    work.append((profile, batch, grads, leaf, want))
small = sum(int(((t != 0) & (t.abs() < 2.0**-126)).sum()) for w in work for t in w[4][0].values() if t is not None)
assert small > 100, small
assert torch.set_flush_denormal(True) and flushes()
for profile, batch, grads, leaf, want in work:
    for threads in (1, 3):
        with on_threads(threads):
            for path, run in native_block_runs(profile).items():
                if "composed" in path:
                    continue  # the composition between the leaves is torch's own arithmetic
                found = differences(run(batch, grads), want[0])
                assert not found, (profile, threads, path, found)
                assert flushes(), "the caller's mode is gone"
            found = differences(composites(provider(profile), batch, grads), want[1])
            found = [line for line in found if not line.startswith("pre_bwd of FP32")]
            found += differences(cases.run_gemm_rms(provider(profile), leaf), want[2])
            assert not found, (profile, threads, found)
            assert flushes(), "the caller's mode is gone"
print("PASS")
"""


def subnormal(batch: Any, grads: Any) -> tuple[Any, Any]:
    """Every third row scaled until products and sums of it are subnormal, and one parameter of that size."""
    for t in (batch.r_old, batch.y_sublayer, grads.d_r_new, grads.d_normalized, grads.d_residual):
        t[::3] = (t[::3].double() * 2.0**-127).to(t.dtype)
    batch.controller.alpha_pre.fill_(2.0**-127)
    return batch.__class__(**vars(batch) | {"weight_fingerprint": ""}), grads


def test_a_caller_that_flushes_subnormals_changes_no_byte_and_keeps_its_mode() -> None:
    command = [sys.executable, "-c", FLUSHED]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=120)
    assert (run.returncode, run.stdout) == (0, "PASS\n"), run.stderr


def test_calls_before_and_after_other_threads_counts_agree() -> None:
    batch, grads = drawn("counts", 65, 24)
    want = composed(None, batch, grads)
    for threads in (7, 1, 2, 16, 3, 1):
        with on_threads(threads):
            assert_same(whole(provider(PROFILES[0]), batch, grads), want, f"{threads} threads")
