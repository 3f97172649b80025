"""Inputs in any memory: the bytes of their contiguous copy, arguments unchanged, outputs with storage of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_engine.mhc.acceptance import operator_cases as cases
from rl_engine.mhc.acceptance.layouts import LAYOUTS, cloned, expanded, laid_out
from rl_engine.mhc.bits import tensor_bytes
from rl_engine.mhc.contract import GradBoundary
from tests.backends.checkers import thread_differences
from tests.backends.random_shapes import Shape
from tests.backends.support import (
    PROFILES,
    assert_same,
    at_level,
    composed,
    composites,
    drawn,
    levels,
    native_block_runs,
    provider,
    reference_composites,
    reference_ops,
    tensors_of,
    whole,
)
from tests.threads import on_threads


def negative_view(t: torch.Tensor) -> torch.Tensor:
    """The same values, kept as their negatives under torch's lazy negation."""
    return torch._neg_view(-t) if t.is_floating_point() else t


def row_of_many(t: torch.Tensor) -> torch.Tensor:
    """Every second row of twice as many, so that rows lie far apart and each is contiguous."""
    wide = t.new_full((2 * t.shape[0], *t.shape[1:]), 7)
    wide[::2] = t
    return wide[::2]


def reversed_axes_offset(t: torch.Tensor) -> torch.Tensor:
    return LAYOUTS["offset"](LAYOUTS["transposed"](t))


ALL_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **LAYOUTS,
    "negative view": negative_view,
    "every second row": row_of_many,
    "offset of transposed": reversed_axes_offset,
}
RUNNERS = ("run_sinkhorn", "run_gemm_rms", "run_post", "run_aggregate", "run_rmsnorm", "run_fixed_gemm")


def sized(tokens: int, hidden: int) -> dict[str, tuple[torch.Tensor, ...]]:
    shape = Shape(1)
    shape.wide, shape.tokens, shape.hidden = True, tokens, hidden
    return shape.operator_inputs()


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_block_in_any_layout_has_the_bytes_of_its_contiguous_copy(layout: str, profile: str) -> None:
    batch, grads = drawn(f"layout {layout}", 19, 36, profile, gamma_dtype="float32")
    want = composed(None, batch, grads)
    moved, arriving = laid_out(batch, grads, ALL_LAYOUTS[layout])
    assert arriving is not None
    for level in levels():
        for path, run in native_block_runs(profile).items():
            with at_level(level):
                assert_same(run(moved, arriving), want, f"{layout} {level} {path}")
    assert_same(composites(provider(profile), moved, arriving), reference_composites(batch, grads), layout)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_operator_in_any_layout_has_the_bytes_of_its_contiguous_copy(layout: str, runner: str) -> None:
    inputs, run = sized(21, 25)[runner], getattr(cases, runner)
    want = run(reference_ops(PROFILES[1]), inputs)
    for level in levels():
        with at_level(level):
            got = run(provider(PROFILES[1]), tuple(ALL_LAYOUTS[layout](t) for t in inputs))
            assert_same(got, want, f"{runner} {layout} {level}")


@pytest.mark.parametrize("profile", PROFILES)
def test_rows_of_stride_zero_have_the_bytes_of_their_copies(profile: str) -> None:
    batch, grads = drawn("expanded", 2, 20, profile)
    many, arriving = expanded(batch, grads, 33)
    copy, copied = cloned(many, arriving)
    assert copied is not None and arriving is not None
    assert many.r_old.stride(0) == 0
    want = composed(None, copy, copied)
    for path, run in native_block_runs(profile).items():
        assert_same(run(many, arriving), want, path)


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_operator_takes_tensors_expanded_along_every_axis(runner: str) -> None:
    run = getattr(cases, runner)
    inputs = tuple(t[:1].expand_as(t) for t in sized(18, 12)[runner])
    flat = tuple(t.reshape(-1)[:1].expand(t.numel()).view(t.shape) if t.numel() == 1 else t for t in inputs)
    want = run(reference_ops(PROFILES[1]), tuple(t.contiguous() for t in flat))
    assert_same(run(provider(PROFILES[1]), flat), want, runner)
    scalars = tuple(t.flatten()[0].expand(t.shape) for t in inputs)
    want = run(reference_ops(PROFILES[1]), tuple(t.contiguous() for t in scalars))
    assert_same(run(provider(PROFILES[1]), scalars), want, f"{runner} of one number")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 130), (5, 64), (17, 100), (129, 36), (300, 9)])
def test_thread_counts_change_no_byte(tokens: int, hidden: int, profile: str) -> None:
    batch, grads = drawn(f"threads {tokens}", tokens, hidden, profile)
    with on_threads(2):
        assert_same(whole(provider(profile), batch, grads), composed(None, batch, grads), "2 threads")
    for path, run in native_block_runs(profile).items():
        assert thread_differences(lambda run=run: run(batch, grads)) == [], path


@pytest.mark.parametrize("runner", RUNNERS)
def test_thread_counts_change_no_byte_of_an_operator(runner: str) -> None:
    inputs, run = sized(131, 70)[runner], getattr(cases, runner)
    assert thread_differences(lambda: run(provider(PROFILES[1]), inputs)) == []


def test_one_tensor_may_be_several_arguments() -> None:
    profile = PROFILES[0]
    ops, reference = provider(profile), reference_ops(profile)
    inputs = sized(33, 24)
    x = inputs["run_rmsnorm"][0]
    streams = inputs["run_post"][0]
    wide = inputs["run_fixed_gemm"][0]
    square = wide[: min(wide.shape), : min(wide.shape)]
    aliased = {
        "run_rmsnorm": (x, x[0], x, x),
        "run_post": (streams, streams[:, 0], *inputs["run_post"][2:4], streams),
        "run_aggregate": (inputs["run_post"][3], streams, streams[:, 1]),
        "run_fixed_gemm": (square, square, square),
        "run_gemm_rms": (inputs["run_gemm_rms"][1], inputs["run_gemm_rms"][1], *_controller_grads(24)),
    }
    for runner, arguments in aliased.items():
        run = getattr(cases, runner)
        assert_same(run(ops, arguments), run(reference, tuple(t.clone() for t in arguments)), runner)


def test_a_block_whose_gradients_are_its_inputs_is_right() -> None:
    batch, _ = drawn("aliased block", 20, 40)
    grads = GradBoundary(batch.r_old, batch.y_sublayer, batch.y_sublayer)
    want = composed(None, *cloned(batch, grads))  # type: ignore[arg-type]
    for path, run in native_block_runs(PROFILES[0]).items():
        assert_same(run(batch, grads), want, path)


@pytest.mark.parametrize("tokens", [0, 1, 17, 128])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_block_leaves_its_inputs_alone_and_shares_no_storage(tokens: int, profile: str) -> None:
    batch, grads = drawn(f"storage {tokens}", tokens, 24, profile)
    given = tensors_of((batch, grads))
    before = [tensor_bytes(t) for t in given]
    ops = provider(profile)
    r_new, saved = ops.mhc_block_forward(batch)
    kept = [tensor_bytes(t) for t in tensors_of(saved)]
    outputs = [r_new, saved["hidden"], saved["normalized"], saved["residual"]]
    outputs += tensors_of({k: t for k, t in ops.mhc_block_backward(batch, saved, grads).items() if t is not None})
    assert [tensor_bytes(t) for t in given] == before
    assert [tensor_bytes(t) for t in tensors_of(saved)] == kept
    assert_disjoint(given, outputs)
    assert len({t.untyped_storage().data_ptr() for t in outputs if t.numel()}) == sum(t.numel() > 0 for t in outputs)


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_operator_leaves_its_inputs_alone_and_shares_no_storage(runner: str, tokens: int) -> None:
    inputs = sized(tokens, 24)[runner]
    before = [tensor_bytes(t) for t in inputs]
    outputs = getattr(cases, runner)(provider(PROFILES[0]), inputs)
    assert [tensor_bytes(t) for t in inputs] == before
    assert_disjoint(list(inputs), list(outputs.values()))


def assert_disjoint(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    taken = {t.untyped_storage().data_ptr() for t in inputs if t.untyped_storage().nbytes()}
    assert not [t.shape for t in outputs if t.untyped_storage().data_ptr() in taken]


def _controller_grads(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = Shape(2)
    return shape.fp32(tokens, 24), shape.fp32(tokens)
