"""Operators alone, each interleaved with the probes of the machine that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.implementations import Call, Implementation
from benchmarks.inputs import Inputs
from benchmarks.operator_calls import arguments, flops, nbytes, returned_tensors
from benchmarks.results import Cell, OperatorRow
from benchmarks.roofline import Roofline
from benchmarks.session import Session
from benchmarks.timing import Task

OPERATOR_TOKENS = (512, 4096)


def time_operators(session: Session, ones: Sequence[Implementation], full: Inputs) -> None:
    """Fill in ``result.operators``: at the larger T, and the oracle at the one that it can be given."""
    options, result = session.options, session.result
    wanted = [t for t in OPERATOR_TOKENS if t in options.tokens] or [max(options.tokens)]
    for operator in options.operators:
        serving = [one for one in ones if operator in one.operators and one.name not in result.red]
        groups: dict[int, list[Implementation]] = {}
        for one in serving:
            for tokens in {min(t, one.max_tokens or t) for t in wanted}:
                groups.setdefault(tokens, []).append(one)
        for tokens in sorted(groups):
            inputs, tasks, moved = full.first(tokens), [], 0
            for one in groups[tokens]:
                threads = one.threads or options.threads
                torch.set_num_threads(threads)
                call = needed(one)(inputs, operator)
                moved = operator_bytes(operator, inputs, call())
                tasks.append(Task((one.name, operator), call, threads))
            samples = session.interleaved(tasks, tokens, beside_limits=True)
            for (name, _), sample in samples.items():
                per_token = sample.median_s * 1e6 / tokens
                cell = Cell(name, operator, tokens, options.threads, per_token, samples=sample.count)
                result.operators.append(operator_row(cell, result.hidden, moved))


def needed(one: Implementation) -> Callable[[Inputs, str], Call]:
    """How an implementation that lists operators makes a call of one."""
    if one.operator is None:
        raise ValueError(f"{one.name}: lists operators and has no call of them")
    return one.operator


def operator_bytes(operator: str, inputs: Inputs, returned: Any) -> int:
    """All inputs read once and all outputs written once."""
    return nbytes(arguments(inputs, operator)) + nbytes(returned_tensors(returned))


def operator_row(cell: Cell, hidden: int, moved: int) -> OperatorRow:
    """What a time says about rates."""
    per_token = cell.median_us or 0.0
    seconds = per_token * cell.tokens * 1e-6
    work = flops(cell.what, cell.tokens, hidden)
    gflops = None if work is None else work / seconds / 1e9
    return OperatorRow(
        cell.implementation, cell.what, cell.tokens, per_token, cell.samples, gflops, moved / seconds / 1e9
    )


def with_shares(row: OperatorRow, limits: Roofline | None) -> OperatorRow:
    """The same beside the limits of the machine, where they were measured."""
    if limits is None:
        return row
    peak = None if row.gflops is None else row.gflops / limits.peak_gflops
    return replace(row, peak_share=peak, copy_share=row.gbs / limits.copy_gbs)
