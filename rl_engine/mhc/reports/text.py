"""A verdict as text: who was judged, what was verified, and on failure where it parted first and how far."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rl_engine.mhc.acceptance.verdict import Check, Divergence, Verdict
from rl_engine.mhc.bits import TensorDifference

MARKS = {"pass": ("ok", "green"), "fail": ("FAIL", "bold red"), "note": ("note", "yellow")}
FAILURES_SHOWN = 12


def render_text(verdict: Verdict, console: Console) -> None:
    """Print the verdict on ``console``: header, one line a group, failures, the verdict itself last."""
    console.print(_header(verdict), highlight=False)
    if verdict.checks:
        console.print(_groups(verdict))
    for line in _notes(verdict):
        console.print(line, highlight=False, soft_wrap=True)
    for line in _failures(verdict):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(render_line(verdict), highlight=False, soft_wrap=True)


def render_line(verdict: Verdict) -> Text:
    """The verdict in one line."""
    if verdict.passed:
        cases = len({check.case for check in verdict.checks if check.case})
        how = "byte-equal" if verdict.byte_equality else "within tolerance, NOT byte-equal,"
        over = "1 case" if cases == 1 else f"{cases} cases"
        text = f"PASS  {verdict.provider}: {how} in {verdict.comparisons} comparisons over {over}"
        return Text(f"{text} ({verdict.seconds:.1f} s)", style="bold green")
    first, reasons = verdict.first_divergence, []
    if first is not None:
        headline = _headline(*first)
        reasons.append(headline[0].lower() + headline[1:])
    if verdict.failures:
        reasons.append(f"{len(verdict.failures)} of {len(verdict.checks)} checks failed")
    if verdict.refusals:
        reasons.append("refused" if not verdict.checks else f"{len(verdict.refusals)} refusals")
    if not verdict.checks:
        reasons.append("no operator ran")
    return Text(f"FAIL  {verdict.provider}: {', '.join(reasons)} ({verdict.seconds:.1f} s)", style="bold red")


def _header(verdict: Verdict) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("provider", escape(verdict.provider))
    facts.add_row("profile", escape(_profile(verdict)))
    if verdict.options.get("cases"):
        facts.add_row("only", escape(", ".join(verdict.options["cases"])))
    env = verdict.environment
    facts.add_row(
        "device",
        escape(
            f"{verdict.device}, {env.get('gpu', env['machine'] + ' ' + env['cpu_capability'])}, torch {env['torch']}"
        ),
    )
    if verdict.provenance:
        stated = verdict.provenance
        facts.add_row("ran on", escape(f"{stated['actual_backend']} (asked for {stated['requested_backend']})"))
        facts.add_row("operators", escape(_operators(stated["operators"])))
    return Group(facts, Text())


def _profile(verdict: Verdict) -> str:
    if verdict.byte_equality:
        return verdict.numeric_profile
    return f"{verdict.numeric_profile}: a tolerance against {verdict.compared_with}; a pass is not byte equality"


def _operators(backends: dict[str, str]) -> str:
    by_backend: dict[str, list[str]] = {}
    for operator, backend in backends.items():
        by_backend.setdefault(backend, []).append(operator)
    if len(by_backend) == 1:
        return f"all {len(backends)} that ran: {next(iter(by_backend))}"
    return "; ".join(f"{backend}: {', '.join(operators)}" for backend, operators in by_backend.items())


def _groups(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "verified", "checks", "comparisons"):
        table.add_column(column, justify="right" if column in ("checks", "comparisons") else "left")
    for name in dict.fromkeys(check.group for check in verdict.checks):
        checks = [check for check in verdict.checks if check.group == name]
        failed = sum(check.status == "fail" for check in checks)
        status = "fail" if failed else "note" if all(check.status == "note" for check in checks) else "pass"
        mark, style = MARKS[status]
        count = f"{len(checks) - failed}/{len(checks)}" if failed else str(len(checks))
        table.add_row(Text(mark, style=style), name, count, str(sum(check.comparisons for check in checks)))
    return table


def _notes(verdict: Verdict) -> Iterator[Text]:
    for check in verdict.checks:
        if check.detail and check.status != "fail":
            yield Text(f"  {check.group}, {check.case or check.name}: {check.detail}", style="dim")
    for refusal in verdict.refusals:
        yield Text(f"refused  {refusal}", style="red")
    for task, operators in verdict.pending.items():
        yield Text(f"  pending {task}: {', '.join(operators)}")


def _failures(verdict: Verdict) -> Iterator[Text]:
    first = verdict.first_divergence
    if first is None:
        return
    check, divergence = first
    yield Text(f"\n{_headline(check, divergence)}", style="bold red")
    yield Text(f"  in {_where(check)}: {divergence.message}")
    yield from _figures(divergence)
    others = [failure for failure in verdict.failures if failure is not check]
    if others:
        yield Text("\nAlso failed:", style="bold")
    for failure in others[:FAILURES_SHOWN]:
        yield Text(f"  {_where(failure)}: {failure.detail}")
    if len(others) > FAILURES_SHOWN:
        yield Text(f"  and {len(others) - FAILURES_SHOWN} more; --json has them all")


def _headline(check: Check, divergence: Divergence) -> str:
    """What failed first: a boundary whose tensor differs, or else the check by its name."""
    if divergence.kind in ("refusal", "provenance", "surroundings"):
        return f"First failure: {check.name}"
    if divergence.kind == "error":
        return f"First failure: {divergence.boundary} raised"
    return f"First divergence: {divergence.boundary}"


def _where(check: Check) -> str:
    return f"{check.case}, {check.name}" if check.case else f"{check.group}, {check.name}"


def _figures(divergence: Divergence) -> Iterator[Text]:
    difference = divergence.difference
    if difference is not None:
        yield from (Text(f"  {line}") for line in _difference_lines(difference))
    if divergence.hint:
        yield Text(f"  {divergence.hint}", style="yellow")


def _difference_lines(d: TensorDifference) -> Iterator[str]:
    index = ", ".join(map(str, d.index))
    yield f"first at [{index}]: got {d.candidate_hex} ({d.candidate:.9g}), want {d.reference_hex} ({d.reference:.9g})"
    bias = f"{d.signed_bias_ulp:+.3g} ULP, {d.magnitude_bias_ulp:+.3g} in magnitude"
    nan = f", {d.nan_mismatches} NaN against a number" if d.nan_mismatches else ""
    yield f"ULP distance: largest {d.max_ulp}, median {d.median_ulp:g}; signed bias {bias}{nan}"
