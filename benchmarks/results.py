"""What a run of the benchmark found, as data: everything that is printed, plotted or written comes from here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gate import Finding
from benchmarks.processes import Memory
from benchmarks.roofline import Roofline

SCHEMA = "rl_engine.mhc/benchmark/v1"
FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True)
class Cell:
    """One implementation, direction and T. ``median_us`` is per token; where it is ``None`` there is a reason."""

    implementation: str
    what: str
    tokens: int
    threads: int
    median_us: float | None = None
    best_us: float | None = None
    samples: int = 0
    reason: str = ""


@dataclass(frozen=True)
class OperatorRow:
    """One operator alone. ``moved`` are the bytes of its inputs and outputs; shares are of the measured limits."""

    implementation: str
    operator: str
    tokens: int
    median_us: float
    samples: int
    gflops: float | None
    gbs: float
    peak_share: float | None = None
    copy_share: float | None = None


@dataclass(frozen=True)
class Bar:
    """A row of what must hold. ``verdict``: met, missed, or not measured; ``aim_met`` for the harder figure."""

    what: str
    measured: str
    bar: str
    aim: str
    verdict: str
    aim_met: bool | None = None


@dataclass
class Result:
    """Filled in as the run goes on; ``notes`` gives the reason for everything that is missing."""

    environment: dict[str, Any]
    hidden: int
    threads: int
    tokens: list[int]
    unavailable: dict[str, str] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    operators: list[OperatorRow] = field(default_factory=list)
    roofline: Roofline | None = None
    memory: Memory | None = None
    import_s: float | None = None
    notes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def red(self) -> list[str]:
        """Implementations without the bytes that they promise."""
        return [name for name, finding in self.findings.items() if finding.red]

    def time(self, implementation: str, what: str, tokens: int) -> float | None:
        """Median µs/token of a cell, where it was timed."""
        for cell in self.cells:
            if (cell.implementation, cell.what, cell.tokens) == (implementation, what, tokens):
                return cell.median_us
        return None

    def ratio(self, slow: str, fast: str, what: str, tokens: int) -> float | None:
        """How many times faster ``fast`` is than ``slow``."""
        of, by = self.time(slow, what, tokens), self.time(fast, what, tokens)
        return of / by if of is not None and by is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema": SCHEMA} | dataclasses.asdict(self)
