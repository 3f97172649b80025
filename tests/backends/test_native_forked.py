"""A forked child has none of its parent's threads, torch's or the library's; it computes the same bytes without."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rl_engine.mhc.acceptance import operator_cases as cases
from rl_engine.mhc.acceptance.layouts import LAYOUTS, laid_out
from rl_engine.mhc.backends.native import call
from rl_engine.mhc.contract import CONTROLLER_RMS
from tests.backends.support import PROFILES, Named, drawn, provider, whole
from tests.backends.test_native_layouts import RUNNERS, row_of_many, sized
from tests.threads import on_threads

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

DEADLINE = 20.0
"""Seconds for an answer; a child that waits for threads that it lacks never gives one."""

MANY = 9000
"""Tokens for which torch would spread every tensor of a leaf, the narrowest included, over its own threads."""


def digest(results: Named) -> str:
    """SHA-256 of all bytes, taken without torch's threads."""
    total = hashlib.sha256()
    for name in sorted(results):
        t = results[name]
        total.update(name.encode() + (b"none" if t is None else t.detach().view(torch.uint8).numpy().tobytes()))
    return total.hexdigest()


def in_child(run: Callable[[], str], seconds: float = DEADLINE) -> str | None:
    """What ``run`` returns, or its traceback, from a child forked now; ``None`` where it does not answer in time."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = run()
        except BaseException:
            answer = traceback.format_exc()
        os.write(writer, answer.encode()[:4096])  # less than a pipe holds
        os._exit(0)
    os.close(writer)
    answered = False
    try:
        answered = bool(select.select([reader], [], [], seconds)[0])
        return os.read(reader, 4096).decode() if answered else None
    finally:
        os.close(reader)
        if not answered:
            os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (0 if answered else -signal.SIGKILL)


@pytest.fixture(autouse=True)
def _threads_before_the_fork() -> Iterator[None]:
    """Torch's threads, as the library's, run in the parent before each fork, so a child that wants them waits."""
    with on_threads(3):
        torch.ones(1 << 18).mul_(2.0)
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_block_of_strided_tensors_has_the_same_bytes_in_a_forked_child(profile: str, layout: str) -> None:
    """``r_old`` and all else that a backend copies first, with more elements than torch copies on one thread."""
    batch, grads = drawn("forked strided", 1000, 36, profile)
    moved = laid_out(batch, grads, LAYOUTS[layout])
    assert batch.r_old.numel() > call.ONE_THREAD_BELOW and moved[1] is not None
    ops = provider(profile)
    want = digest(whole(ops, batch, grads))
    assert in_child(lambda: digest(whole(ops, *moved))) == want  # type: ignore[arg-type]
    assert digest(whole(ops, *moved)) == want  # type: ignore[arg-type]


def test_a_block_of_lazily_negated_streams_has_the_same_bytes_in_a_forked_child() -> None:
    """Contiguous, and negated only when it is read: it is copied first too."""
    batch, grads = drawn("forked negated", 1000, 36)
    moved = dataclasses.replace(batch, r_old=torch._neg_view(-batch.r_old))
    assert moved.r_old.is_neg() and moved.r_old.numel() > call.ONE_THREAD_BELOW
    ops = provider(PROFILES[0])
    want = digest(whole(ops, batch, grads))
    assert in_child(lambda: digest(whole(ops, moved, grads))) == want


@pytest.mark.parametrize("profile", PROFILES)
def test_a_block_of_many_tokens_has_the_same_bytes_in_a_forked_child(profile: str) -> None:
    """Three calls in the child, the first of which starts workers of its own."""
    batch, grads = drawn("forked many", MANY, 4, profile)
    batch = dataclasses.replace(batch, r_old=LAYOUTS["transposed"](batch.r_old))
    ops = provider(profile)
    want = digest(whole(ops, batch, grads))
    assert in_child(lambda: " ".join(digest(whole(ops, batch, grads)) for _ in range(3))) == " ".join([want] * 3)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_leaf_of_many_tokens_has_the_same_bytes_in_a_forked_child(profile: str, runner: str) -> None:
    """Of contiguous, transposed and spaced arguments, and with what torch does between two kernels."""
    inputs, run, ops = sized(MANY, 4)[runner], getattr(cases, runner), provider(profile)
    given = [inputs, *(tuple(layout(t) for t in inputs) for layout in (LAYOUTS["transposed"], row_of_many))]
    want = digest(run(ops, inputs))
    assert in_child(lambda: " ".join(digest(run(ops, some)) for some in given)) == " ".join([want] * 3)


@pytest.mark.parametrize("formula", CONTROLLER_RMS)
@pytest.mark.parametrize("profile", PROFILES)
def test_either_scale_of_very_many_rows_has_the_same_bytes_in_a_forked_child(profile: str, formula: str) -> None:
    """One number a row, and rows enough that torch would spread even those."""
    ops, x = provider(profile), torch.ones(call.ONE_THREAD_BELOW + 5, 4) * torch.arange(4)
    narrow = x.bfloat16()

    def scales() -> str:
        p, r, _ = ops.fp32_gemm_rms_fwd(x, torch.ones(24, 4), 1e-6, formula)
        y, residual, saved = ops.rmsnorm_residual_fwd(narrow, torch.ones(4), 1e-6)
        return digest({"p": p, "r": r, "y": y, "residual": residual, "norm.r": saved["r"]})

    want = scales()
    assert in_child(scales) == want


def test_a_copy_by_torchs_own_threads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: ``Tensor.contiguous`` in place of the copy on the calling thread never ends in the child."""
    batch, grads = drawn("forked strided", 1000, 36)
    moved: Any = laid_out(batch, grads, LAYOUTS["transposed"])
    monkeypatch.setattr(call, "copied", lambda t: t.contiguous())
    whole(provider(PROFILES[0]), *moved)
    assert in_child(lambda: digest(whole(provider(PROFILES[0]), *moved)), 1.0) is None
