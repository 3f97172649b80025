"""The judge under numeric profiles: who is refused, what is compared with what, and how a tolerance is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_engine.mhc.acceptance import Options, judge_provider
from rl_engine.mhc.acceptance.cases import captured_case
from rl_engine.mhc.acceptance.verdict import Verdict
from rl_engine.mhc.cli import check_p1_main
from rl_engine.mhc.contract import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.fixtures import make_batch, make_grads
from rl_engine.mhc.operators.reference import reference_calls
from rl_engine.mhc.profiles import NumericProfile, known_profiles, register_profile
from rl_engine.mhc.provider import ReferenceProvider
from tests.acceptance.profile_providers import (
    ELSEWHERE,
    HERE,
    NEAR,
    NEAR_OWN,
    OWN,
    VAST,
    Endless,
    InCompany,
    LeftKernel,
    Misspelt,
    OneStep,
    OracleAsPortable,
    OracleOnly,
    PortableAsOracle,
    Spoiling,
    TreeKernel,
    TwoSteps,
)
from tests.profile_registry import install, restored_registry

CASE = "tiny_hidden"
ARGUMENTS = ("--cases", CASE, "--repeat", "1")
Command = Callable[..., "tuple[int, str, str]"]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with restored_registry():
        for profile in (NEAR, ELSEWHERE, VAST, OWN, NEAR_OWN):
            register_profile(profile)
        yield


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``scripts/check_p1.py`` with arguments: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["check_p1.py", *arguments])
        code = check_p1_main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def judged(provider: Any, **options: Any) -> Verdict:
    return judge_provider(provider, Options(cases=(CASE,), repeat=1, **options))


def failing(verdict: Verdict) -> list[tuple[str, str]]:
    """The group and the first boundary of every failed check."""
    return [(check.group, check.divergences[0].boundary) for check in verdict.failures]


# --- refused ---


def test_a_provider_of_an_unknown_profile_is_refused(command: Command) -> None:
    ran: list[str] = []
    with reference_calls(ran.append):
        code, out, err = command("--provider", f"{HERE}:Misspelt", *ARGUMENTS)
    assert (code, err, ran) == (1, "", [])
    (line,) = [line for line in out.splitlines() if "want one of" in line]
    assert line == (
        f"refused  all cases: numeric_profile: got 'oracle-fp32-mhc-v9', want one of: {', '.join(known_profiles())}"
    )
    assert out.splitlines()[-1].startswith("FAIL  Misspelt: refused, no operator ran")
    verdict = judged(Misspelt())
    assert (verdict.passed, verdict.checks, verdict.compared_with) == (False, (), "")


@pytest.mark.parametrize("provider", ["reference", f"{HERE}:OracleOnly"])
def test_a_misspelt_option_is_one_line(command: Command, tmp_path: Path, provider: str) -> None:
    target, ran = tmp_path / "verdict.json", []
    with reference_calls(ran.append):
        arguments = ("--provider", provider, "--profile", "misspelt", "--json", str(target))
        code, out, err = command(*arguments, *ARGUMENTS)
    assert (code, out, ran, target.exists()) == (1, "", [], False)
    assert err == f"refused: numeric_profile: got 'misspelt', want one of: {', '.join(known_profiles())}\n"


@pytest.mark.parametrize(
    ("provider", "profile"),
    [("OracleOnly", PORTABLE_PROFILE), ("OracleAsPortable", ORACLE_PROFILE), ("OracleOnly", NEAR.id)],
)
def test_a_provider_of_another_profile_is_refused(command: Command, provider: str, profile: str) -> None:
    ran: list[str] = []
    with reference_calls(ran.append):
        code, out, err = command("--provider", f"{HERE}:{provider}", "--profile", profile, *ARGUMENTS)
    assert (code, err, ran) == (1, "", [])
    (line,) = [line for line in out.splitlines() if line.startswith("refused")]
    declared = PORTABLE_PROFILE if provider == "OracleAsPortable" else ORACLE_PROFILE
    assert f"numeric_profile: want '{profile}', got '{declared}' (fail-closed)" in line
    assert out.splitlines()[-1].endswith("s)") and "no operator ran" in out.splitlines()[-1]


@pytest.mark.parametrize("profile", [PORTABLE_PROFILE, NEAR.id])
def test_a_captured_batch_of_another_profile_is_refused(profile: str) -> None:
    """Whatever ran was the oracle's arithmetic, so no verdict may carry the other profile's name and pass."""
    batch = make_batch(CASE)
    case = captured_case(batch, make_grads(CASE, batch))
    verdict = judge_provider(OracleOnly(), Options(captured=case, repeat=1, numeric_profile=profile))
    assert not verdict.passed
    assert any("numeric_profile" in refusal for refusal in verdict.refusals)


BROKEN = {"no-module-v1": "no_such_module_here:P", "no-name-v1": "offering:ABSENT", "number-v1": "offering:NUMBER"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(tmp_path, "offering", "NUMBER = 3\n", BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = command("--profile", name, *ARGUMENTS)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("refused: ") and name in line


@pytest.mark.parametrize("target", ["no_such_module_here:Operators", f"{HERE}:Absent", f"{HERE}:HERE"])
def test_operators_that_cannot_be_loaded_are_one_line(command: Command, target: str) -> None:
    register_profile(NumericProfile("unloadable-v1", "torch-library", operators=target))
    code, out, err = command("--provider", f"{HERE}:TreeKernel", "--profile", "unloadable-v1", *ARGUMENTS)
    assert code in (1, 2)
    (line,) = [line for line in (out + err).splitlines() if "unloadable-v1" in line and target in line]
    assert line.startswith(("refused", "error: "))


# --- the portable profile ---


def test_the_reference_passes_under_the_portable_profile(command: Command, tmp_path: Path) -> None:
    target = tmp_path / "verdict.json"
    code, out, err = command("--profile", PORTABLE_PROFILE, "--json", str(target), *ARGUMENTS)
    assert (code, err) == (0, "")
    assert ["profile", PORTABLE_PROFILE] in [line.split() for line in out.splitlines()]
    assert "451 of 451 hashes" in out and "NOT byte-equal" not in out
    assert out.splitlines()[-1].startswith("PASS  reference: byte-equal in ")
    document = json.loads(target.read_text(encoding="utf-8"))
    assert (document["numeric_profile"], document["compared_with"]) == (PORTABLE_PROFILE, PORTABLE_PROFILE)
    assert document["byte_equality"] is True
    assert document["provenance"]["numeric_profile"] == PORTABLE_PROFILE


@pytest.mark.parametrize(
    ("provider", "boundary"), [(PortableAsOracle, "split.post"), (OracleAsPortable, "bwd.d_hidden")]
)
def test_the_functions_of_the_other_profile_are_found(provider: type, boundary: str) -> None:
    """Each is right by another profile and misses its own where a function of the two first differs."""
    verdict = judged(provider())
    assert failing(verdict) == [("boundaries", boundary)]
    assert verdict.first_divergence is not None
    difference = verdict.first_divergence[1].difference
    assert difference is not None and difference.max_ulp <= 16


# --- a tolerance ---


def test_within_the_tolerance(command: Command, tmp_path: Path) -> None:
    target = tmp_path / "verdict.json"
    arguments = ("--provider", f"{HERE}:OneStep", "--profile", NEAR.id, "--json", str(target))
    code, out, err = command(*arguments, *ARGUMENTS)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert f"{NEAR.id}: a tolerance against {ORACLE_PROFILE}; a pass is not byte equality" in text
    assert out.splitlines()[-1].startswith("PASS  OneStep: within tolerance, NOT byte-equal, in ")
    document = json.loads(target.read_text(encoding="utf-8"))
    assert (document["passed"], document["byte_equality"], document["compared_with"]) == (True, False, ORACLE_PROFILE)
    names = {check["name"] for check in document["checks"] if check["group"] == "boundaries"}
    assert names == {f"within tolerance of the oracle of {ORACLE_PROFILE}"}
    golden = [check for check in document["checks"] if check["group"] == "golden"]
    assert [check["status"] for check in golden] == ["note"]


@pytest.mark.parametrize(
    ("provider", "profile"),
    [(TwoSteps, NEAR), (OneStep, ELSEWHERE), (Spoiling, VAST), (Endless, VAST), (Spoiling, NEAR)],
)
def test_beyond_the_tolerance(provider: type, profile: NumericProfile) -> None:
    """Too far, far where nothing is allowed, and NaN or infinity where anything finite would do."""
    verdict = judged(provider(profile.id))
    assert failing(verdict) == [("boundaries", "post.r_new")]
    assert (verdict.passed, verdict.byte_equality, verdict.compared_with) == (False, False, ORACLE_PROFILE)


def test_the_same_provider_fails_without_the_tolerance() -> None:
    verdict = judged(OneStep())
    assert failing(verdict) == [("boundaries", "post.r_new")]
    assert (verdict.byte_equality, verdict.compared_with) == (True, ORACLE_PROFILE)


def test_operator_cases_have_the_tolerance_too() -> None:
    for provider, passed in ((OneStep(NEAR.id), True), (TwoSteps(NEAR.id), False), (OneStep(ELSEWHERE.id), False)):
        verdict = judge_provider(provider, Options(cases=("post_order",)))
        assert verdict.passed == passed
        assert failing(verdict) == ([] if passed else [("operators", "mhc_post_fwd.r_new")])


def test_invariance_stays_strict() -> None:
    verdict = judged(InCompany(NEAR.id))
    assert {group for group, _ in failing(verdict)} == {"invariance"}
    assert any(check.name == "each row alone" for check in verdict.failures)
    assert verdict.first_divergence is not None and verdict.first_divergence[1].boundary == "post.r_new"
    assert [check.status for check in verdict.checks if check.group == "boundaries"] == ["pass"]


# --- a strict profile with operators of its own ---


def test_own_operators_are_the_oracle() -> None:
    verdict = judged(LeftKernel(OWN.id))
    assert failing(verdict) == [] and verdict.passed
    assert (verdict.byte_equality, verdict.compared_with, verdict.numeric_profile) == (True, OWN.id, OWN.id)
    assert failing(judged(TreeKernel(OWN.id))) == [("boundaries", "post.r_new")]
    assert failing(judged(LeftKernel())) == [("boundaries", "post.r_new")]


def test_the_reference_never_diverges_from_itself() -> None:
    """Under a profile with operators of its own, the alias either is those operators or is refused."""
    assert failing(judged(ReferenceProvider(OWN.id))) == []


def test_a_tolerance_is_around_the_operators_of_its_base() -> None:
    exact, another = judged(LeftKernel(NEAR_OWN.id)), judged(TreeKernel(NEAR_OWN.id))
    assert exact.compared_with == another.compared_with == OWN.id
    assert failing(another) == [("boundaries", "post.r_new")]
    assert failing(exact) == []
