"""The files around the code agree with one another, and the text speaks of this project alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[1]

# Put together here, so that this file does not hold what it looks for.
FOREIGN_WORDS = (
    "/wo" + "rk/",
    "/fa" + "rm/",
    ".libr" + "ary",
    "farm-" + "bench",
    "farm-" + "studio",
    "sub" + "agent",
)
VERIFY_TARGETS = ("verify-elementary", "verify-portable", "verify-arm")
MAKE_TARGETS = (
    *("help", "setup", "check", "test", "lint", "format", "bench", "docs", "clean", "test-asan"),
    *VERIFY_TARGETS,
)


def read(name: str) -> str:
    return REPOSITORY.joinpath(name).read_text(encoding="utf-8")


def pyproject() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def requirement_name(requirement: str) -> str:
    """``pytest-xdist`` of ``pytest-xdist>=3.6``."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    assert match is not None, requirement
    return match.group().lower().replace("_", "-")


def dependencies() -> list[str]:
    """Every requirement that pyproject.toml states: build, runtime and extras."""
    text = pyproject()
    extras = text["project"]["optional-dependencies"].values()
    return [*text["build-system"]["requires"], *text["project"]["dependencies"], *(r for e in extras for r in e)]


def pins() -> list[tuple[str, str, str]]:
    """Name, version and marker of each line of constraints.txt."""
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    rows = [re.fullmatch(r"([a-z0-9.-]+)==([^ ;+]+)(?: ; (.+))?", line) for line in lines]
    assert None not in rows, [line for line, row in zip(lines, rows, strict=True) if row is None]
    return [(row[1], row[2], row[3] or "") for row in rows if row is not None]


def foreign_words(text: str) -> list[str]:
    """The foreign words in ``text``. A leading dot starts a hidden folder's name, not a module's attribute."""
    starts = {word: r"(?<!\w)" if word.startswith(".") else "" for word in FOREIGN_WORDS}
    return [word for word, start in starts.items() if re.search(start + re.escape(word), text.lower())]


def make(*arguments: str) -> str:
    """What make prints, whatever make, if any, these tests run under; the venv passes for up to date."""
    variables = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "JOBS"}}
    command = ["make", "--old-file=.venv/.installed", *arguments]
    run = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True)
    return run.stdout


# --- the text ---


def test_the_text_speaks_of_this_project_alone() -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [REPOSITORY / name for name in names if name]
    assert REPOSITORY / "pyproject.toml" in paths
    found = []
    for path in filter(Path.is_file, paths):
        content = path.read_bytes()
        text = str(path.relative_to(REPOSITORY))
        if b"\0" not in content:
            text += "\n" + content.decode("utf-8")
        found += [f"{path.relative_to(REPOSITORY)}: {word}" for word in foreign_words(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", FOREIGN_WORDS)
def test_a_planted_foreign_word_is_found(word: str) -> None:
    assert foreign_words(f"see {word.upper()}x") == [word]
    assert foreign_words("see docs/contract.md, torch" + ".libr" + "ary and a framework/") == []


# --- the commands ---


def test_make_names_its_targets() -> None:
    listed = re.findall(r"^make ([a-z-]+) +\S", make(), re.M)
    assert sorted(listed) == sorted(MAKE_TARGETS)


def test_make_test_lints_types_and_tests() -> None:
    steps = ["-m ruff check .", "-m ruff format --check .", "-m mypy", "-m pytest -n 2"]
    assert make("--dry-run", "test").splitlines() == [f".venv/bin/python {step}" for step in steps]


def test_make_check_judges_both_providers_in_both_profiles() -> None:
    judges = [f".venv/bin/python scripts/check_p1.py --provider {name}" for name in ("reference", "native")]
    wanted = [line for judge in judges for line in (judge, f"{judge} --profile portable-fp32-mhc-v1")]
    assert make("--dry-run", "check").splitlines() == wanted


def test_make_docs_fails_at_a_warning_and_installs_once() -> None:
    build = ["NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict"]
    steps = make("--dry-run", "--old-file=.venv/.docs-tools", "docs").splitlines()
    assert [step for step in steps if not step.startswith("echo")] == build


def test_make_docs_installs_the_extra_of_that_name() -> None:
    (names,) = re.findall(r"^\$\(DOCS_TOOLS\):.*\n\t\$\(PIP_INSTALL\) (.*)$", read("Makefile"), re.M)
    extras = pyproject()["project"]["optional-dependencies"]
    wanted = {requirement_name(r) for r in extras["docs"]}
    assert {requirement_name(name.strip("'")) for name in names.split()} == wanted - set(
        map(requirement_name, extras["dev"])
    )


def test_ci_runs_the_two_commands() -> None:
    path = REPOSITORY / ".ci" / "run"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make")] == ["make test", "make check"]
    assert path.stat().st_mode & 0o111


def test_pre_commit_runs_the_tools_of_the_venv() -> None:
    repositories = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "mypy"}
    for hook in hooks:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")


def test_the_check_script_stays_a_shim() -> None:
    assert len(read("scripts/check_p1.py").splitlines()) < 40


# --- the dependencies ---


def test_torch_is_pinned() -> None:
    assert [pin for pin in pins() if pin[0] == "torch"] == [("torch", "2.13.0", "")]


def test_every_dependency_is_pinned_for_every_python() -> None:
    markers: dict[str, list[str]] = {}
    for name, _, marker in pins():
        markers.setdefault(name, []).append(marker)
    older, newer = 'python_version < "3.11"', 'python_version >= "3.11"'
    assert all(found in ([""], [older], [older, newer]) for found in markers.values()), markers
    unpinned = {name for name in map(requirement_name, dependencies()) if markers.get(name, [older]) == [older]}
    assert not unpinned


def test_the_build_backend_is_one_version() -> None:
    (requirement,) = pyproject()["build-system"]["requires"]
    name, _, version = requirement.partition("==")
    assert (name, version, "") in pins()


def undocumented(names: list[str], readme: str) -> list[str]:
    """The names that no line of ``readme`` gives in backquotes along with a reason of three words or more."""

    def has_reason(name: str) -> bool:
        lines = (line for line in readme.splitlines() if f"`{name}`" in line.lower())
        return any(len(re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`", "", line))) >= 3 for line in lines)

    return [name for name in names if not has_reason(name)]


def test_the_readme_gives_a_reason_for_every_dependency() -> None:
    assert undocumented([requirement_name(r) for r in dependencies()], read("README.md")) == []


def test_a_dependency_without_a_reason_is_found() -> None:
    readme = (
        "| `numpy` | reads arrays that tests compare |\n- `rich`\n- `typer`: commands\npytest runs all of the tests"
    )
    assert undocumented(["numpy", "rich", "typer", "pytest"], readme) == ["rich", "typer", "pytest"]
