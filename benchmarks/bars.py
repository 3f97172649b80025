"""The bars that the native backend must clear, each beside what this run measured."""

from __future__ import annotations

from benchmarks.operator_calls import BANDWIDTH_OPERATORS
from benchmarks.results import BOTH, FORWARD, Bar, Result

NOT_MEASURED = "not measured"
HIDDEN = 4096
LEAST_TOKENS = 512
"""Shares of a limit are those of many rows."""


def at_least(what: str, value: float | None, bar: float, aim: float, unit: str = "x", scale: float = 1) -> Bar:
    """A figure that must not be smaller."""
    wanted = (f"{bar * scale:g}{unit}", f"{aim * scale:g}{unit}")
    if value is None:
        return Bar(what, NOT_MEASURED, *wanted, NOT_MEASURED)
    return Bar(what, f"{value * scale:.3g}{unit}", *wanted, "met" if value >= bar else "missed", value >= aim)


def at_most(what: str, value: float | None, bar: float, aim: float | None = None, unit: str = "x") -> Bar:
    """A figure that must not be larger."""
    wanted = (f"within {bar:g}{unit}", "" if aim is None else f"{aim:g}{unit}")
    if value is None:
        return Bar(what, NOT_MEASURED, *wanted, NOT_MEASURED)
    return Bar(
        what,
        f"{value:.3g}{unit}",
        *wanted,
        "met" if value <= bar else "missed",
        None if aim is None else value <= aim,
    )


def bytes_bar(result: Result) -> Bar:
    """What this run compared; the judge and the tests compare all cases and the random shapes."""
    strict = [result.findings[name] for name in ("native", "native-portable") if name in result.findings]
    what, bar = "byte equality with the oracle, both profiles (this gate's cases)", "all"
    if len(strict) < 2:
        return Bar(what, NOT_MEASURED, bar, "", NOT_MEASURED)
    reds = [finding.red for finding in strict if finding.red]
    measured = reds[0] if reds else f"all of {sum(finding.compared for finding in strict)} tensors"
    return Bar(what, measured, bar, "", "missed" if reds else "met")


def share(result: Result, operator: str, key: str) -> float | None:
    """The native operator's share of a limit, at the largest T that it was timed at."""
    mine = [row for row in result.operators if (row.implementation, row.operator) == ("native", operator)]
    rows = [row for row in mine if row.tokens >= LEAST_TOKENS]
    found: float | None = getattr(max(rows, key=lambda row: row.tokens), key) if rows else None
    return found


def chain_ratio(result: Result) -> float | None:
    """T=1 forward over the time of K dependent additions."""
    one = result.time("native", FORWARD, 1)
    if one is None or result.roofline is None:
        return None
    return one / (4 * result.hidden * result.roofline.add_ns * 1e-3)


def growth(result: Result, what: str) -> float | None:
    """Time per token at T=4096 over that at T=512."""
    large, small = (result.time("native", what, tokens) for tokens in (4096, 512))
    return large / small if large is not None and small is not None else None


def profile_ratio(result: Result) -> float | None:
    """The portable profile's forward over the oracle profile's, T=512."""
    return result.ratio("native-portable", "native", FORWARD, 512)


def bars(result: Result) -> list[Bar]:
    """Every row of the table; none at another width than theirs."""
    if result.hidden != HIDDEN:
        return []
    ratio = result.ratio
    rows = [bytes_bar(result)]
    for what, eager, compiled in ((FORWARD, (10, 14), (2.2, 3)), (BOTH, (10, 18), (1.8, 2.5))):
        rows.append(at_least(f"block {what}, T=512, against eager", ratio("eager", "native", what, 512), *eager))
        row = f"block {what}, T=512, against hf-compile"
        rows.append(at_least(row, ratio("hf-compile", "native", what, 512), *compiled))
    row = "block forward, T=16, against hf-compile"
    rows.append(at_least(row, ratio("hf-compile", "native", FORWARD, 16), 1.5, 2))
    peak = share(result, "fp32_gemm_rms_fwd", "peak_share")
    rows.append(at_least("fp32_gemm_rms forward, share of the multiply+add peak", peak, 0.80, 0.95, " %", 100))
    for operator in BANDWIDTH_OPERATORS:
        row = f"{operator.removesuffix('_fwd')} forward, share of the copy bandwidth"
        rows.append(at_least(row, share(result, operator, "copy_share"), 0.60, 0.85, " %", 100))
    row = "block forward, T=1, against hf-compile"
    rows.append(at_least(row, ratio("hf-compile", "native", FORWARD, 1), 2.5, 4))
    rows.append(at_most("block forward, T=1, over the K chain's dependent adds", chain_ratio(result), 2.0, 1.3))
    for what in (FORWARD, BOTH):
        rows.append(at_most(f"{what}, time per token, T=4096 over T=512", growth(result, what), 1.15))
    memory = result.memory.share if result.memory is not None else None
    tokens = result.memory.tokens if result.memory is not None else max(result.tokens)
    rows.append(at_most(f"peak extra memory of forward+backward over the inputs, T={tokens}", memory, 0.15))
    rows.append(at_most("block forward, T=512, portable over oracle profile", profile_ratio(result), 1.10))
    milliseconds = None if result.import_s is None else 1000 * result.import_s
    rows.append(at_most("import of rl_engine.mhc after torch", milliseconds, 150, unit=" ms"))
    return rows
