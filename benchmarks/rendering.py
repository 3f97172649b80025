"""Pure renderings of a result: tables for a terminal, JSON, and a plot of µs/token against T."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.results import BOTH, FORWARD, Bar, Result

PEERS = ("eager", "compile", "hf", "hf-compile", "oracle")
STYLE = {"met": "green", "missed": "bold red", "not measured": "yellow"}


def figure(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def heading(result: Result) -> str:
    """Where, and what."""
    where = result.environment
    return (
        f"block boundary, D={result.hidden}, {result.threads} threads; {where['processor']}, {where['cores']} cores, "
        f"{where['vector']}, torch {where['torch']}, load {where['load_1m']:.1f} at the start"
    )


def limits_line(result: Result) -> str:
    """The roofline."""
    found = result.roofline
    if found is None:
        return next((note for note in result.notes if note.startswith("roofline")), "roofline: not measured")
    row = 4 * result.hidden * found.add_ns * 1e-3
    return (
        f"roofline ({found.isa}, {found.threads} threads): unfused multiply+add {found.peak_gflops:.1f} GFLOP/s, "
        f"dependent add {found.add_ns:.2f} ns (K of them: {row:.1f} µs), copy {found.copy_gbs:.1f} GB/s"
    )


def gate_table(result: Result) -> Table:
    """Who may be timed."""
    table = Table(title="correctness gate", title_justify="left")
    for column in ("implementation", "gate", "against the oracle"):
        table.add_column(column, overflow="fold")
    for name, reason in result.unavailable.items():
        table.add_row(name, Text("skipped", style="yellow"), reason)
    for name, finding in result.findings.items():
        if finding.red:
            table.add_row(name, Text("RED", style="bold red"), finding.red)
        elif name == "oracle":
            table.add_row(name, "-", "the reference")
        elif finding.error is not None:
            table.add_row(name, "not strict", f"largest relative error {finding.error:.2g}, {finding.worst}")
        elif finding.compared:
            table.add_row(name, Text("green", style="green"), f"{finding.compared} tensors byte-equal")
        else:
            table.add_row(name, "-", "nothing was compared")
    return table


def time_table(result: Result, what: str) -> Table:
    """µs/token of everything timed, then how many times faster than each peer the native backend is."""
    table = Table(title=f"{what}: median µs/token", title_justify="left")
    table.add_column("implementation")
    for tokens in result.tokens:
        table.add_column(f"T={tokens}", justify="right")
    for name, finding in result.findings.items():
        if finding.red:
            table.add_row(name, *[Text("RED", style="bold red")] * len(result.tokens))
        else:
            table.add_row(name, *(figure(result.time(name, what, tokens)) for tokens in result.tokens))
    table.add_section()
    for peer in PEERS:
        ratios = [result.ratio(peer, "native", what, tokens) for tokens in result.tokens]
        if any(ratio is not None for ratio in ratios):
            table.add_row(f"{peer} / native", *("-" if r is None else f"{r:.2f}x" for r in ratios))
    return table


def operator_table(result: Result) -> Table:
    """Operators alone, against the roofline."""
    table = Table(title="operators alone", title_justify="left")
    for column in ("operator", "implementation"):
        table.add_column(column)
    for column in ("T", "µs/token", "GFLOP/s", "of peak", "GB/s", "of copy"):
        table.add_column(column, justify="right")
    for row in result.operators:
        shares = ["-" if s is None else f"{100 * s:.0f} %" for s in (row.peak_share, row.copy_share)]
        cells = (str(row.tokens), figure(row.median_us), figure(row.gflops), shares[0], figure(row.gbs), shares[1])
        table.add_row(row.operator, row.implementation, *cells)
    return table


def bars_table(rows: list[Bar]) -> Table:
    """What must hold."""
    table = Table(title="bars", title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("measured", justify="right", overflow="fold")
    for column in ("bar", "aim", "verdict"):
        table.add_column(column, justify="right")
    for row in rows:
        verdict = row.verdict + (", aim too" if row.aim_met and row.verdict == "met" else "")
        table.add_row(row.what, row.measured, row.bar, row.aim, Text(verdict, style=STYLE[row.verdict]))
    return table


def parts(result: Result) -> Iterator[RenderableType]:
    """Everything that is printed, in order."""
    yield Text(heading(result))
    yield Text(limits_line(result))
    yield gate_table(result)
    yield time_table(result, FORWARD)
    yield time_table(result, BOTH)
    for reason in dict.fromkeys(cell.reason for cell in result.cells if cell.reason):
        names = dict.fromkeys(cell.implementation for cell in result.cells if cell.reason == reason)
        yield Text(f"- {', '.join(names)}: {reason}")
    if result.operators:
        yield operator_table(result)
    if result.memory is not None:
        found = result.memory
        yield Text(
            f"native forward+backward, T={found.tokens}: inputs {found.inputs / 2**20:.0f} MiB, outputs "
            f"{found.outputs / 2**20:.0f} MiB, saved {found.saved / found.tokens:.0f} B/token, peak beyond inputs and "
            f"outputs {found.extra / 2**20:.0f} MiB ({found.share:.3f} of the inputs)"
        )
    yield from (Text(note) for note in result.notes if not note.startswith("roofline"))
    if result.bars:
        yield bars_table(result.bars)
    yield Text(f"{result.seconds:.0f} s" + (f"; RED: {', '.join(result.red)}" if result.red else ""))


def show(result: Result, console: Console) -> None:
    """Print all of it."""
    for part in parts(result):
        console.print(part)


def to_json(result: Result) -> str:
    """One JSON object; what was not measured is null, an infinite error a string."""
    return json.dumps(_finite(result.to_dict()), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


def plot(result: Result, path: Path) -> None:
    """µs/token against T, both axes logarithmic; PNG or SVG by the suffix. Needs matplotlib (the bench extra)."""
    importlib.import_module("matplotlib").use("Agg")
    figure_, axes = importlib.import_module("matplotlib.pyplot").subplots(1, 2, figsize=(13, 5), sharey=True)
    for axis, what in zip(axes, (FORWARD, BOTH), strict=True):
        for name in result.findings:
            timed = [(t, us) for t in result.tokens if (us := result.time(name, what, t)) is not None]
            if timed:
                axis.plot(*zip(*timed, strict=True), "o-" if name.startswith("native") else "o--", label=name)
        axis.set(xscale="log", yscale="log", title=what, xlabel="T, tokens", xticks=result.tokens)
        axis.set_xticklabels([str(t) for t in result.tokens])
        axis.minorticks_off()
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("µs per token")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure_.suptitle(heading(result), fontsize=9)
    figure_.tight_layout()
    figure_.savefig(path)
