"""Planted defects: each checker of this folder finds what it is for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rl_engine.mhc.backends.native.call import Native
from tests.backends.checkers import (
    concurrent_differences,
    guarded_outputs,
    repeat_differences,
    thread_differences,
)
from tests.backends.random_shapes import Shape
from tests.backends.support import PROFILES, differences, provider


def aggregate(tokens: int = 16) -> torch.Tensor:
    shape = Shape(3)
    return provider(PROFILES[0]).h_aggregate_fwd(shape.fp32(tokens, 4), shape.bf16(tokens, 4, 36))


def call_with_rows(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """The kernel of ``h_aggregate_fwd`` is told of ``more`` rows than there are outputs."""
    run = Native.run

    def wrong(self: Native, function: str, tokens: int, *arguments: Any) -> None:
        run(self, function, tokens + more, *arguments)

    shape = Shape(3)
    ops = provider(PROFILES[0])
    monkeypatch.setattr(ops, "run", lambda *a: wrong(ops._native, *a))
    pre, r_old = shape.fp32(18, 4), shape.bf16(18, 4, 36)  # inputs with room for what is read too far
    ops.h_aggregate_fwd(pre[:16], r_old[:16])


def test_a_row_written_behind_the_output_touches_a_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded_outputs() as allocator:
        call_with_rows(monkeypatch, 1)
    assert allocator.touched() == ["torch.bfloat16 (16, 36): 36 elements behind it, first 0 of 269"]
    assert allocator.unwritten() == []


def test_a_row_that_is_not_written_leaves_its_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded_outputs() as allocator:
        call_with_rows(monkeypatch, -1)
    assert allocator.unwritten() == ["torch.bfloat16 (16, 36): 36 elements not written"]
    assert allocator.touched() == []


def test_the_comparison_finds_one_ulp_a_negative_zero_a_nan_and_a_missing_tensor() -> None:
    want = {"a": aggregate(), "none": None}
    for position, bits in ((0, 1), (1, -32768), (2, 0x7FC0)):
        changed = want["a"].clone()
        flat = changed.view(torch.int16).view(-1)
        flat[position] = bits if bits == 0x7FC0 else flat[position] ^ bits
        (line,) = differences({"a": changed, "none": None}, want)
        assert line.startswith("a: 1 of 576 differ")
    assert differences({"a": want["a"]}, want) == ["none: in one of them only"]
    assert differences({"a": want["a"], "none": want["a"]}, want) == ["none: None in one of them only"]
    assert differences({"a": want["a"].float(), "none": None}, want)
    assert differences(dict(want), want) == []


def test_a_sum_that_is_split_by_threads_is_found() -> None:
    x = Shape(4).fp32(1009)

    def split() -> dict[str, torch.Tensor]:
        parts = x.chunk(torch.get_num_threads())
        return {"sum": sum((torch.cumsum(part, 0)[-1] for part in parts), torch.zeros(()))}

    assert any(line.startswith("7 threads: sum: 1 of 1 differ") for line in thread_differences(split))


def test_one_other_result_in_a_hundred_is_found() -> None:
    numbers = itertools.count()
    right = aggregate()

    def now_and_then() -> dict[str, torch.Tensor]:
        return {"hidden": right + 1 if next(numbers) == 57 else right}

    assert [line.partition(":")[0] for line in repeat_differences(now_and_then)] == ["run 57"]
    numbers = itertools.count(40)
    assert len(concurrent_differences(now_and_then, {"hidden": right})) == 1
