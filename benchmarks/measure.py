"""One run: gate, roofline, the blocks at each T, the operators, memory, import. Nothing red is timed."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import bars, gate, processes
from benchmarks.implementations import IMPLEMENTATIONS, Call, Implementation, Tensors
from benchmarks.inputs import Inputs, draw
from benchmarks.measure_operators import time_operators, with_shares
from benchmarks.results import BOTH, FORWARD, Cell, Result
from benchmarks.session import Options, Progress, Session
from benchmarks.timing import Sample, Task

SMALL_HIDDEN, SMALL_TOKENS = 128, 7
BAR_TOKENS = (512, 16, 1)
"""What the bars compare at: run first, so that a short budget for compiling is spent on these."""


@dataclass
class CompileBudget:
    """Seconds left for compiling. Forwards are always compiled, a backward where a bar needs it or time is left."""

    seconds: float
    forwards_left: int
    took: dict[str, float] = field(default_factory=lambda: {FORWARD: 0.0, BOTH: 0.0})

    def refused(self, what: str, tokens: int) -> str:
        """Why this is not compiled; empty where it is."""
        if what == FORWARD or tokens == BAR_TOKENS[0]:
            return ""
        needed = self.took[BOTH] + self.forwards_left * self.took[FORWARD]
        return "" if self.seconds > needed else "not compiled: the time set aside for compiling is spent"

    def spend(self, what: str, seconds: float) -> None:
        """Note what a first call took."""
        self.seconds -= seconds
        self.took[what] = seconds
        self.forwards_left -= what == FORWARD


def environment() -> dict[str, Any]:
    """Where this ran."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "load_1m": os.getloadavg()[0],
    }


def available(options: Options, result: Result, registry: Mapping[str, Implementation]) -> list[Implementation]:
    """The implementations that can be run here; the reasons of the others are noted."""
    found = []
    for name in options.implementations or registry:
        reason = registry[name].unavailable()
        if reason:
            result.unavailable[name] = reason
        else:
            found.append(registry[name])
    return found


def checked(
    one: Implementation, tokens: int, call: Call, name_of: Callable[[Any], Tensors], rows: gate.FirstRows
) -> gate.Finding:
    """Run a call that is about to be timed and look at its first rows; what it raises makes it red."""
    try:
        return rows.judge(one, tokens, name_of(call()))
    except Exception as error:  # no time for what does not run, and the others go on
        return gate.Finding(one.name, red=f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def prepare(
    session: Session, one: Implementation, inputs: Inputs, budget: CompileBudget, rows: gate.FirstRows
) -> list[Task]:
    """The tasks of one implementation at one T, each run once and judged; none where it is red."""
    result, threads, tasks = session.result, one.threads or session.options.threads, []
    torch.set_num_threads(threads)
    runs = one.make(inputs)
    for what, call, name_of in (
        (FORWARD, runs.forward, runs.forward_tensors),
        (BOTH, runs.both, runs.both_tensors),
    ):
        refused = budget.refused(what, inputs.tokens) if one.compiled else ""
        if refused:
            result.cells.append(Cell(one.name, what, inputs.tokens, threads, reason=refused))
            continue
        session.say(f"T={inputs.tokens}: {one.name} {what}, {'compile' if one.compiled else 'check'}")
        start = time.perf_counter()
        finding = checked(one, inputs.tokens, call, name_of, rows)
        if one.compiled:
            budget.spend(what, time.perf_counter() - start)
        known = result.findings.setdefault(one.name, gate.Finding(one.name))
        result.findings[one.name] = known.merged(finding)
        if finding.red:
            return []
        tasks.append(Task((one.name, what), call, threads))
    return tasks


def time_blocks(session: Session, ones: Sequence[Implementation], full: Inputs) -> None:
    """Fill in ``result.cells``, one T after the other, those of the bars first."""
    options, result = session.options, session.result
    order = [t for t in BAR_TOKENS if t in options.tokens] + [t for t in options.tokens if t not in BAR_TOKENS]
    rows = gate.FirstRows(full)
    budget = CompileBudget(options.compile_s, len(order) * sum(one.compiled for one in ones))
    for tokens in order:
        torch.compiler.reset()
        inputs = full.first(tokens)
        serving = [one for one in ones if not (one.max_tokens and tokens > one.max_tokens)]
        result.cells += [
            Cell(one.name, what, tokens, one.threads or options.threads, reason=f"not run beyond T={one.max_tokens}")
            for one in ones
            for what in (FORWARD, BOTH)
            if one not in serving
        ]
        tasks: list[Task] = []
        for one in serving:
            if one.name not in result.red:
                tasks += prepare(session, one, inputs, budget, rows)
        tasks = [task for task in tasks if task.key[0] not in result.red]
        if not tasks:
            continue
        samples = session.interleaved(tasks, tokens, beside_limits=tokens == 1)
        for task in tasks:
            result.cells.append(block_cell(task, tokens, samples[task.key]))
        del tasks
        gc.collect()
    torch.set_num_threads(options.threads)


def block_cell(task: Task, tokens: int, sample: Sample) -> Cell:
    """A timed cell, per token."""
    name, what = task.key
    per_token = 1e6 / tokens
    return Cell(name, what, tokens, task.threads, sample.median_s * per_token, sample.best_s * per_token, sample.count)


def extras(ones: Sequence[Implementation], options: Options, result: Result, say: Progress) -> None:
    """Memory and import, each in a process of its own; what fails is noted."""
    say("import of rl_engine.mhc")
    result.import_s = processes.import_seconds()
    if "native" not in {one.name for one in ones} or "native" in result.red:
        result.notes.append("peak memory: not measured, the native backend was not timed")
        return
    say("peak memory")
    try:
        result.memory = processes.peak_memory("native", max(options.tokens), options.hidden, options.threads)
    except (RuntimeError, OSError) as error:
        result.notes.append(f"peak memory: not measured: {error}")


def run(options: Options, say: Progress, registry: Mapping[str, Implementation] = IMPLEMENTATIONS) -> Result:
    """Everything. ``result.red`` names those that the gate refused; they have no time anywhere in the result."""
    started, before = time.perf_counter(), torch.get_num_threads()
    result = Result(environment(), options.hidden, options.threads, sorted(options.tokens))
    session = Session(options, result, say)
    torch.set_num_threads(options.threads)
    try:
        ones = available(options, result, registry)
        cases = (draw(SMALL_HIDDEN, SMALL_TOKENS), draw(options.hidden, gate.ROWS))
        for one in ones:
            say(f"gate: {one.name}")
            result.findings[one.name] = gate.gate(one, cases, options.operators)
        full = draw(options.hidden, max(options.tokens))
        session.load_probes()
        session.interleaved([], 0, beside_limits=True)
        time_blocks(session, ones, full)
        time_operators(session, ones, full)
        result.operators = [with_shares(row, result.roofline) for row in result.operators]
        session.probes = None
        del full
        if options.extras:
            extras(ones, options, result, say)
    finally:
        torch.set_num_threads(before)
    result.cells = [cell for cell in result.cells if cell.implementation not in result.red]
    result.operators = [row for row in result.operators if row.implementation not in result.red]
    result.bars = bars.bars(result)
    result.seconds = time.perf_counter() - started
    return result
