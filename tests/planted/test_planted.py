"""The judge finds every planted defect, where it is, and nothing else."""

from __future__ import annotations

import functools
import io

import pytest
from rich.console import Console

from rl_engine.mhc.acceptance import Options, Verdict, judge_provider
from rl_engine.mhc.acceptance.verdict import DATAFLOW
from rl_engine.mhc.reports import render_text
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES
from tests.planted.registry import DEFECTS, FAMILIES, REFUSED, Defect

CHECKED = [defect for defect in DEFECTS.values() if defect.group != REFUSED]
REFUSALS = [defect for defect in DEFECTS.values() if defect.group == REFUSED]
OF_TENSORS = ("boundaries", "invariance", "modes", "operators")
HIDDEN = [defect for defect in DEFECTS.values() if defect.hidden_in]


@functools.cache
def judged(name: str, case: str) -> Verdict:
    return judge_provider(DEFECTS[name].provider(), Options(cases=(case,)))


def text(verdict: Verdict) -> str:
    stream = io.StringIO()
    render_text(verdict, Console(file=stream, width=400))
    return stream.getvalue()


def by_name(defect: Defect) -> str:
    return defect.name


@pytest.mark.parametrize("defect", CHECKED, ids=by_name)
def test_a_planted_defect_is_found_where_it_is(defect: Defect) -> None:
    verdict = judged(defect.name, defect.case)
    report = text(verdict)
    assert not verdict.passed, defect.why
    assert not verdict.refusals, verdict.refusals
    first = verdict.first_divergence
    assert first is not None
    check, divergence = first
    assert (divergence.boundary, check.group) == (defect.boundary, defect.group), report
    assert {failure.group for failure in verdict.failures} == {defect.group, *defect.beside}, report
    found = {d.boundary for failure in verdict.failures for d in failure.divergences}
    assert set(defect.also) <= found, report
    place = (defect.boundary,) if defect.group in OF_TENSORS else ()
    for words in (*place, *defect.says):
        assert words in report, report
    if divergence.difference is not None:
        assert divergence.difference.candidate_hex in report
        assert divergence.difference.reference_hex in report
    assert ("truncation" in report) == ("Truncated" in defect.name), report


@pytest.mark.parametrize("defect", REFUSALS, ids=by_name)
def test_an_unfit_declaration_is_refused_before_any_operator_runs(defect: Defect) -> None:
    verdict = judged(defect.name, defect.case)
    assert not verdict.passed
    assert verdict.checks == ()
    (refusal,) = verdict.refusals
    for words in defect.says:
        assert words in refusal


@pytest.mark.parametrize("defect", HIDDEN, ids=by_name)
def test_the_case_is_what_shows_it(defect: Defect) -> None:
    verdict = judged(defect.name, defect.hidden_in)
    assert verdict.passed, text(verdict)


def test_each_is_named_and_explained() -> None:
    assert len(DEFECTS) >= 36
    assert {defect.provider.__module__ for defect in CHECKED} == {family.__name__ for family in FAMILIES}
    for name, defect in DEFECTS.items():
        assert defect.name == name
        assert defect.why.endswith(".")
        assert "\n" not in defect.why


@pytest.mark.parametrize("boundary", dict.fromkeys((*FORWARD_BOUNDARIES, *BACKWARD_BOUNDARIES, *DATAFLOW)))
def test_every_boundary_and_gradient_has_a_defect(boundary: str) -> None:
    assert any(boundary in (defect.boundary, *defect.also) for defect in CHECKED)


@pytest.mark.parametrize("group", [*OF_TENSORS, "fail-closed", "provenance"])
def test_every_group_of_checks_has_a_defect(group: str) -> None:
    assert any(defect.group == group for defect in CHECKED)
