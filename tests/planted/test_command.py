"""The command says what it found: exit code, boundary, both values, distance, bias."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rl_engine.mhc.cli import check_p1_main, main

HEX = r"got 0x[0-9a-f]{4,8} \(\S+\), want 0x[0-9a-f]{4,8} \(\S+\)"
ULP = r"ULP distance: largest \d+, median \S+; signed bias [+-]\S+ ULP"


def check(monkeypatch: pytest.MonkeyPatch, spec: str, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rl-mhc", "check", "--provider", f"tests.planted.{spec}", *more])
    return main()


@pytest.mark.parametrize(
    ("spec", "case", "words"),
    [
        ("controller:DescendingK", "packed_t7_odd", ("First divergence: controller.p",)),
        ("forward:TransposedComb", "packed_t7_odd", ("First divergence: post.r_new",)),
        ("forward:TruncatedPost", "packed_t7_odd", ("First divergence: post.r_new", "truncation")),
        ("forward:TruncatedNorm", "packed_t7_odd", ("First divergence: norm.normalized", "truncation")),
        ("split:NineteenIterations", "saturated_comb", ("First divergence: split.c",)),
        ("backward:ReversedTokenFold", "packed_t7_odd", ("First divergence: grad.d_controller_weight",)),
        ("conduct:SplitForOneRow", "packed_t7_odd", ("First divergence: controller.p", "row 0 alone")),
    ],
)
def test_a_divergence_is_printed_with_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: str, case: str, words: tuple[str, ...]
) -> None:
    assert check(monkeypatch, spec, "--cases", case) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(HEX, printed.out), printed.out
    assert re.search(ULP, printed.out), printed.out
    for text in (case, *words):
        assert text in printed.out
    assert printed.out.splitlines()[-1].startswith("FAIL  planted: ")


def test_a_truncating_store_has_a_bias_toward_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "verdict.json"
    assert check(monkeypatch, "forward:TruncatedPost", "--cases", "packed_t7_odd", "--json", str(target)) == 1
    first = json.loads(target.read_text(encoding="utf-8"))["first_divergence"]
    assert (first["boundary"], first["case"], first["difference"]["max_ulp"]) == ("post.r_new", "packed_t7_odd", 1)
    assert first["difference"]["toward_zero"] is True
    assert "truncation" in first["hint"]


def test_a_fallback_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(monkeypatch, "identity:FallsBackToOracle", "--cases", "one_row") == 1
    assert "mhc_post_fwd ran the reference's mhc_post_fwd" in capsys.readouterr().out


def test_a_refusal_is_printed_and_nothing_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(monkeypatch, "declaration:NoPlacements", "--cases", "one_row") == 1
    printed = capsys.readouterr().out
    assert "refused  one_row: planted: capabilities['placements']" in printed
    assert "no operator ran" in printed


def test_the_script_judges_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check_p1.py", "--provider", "tests.planted.controller:SplitK", "--cases", "one_row", "--quiet"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert check_p1_main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL  planted: first divergence")
    assert "controller.p" in line


@pytest.mark.parametrize("code", [0, 1, 2, None])
def test_a_provider_cannot_end_the_judge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int | None
) -> None:
    """An operator that calls ``sys.exit`` fails like one that raises anything else."""
    from tests.planted import conduct

    monkeypatch.setattr(conduct.Quits, "code", code)
    assert check(monkeypatch, "conduct:Quits", "--cases", "one_row") == 1
    assert "SystemExit" in capsys.readouterr().out
