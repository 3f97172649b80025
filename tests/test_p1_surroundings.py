"""What may not move a byte: modes of torch, threads, the other rows; and the one mode that is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.mhc import fixtures, oracle
from rl_engine.mhc.contract import GradBoundary, ResidualBatch
from rl_engine.mhc.provider import ReferenceProvider
from rl_engine.mhc.reduction import fixed_dot, fixed_sum, fixed_sumsq, stream4_sum
from tests.operators.block_inputs import block_leaves, grad_leaves, make_block, take, with_leaves
from tests.operators.support import BF16, FP32, assert_same_leaves, leaves
from tests.reference.bridge import assert_same_tensor, encodings, from_bits
from tests.threads import on_threads

REPOSITORY = Path(__file__).resolve().parents[1]
ROW_KEYS = ("d_r_old", "dy_sublayer", "d_hidden", "d_c", "d_post")


def run(batch: ResidualBatch, grads: GradBoundary, ops: Any = None) -> list[Any]:
    """Everything that a forward and a backward return."""
    r_new, saved = oracle.mhc_block_forward(batch, ops=ops)
    return [r_new, saved, oracle.mhc_block_backward(batch, saved, grads, ops=ops)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast bf16": lambda: torch.autocast("cpu", dtype=BF16),
    "autocast fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "inference mode": torch.inference_mode,
    "grad mode": torch.enable_grad,
    "no grad": torch.no_grad,
    "anomaly detection": torch.autograd.detect_anomaly,
    "default fp64": lambda: default_dtype(torch.float64),
    "default bf16": lambda: default_dtype(BF16),
    "default device": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
    "1 thread": lambda: on_threads(1),
    "2 threads": lambda: on_threads(2),
    "7 threads": lambda: on_threads(7),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_surroundings_move_no_byte(name: str) -> None:
    with SURROUNDINGS[name]():
        assert fixtures.golden_manifest() == fixtures.load_manifest()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads_move_no_byte_of_a_wide_batch(count: int) -> None:
    """Wide enough for torch to share the work out: over 32768 elements in a step."""
    batch, grads = make_block("wide", 40, 300)
    with on_threads(1):
        want = run(batch, grads)
    with on_threads(count):
        assert_same_leaves("outputs", run(batch, grads), want)


def test_a_forward_in_inference_mode_goes_with_any_backward() -> None:
    batch, grads = make_block("inference", 3, 4)
    want = run(batch, grads)
    with torch.inference_mode():
        r_new, saved = oracle.mhc_block_forward(batch)
    assert_same_leaves("outputs", [r_new, saved, oracle.mhc_block_backward(batch, saved, grads)], want)


@pytest.mark.parametrize("ops", [None, oracle, ReferenceProvider()], ids=["none", "oracle", "reference"])
def test_trainable_parameters_build_no_graph(ops: Any) -> None:
    batch, grads = make_block("graph", 3, 4)
    want = run(batch, grads)
    trained = with_leaves(batch, **{name: t.clone().requires_grad_() for name, t in block_leaves(batch).items()})
    asking = GradBoundary(*(t.clone().requires_grad_() for t in grad_leaves(grads)))
    got = run(trained, asking, ops)
    fused = oracle.mhc_pre_rmsnorm_fused_fwd(trained, ops)
    assert all(t.grad_fn is None and not t.requires_grad for t in leaves([got, fused]))
    assert_same_leaves("outputs", got, want)
    assert all(t.requires_grad and t.grad is None for t in block_leaves(trained).values())


WIDE, WIDE_GRADS = make_block("rows", 12, 5)
WIDE_RESULTS = run(WIDE, WIDE_GRADS)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 11), max_size=14))
def test_any_choice_of_rows_keeps_their_bytes(rows: list[int]) -> None:
    r_new, saved, got = run(*take(WIDE, WIDE_GRADS, rows))
    want_r_new, want_saved, want = WIDE_RESULTS
    assert_same_tensor("r_new", r_new, want_r_new[rows])
    for key in ("p", "r", "h", "pre", "post", "c", "hidden", "normalized", "residual"):
        assert_same_tensor(key, saved[key], want_saved[key][rows])
    for key in ROW_KEYS:
        assert_same_tensor(key, got[key], want[key][rows])


@pytest.mark.parametrize("tokens", [32, 33, 64, 65, 255, 256, 2048, 2049])
def test_a_row_does_not_know_how_many_there_are(tokens: int) -> None:
    batch, grads = make_block("thresholds", 2049, 3)
    part, part_grads = take(batch, grads, list(range(2049 - tokens, 2049)))
    r_new, saved, got = run(part, part_grads)
    alone_r_new, alone_saved, alone = run(*take(batch, grads, [2048]))
    assert_same_tensor("r_new", r_new[-1:], alone_r_new)
    for key in ("p", "r", "h", "pre", "post", "c", "hidden", "normalized", "residual"):
        assert_same_tensor(key, saved[key][-1:], alone_saved[key])
    for key in ROW_KEYS:
        assert_same_tensor(key, got[key][-1:], alone[key])


# --- subnormals ---


@contextmanager
def flushing() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    batch, grads = make_block("flush", 2, 3)
    _, saved = oracle.mhc_block_forward(batch)
    h = torch.zeros(2, 24)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: oracle.mhc_block_forward(batch),
        "backward": lambda: oracle.mhc_block_backward(batch, saved, grads),
        "pre": lambda: oracle.mhc_pre_fwd(batch),
        "fused": lambda: oracle.mhc_pre_rmsnorm_fused_fwd(batch, ReferenceProvider()),
        "sinkhorn": lambda: oracle.hc_split_sinkhorn_fwd(h),
        "gemm": lambda: oracle.fixed_k_gemm_fwd(h, h),
        "post": lambda: oracle.mhc_post_fwd(batch.r_old, batch.y_sublayer, saved["c"], saved["post"]),
    }
    for call in calls.values():
        with flushing(), pytest.raises(RuntimeError, match="flushes subnormal"):
            call()
        call()


@pytest.mark.parametrize("name", ["sum", "sumsq", "dot", "stream4_sum"])
def test_a_reduction_keeps_subnormals_or_refuses(name: str) -> None:
    x = from_bits([3, 0x80000001, 5, 0x00000100])
    small = from_bits([0x1F800000, 0x1F900000, 0x9F800000, 0x1FA00000])  # squares are subnormal
    calls: dict[str, Callable[[], Any]] = {
        "sum": lambda: fixed_sum(x),
        "sumsq": lambda: fixed_sumsq(small),
        "dot": lambda: fixed_dot(small[None], small[None]),
        "stream4_sum": lambda: stream4_sum(list(x)),
    }
    want = encodings(calls[name]())
    assert want[0] != 0
    with flushing():
        try:
            got = calls[name]()
        except RuntimeError:
            return
    assert encodings(got) == want


FLUSHED_WORKERS = """
import torch
torch.set_num_threads(2)
torch.set_flush_denormal(True)
torch.ones(1 << 20).mul_(0.5)  # the workers start here and keep the mode
torch.set_flush_denormal(False)
from rl_engine.mhc import oracle
rows = torch.full((64, 4, 512), 2.0**-126).to(torch.bfloat16)
y, post = torch.zeros(64, 512, dtype=torch.bfloat16), torch.zeros(64, 4)
c = torch.zeros(64, 4, 4)
c[:, 0] = 0.5
try:
    r_new = oracle.mhc_post_fwd(rows, y, c, post)
except RuntimeError:
    print("refused")
else:
    print("flushed" if (r_new == 0).any() else "kept")
"""


def test_worker_threads_that_flush_subnormals_are_found() -> None:
    """The mode is a thread's own. Workers that started under it keep it when the caller has left it."""
    run = subprocess.run([sys.executable, "-c", FLUSHED_WORKERS], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() in ("refused", "kept")


def test_nothing_is_left_behind() -> None:
    """The surroundings of these tests are what they were: the mode of a test must not leak into the next."""
    assert torch.get_default_dtype() == FP32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.full((1,), 2.0**-126).mul_(0.5).item() == 2.0**-127
