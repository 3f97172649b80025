"""The command line around the judge: what goes in, what comes out, and how it says that a call is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_engine.mhc.acceptance import VERDICT_SCHEMA, Options
from rl_engine.mhc.acceptance.runner import available_cases
from rl_engine.mhc.cli import main
from rl_engine.mhc.fixtures import make_batch, make_grads
from rl_engine.mhc.provider import ALIASES

Command = Callable[..., "tuple[int, str, str]"]
CASE = "packed_t7_odd"
ONE = ("--cases", "one_row", "--repeat", "1")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``rl-mhc check`` with arguments: exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rl-mhc", "check", *map(str, arguments)])
        code = main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    batch = make_batch(CASE)
    paths = tmp_path / "batch.safetensors", tmp_path / "grads.safetensors"
    batch.save(paths[0])
    make_grads(CASE, batch).save(paths[1], batch.contract)
    return paths


# --- success ---


def test_success_is_quiet_on_standard_error_and_free_of_escapes(command: Command) -> None:
    code, out, err = command(*ONE)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert out.splitlines()[-1].startswith("PASS  reference: byte-equal in ")


@pytest.mark.parametrize(("provider", "code", "word"), [("reference", 0, "PASS"), ("stub", 1, "FAIL")])
def test_quiet_prints_one_line(command: Command, provider: str, code: int, word: str) -> None:
    got, out, err = command("--provider", provider, "--quiet", *ONE)
    assert (got, err) == (code, "")
    (line,) = out.splitlines()
    assert line.startswith(f"{word}  {provider}: ")


def test_the_stub_names_every_task(command: Command) -> None:
    code, out, _ = command("--provider", "stub")
    assert code == 1
    for task in ("P1-1 (#14)", "P1-2 (#15)", "P1-3 (#16)", "P1-4 (#17)", "P1-5 (#18)"):
        assert f"pending {task}" in out
    assert "no operator ran" in out


def test_list_names_providers_and_cases(command: Command) -> None:
    code, out, err = command("--list")
    assert (code, err) == (0, "")
    first_words = [[*line.split(), ""][:2] for line in out.splitlines()]
    assert {name for kind, name in first_words if kind == "provider"} == set(ALIASES)
    assert {name for kind, name in first_words if kind == "case"} == set(available_cases(Options()))


def test_list_knows_seeds_and_widths(command: Command) -> None:
    assert "seed3_0" in command("--list", "--seed", "3")[1]
    assert "production_frozen" in command("--list", "--geometry", "production")[1]


# --- captured tensors ---


def test_a_saved_batch_is_judged(command: Command, saved: tuple[Path, Path]) -> None:
    code, out, err = command("--batch", saved[0], "--grads", saved[1], "--repeat", "1")
    assert (code, err) == (0, "")
    assert "forward only" not in out
    code, out, err = command("--batch", saved[0], "--repeat", "1")
    assert (code, err) == (0, "")
    assert "captured: forward only: no gradients were given" in out


def test_a_saved_batch_shows_a_defect(command: Command, saved: tuple[Path, Path]) -> None:
    provider = "tests.planted.backward:SplitCombGradient"
    code, out, _ = command("--provider", provider, "--batch", saved[0], "--grads", saved[1])
    assert code == 1
    assert "First divergence: bwd.d_c" in out
    assert "captured" in out


# --- JSON ---

KEYS = {
    "schema": str,
    "passed": bool,
    "compared_with": str,
    "byte_equality": bool,
    "options": dict,
    "provider": str,
    "numeric_profile": str,
    "device": str,
    "comparisons": int,
    "seconds": float,
    "refusals": list,
    "pending": dict,
    "provenance": dict,
    "environment": dict,
    "checks": list,
}
CHECK_KEYS = {
    "group": str,
    "name": str,
    "case": str,
    "status": str,
    "comparisons": int,
    "detail": str,
    "divergences": list,
}
DIVERGENCE_KEYS = {"boundary": str, "kind": str, "message": str, "hint": str}
DIFFERENCE_KEYS = {
    "count": int,
    "total": int,
    "nan_mismatches": int,
    "index": list,
    "candidate_hex": str,
    "reference_hex": str,
    "candidate": (float, str),
    "reference": (float, str),
    "max_ulp": int,
    "median_ulp": float,
    "signed_bias_ulp": float,
    "magnitude_bias_ulp": float,
    "toward_zero": bool,
}


def strict(text: str) -> dict[str, Any]:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return document


def has_types(value: dict[str, Any], types: dict[str, Any], *more: str) -> None:
    assert set(value) == {*types, *more}
    for key, kind in types.items():
        assert isinstance(value[key], kind), (key, value[key])


def has_divergence(value: dict[str, Any], *more: str) -> None:
    has_types(value, DIVERGENCE_KEYS, "difference", *more)
    if value["difference"] is not None:
        has_types(value["difference"], DIFFERENCE_KEYS)


@pytest.mark.parametrize(
    ("provider", "case", "code"),
    [
        ("reference", "one_row", 0),
        ("stub", "one_row", 1),
        ("tests.planted.forward:NoEpsNorm", "zero_row", 1),
        ("tests.planted.conduct:Crash", "one_row", 1),
        ("tests.planted.identity:ObjectForVersion", "one_row", 1),
    ],
)
def test_the_document_holds_what_the_schema_promises(
    command: Command, tmp_path: Path, provider: str, case: str, code: int
) -> None:
    target = tmp_path / "verdict.json"
    assert command("--provider", provider, "--cases", case, "--repeat", "1", "--json", target)[0] == code
    document = strict(target.read_text(encoding="utf-8"))
    has_types(document, KEYS, "first_divergence")
    assert document["schema"] == VERDICT_SCHEMA
    assert document["passed"] == (code == 0)
    for check in document["checks"]:
        has_types(check, CHECK_KEYS)
        assert check["status"] in ("pass", "fail", "note")
        for divergence in check["divergences"]:
            has_divergence(divergence)
    first = document["first_divergence"]
    assert (first is None) == (not any(check["divergences"] for check in document["checks"]))
    if first is not None:
        has_divergence(first, "group", "check", "case")
    assert document["comparisons"] == sum(check["comparisons"] for check in document["checks"])


def test_the_schema_page_names_every_field() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs", "verdict_schema.md").read_text(encoding="utf-8")
    assert VERDICT_SCHEMA in page
    fields = {*KEYS, "first_divergence", "check", *CHECK_KEYS, *DIVERGENCE_KEYS, "difference", *DIFFERENCE_KEYS}
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []


def test_json_on_standard_output_is_alone_there(command: Command) -> None:
    code, out, err = command("--json", "-", *ONE)
    assert code == 0
    assert strict(out)["passed"] is True
    assert "PASS  reference" in err


def test_the_document_is_replaced_as_a_whole(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "verdict.json"
    target.write_text("old", encoding="utf-8")
    seen: list[tuple[str, bool]] = []
    replace = Path.replace

    def watch(self: Path, to: str | os.PathLike[str]) -> Path:
        seen.append((target.read_text(encoding="utf-8"), self.parent == target.parent))
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", watch)
    assert command("--json", target, *ONE)[0] == 0
    assert seen == [("old", True)]
    assert strict(target.read_text(encoding="utf-8"))["passed"] is True
    assert list(tmp_path.iterdir()) == [target]


# --- a wrong call: one line on standard error, exit 2 ---


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def is_usage_error(outcome: tuple[int, str, str], *words: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--provider", "fast"), "fast"),
        (("--provider", "no.such.module:Class"), "no.such.module"),
        (("--provider", "rl_engine.mhc.provider:Missing"), "Missing"),
        (("--provider", "rl_engine.mhc.provider:ALIASES"), "ALIASES"),
        (("--provider", "json:JSONDecoder"), "lacks"),
        (("--cases", "packed_t99"), "packed_t99"),
        (("--grads", "grads.safetensors"), "--batch"),
        (("--tokens", "4"), "--tokens"),
        (("--batch", "missing.safetensors"), "missing.safetensors"),
        (("--json", "no/such/folder/verdict.json"), "verdict.json"),
        (("--json", "/"), "--json"),
    ],
)
def test_a_wrong_call_is_one_line(command: Command, arguments: tuple[str, ...], word: str) -> None:
    is_usage_error(command(*arguments), word)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--repeat", "0"), "repeat"), (("--geometry", "flash"), "flash"), (("--seed", "-1"), "seed"), (("--x",), "--x")],
)
def test_a_value_that_the_parser_refuses(command: Command, arguments: tuple[str, ...], word: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert word in err
    assert "Traceback" not in err


@pytest.mark.parametrize("more", [("--cases", CASE), ("--seed", "1"), ("--geometry", "pro")])
def test_a_captured_batch_goes_with_no_other_cases(
    command: Command, saved: tuple[Path, Path], more: tuple[str, ...]
) -> None:
    is_usage_error(command("--batch", saved[0], *more), "--batch")


def test_cuda_without_a_device(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    is_usage_error(command("--device", "cuda"), "cuda")


def test_a_changed_byte_is_noticed(command: Command, saved: tuple[Path, Path]) -> None:
    corrupt(saved[1])
    is_usage_error(command("--batch", saved[0], "--grads", saved[1]), "grads.safetensors", "digest")
    corrupt(saved[0])
    is_usage_error(command("--batch", saved[0]), "batch.safetensors", "digest")


def test_a_foreign_file_is_refused(command: Command, saved: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not tensors", encoding="utf-8")
    other = tmp_path / "other.safetensors"
    save_file({"r_old": torch.zeros(2)}, other)
    for path in (text, other, saved[1], tmp_path):
        is_usage_error(command("--batch", path), path.name)
    is_usage_error(command("--batch", saved[0], "--grads", saved[0]), "batch.safetensors")


def test_gradients_of_another_batch_are_refused(command: Command, saved: tuple[Path, Path], tmp_path: Path) -> None:
    other, path = make_batch("packed_t16"), tmp_path / "other.safetensors"
    make_grads("packed_t16", other).save(path)
    is_usage_error(command("--batch", saved[0], "--grads", path), "d_r_new")
    frozen = make_batch("mixer_frozen")
    make_grads("mixer_frozen", frozen).save(path, frozen.contract)
    is_usage_error(command("--batch", saved[0], "--grads", path), "contract")


def test_a_document_that_cannot_be_written_is_told_before_the_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(*args: object) -> None:
        raise AssertionError("the judge ran")

    monkeypatch.setattr("rl_engine.mhc.cli.judge_provider", judged)
    is_usage_error(command("--json", tmp_path / "none" / "verdict.json"), "verdict.json")
