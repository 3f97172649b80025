"""Interleaved timing: round after round over everything that is compared, so that what disturbs one disturbs all.

A visit runs one call a few times in a row; the first of cheap calls is not counted, since the visit before left other
data in the caches. A figure is the median of all counted calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

CHEAP_S = 0.005
VISIT_S = 0.02
MOST_CALLS = 20


@dataclass(frozen=True)
class Sample:
    """Seconds of one call: the median, the fastest, and of how many."""

    median_s: float
    best_s: float
    count: int


@dataclass
class Task:
    """One thing to time, and what was measured so far."""

    key: tuple[str, ...]
    call: Callable[[], Any]
    threads: int
    seconds: list[float] = field(default_factory=list)
    spent: float = 0.0

    def visit(self) -> None:
        """Run the call on its threads, a few times where it is cheap."""
        torch.set_num_threads(self.threads)
        first = self._once()
        if first < CHEAP_S:
            calls = max(2, min(MOST_CALLS, int(VISIT_S / max(first, 1e-6))))
            self.seconds += [self._once() for _ in range(calls)]
        else:
            self.seconds.append(first)

    def _once(self) -> float:
        start = time.perf_counter()
        self.call()
        elapsed = time.perf_counter() - start
        self.spent += elapsed
        return elapsed

    def sample(self) -> Sample:
        """What the calls so far say."""
        return Sample(statistics.median(self.seconds), min(self.seconds), len(self.seconds))


def interleave(
    tasks: Sequence[Task], budget_s: float, least: int, progress: Callable[[str], None]
) -> dict[tuple[str, ...], Sample]:
    """The sample of each task. Each is visited until it has spent its budget and has ``least`` samples.

    A call that takes longer than its budget alone is not repeated. The calls must have run once before.
    """
    before, rounds = torch.get_num_threads(), 0
    waiting = list(tasks)
    try:
        while waiting:
            rounds += 1
            for task in waiting:
                progress(f"{' '.join(task.key)}, round {rounds}")
                task.visit()
            waiting = [t for t in waiting if not _done(t, budget_s, least)]
    finally:
        torch.set_num_threads(before)
    return {task.key: task.sample() for task in tasks}


def _done(task: Task, budget_s: float, least: int) -> bool:
    enough = len(task.seconds) >= least or task.seconds[0] > budget_s
    return enough and task.spent >= budget_s
