"""The documents hold: their code runs, their commands exist, their links resolve, their tables are tables."""

from __future__ import annotations

import importlib
import itertools
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import profile_error
from docs import refresh
from examples import frozen_decisions
from examples.faulty_providers import DescendingFold, TruncatingStore
from examples.ten_line_provider import TenLineProvider
from rl_engine.mhc.acceptance import Options, judge_provider
from rl_engine.mhc.acceptance.cases import GEOMETRIES
from rl_engine.mhc.acceptance.runner import available_cases
from rl_engine.mhc.bits import differing
from rl_engine.mhc.fixtures import GOLDEN_CASES, load_manifest
from rl_engine.mhc.profiles import register_profile
from rl_engine.mhc.provider import OWNING_TASKS, ReferenceProvider, resolve_provider
from tests.profile_registry import restored_registry

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.joinpath("docs").rglob("*.md")])
DESIGN = REPOSITORY / "docs" / "design" / "dsv4_p1_mhc_rmsnorm_start_kit.md"
README = REPOSITORY / "README.md"
PROFILES = REPOSITORY / "docs" / "numeric_profiles.md"

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
HOME = (
    platform.machine() == "x86_64"
    and str(torch.__version__).startswith("2.13.")
    and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
)
at_home = pytest.mark.skipif(not HOME, reason="the figures were made with torch 2.13 on x86-64 with AVX2 or AVX-512")
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language in a document."""
    return [m[3] for m in FENCE.finditer(path.read_text(encoding="utf-8")) if m[2] == language]


def prose(text: str) -> str:
    """``text`` without its fenced blocks; their lines stay, empty."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def without_code(text: str) -> str:
    """``text`` without fenced blocks and inline code."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", prose(text), flags=re.S)


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def plain_brackets(text: str) -> list[str]:
    """Brackets that are no inline link, checkbox or version heading: a reference link that would show as text."""
    text = re.sub(r"^( *)- \[[ x]\] ", r"\1- ", without_code(text), flags=re.M)
    text = re.sub(r"^## \[[^\]]+\]", "##", text, flags=re.M)
    return re.findall(r"!?\[[^\]]*\](?!\()", text)


def broken_links(path: Path, text: str) -> list[str]:
    """The link targets in ``text``, the text of ``path``, that lead nowhere; web links are only looked at."""
    broken = []
    for target in re.findall(r"\]\(([^)]*)\)", without_code(text)):
        if re.match(r"https://[\w.-]+/\S*$", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.is_file() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8") if name else text)):
            broken.append(target)
    return broken


def malformed_tables(text: str) -> list[str]:
    """The first line of every table without blank lines around it, a delimiter row or cells that match its header."""
    bad, lines = [], ["", *prose(text).splitlines(), ""]
    starts = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    for start in starts:
        stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
        table = lines[start:stop]
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
        ruled = len(table) > 2 and re.fullmatch(r"\|(:?-+:?\|)+", table[1])
        if len(widths) != 1 or not ruled or lines[start - 1] or lines[stop] or any(line[-1] != "|" for line in table):
            bad.append(table[0])
    return bad


def commands() -> Iterator[tuple[str, list[str]]]:
    """Document and words of every command in a console block; comments and printed output left out."""
    for path in DOCUMENTS:
        for block in blocks(path, "console"):
            lines = [line.strip() for line in block.splitlines()]
            prompted = [line[2:] for line in lines if line.startswith("$ ")]
            for line in prompted or lines:
                words = shlex.split(line, comments=True)
                if words:
                    yield str(path.relative_to(REPOSITORY)), words


@cache
def cli_options() -> frozenset[str]:
    """The options of the acceptance command, as its help lists them."""
    command = [sys.executable, "scripts/check_p1.py", "--help"]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return frozenset(re.findall(r"^ +(--[a-z-]+)", text, re.M))


# --- form ---


@every_document
def test_every_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


@every_document
def test_no_reference_link_shows_as_text(path: Path) -> None:
    assert plain_brackets(path.read_text(encoding="utf-8")) == []


@every_document
def test_every_table_is_a_table(path: Path) -> None:
    assert malformed_tables(path.read_text(encoding="utf-8")) == []


@every_document
def test_every_fence_is_closed_and_names_its_language(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "```" not in prose(text)
    assert {match[2] for match in FENCE.finditer(text)} <= {"console", "json", "python", "text"}


def test_planted_faults_of_form_are_found() -> None:
    assert plain_brackets("see [the paper][1] and [docs](x.md), `a[0]`, - [ ] x") == ["[the paper]", "[1]", "[ ]"]
    assert plain_brackets("- [ ] a task\n\n## [0.1.0] - today\n") == []
    assert broken_links(
        README, "[a](nowhere.md) [b](#no-such) [c](LICENSE) [d](http://x.org/) [e](#one-two)\n# One two"
    ) == [
        "nowhere.md",
        "#no-such",
        "http://x.org/",
    ]
    good = "| a | b |\n|---|---|\n| 1 | 2 |"
    assert malformed_tables(f"text\n\n{good}\n\ntext") == []
    for bad in (f"text\n{good}", f"{good}\ntext", good.replace("|---|---|\n", ""), good.replace("| 2 |", "| 2 | 3 |")):
        assert malformed_tables(bad) == ["| a | b |"]


# --- code ---


QUICKSTARTS = [path for path in DOCUMENTS if path.stem.startswith("quickstart_")]
PYTHON_BLOCKS = [(path, block) for path in DOCUMENTS if path not in QUICKSTARTS for block in blocks(path, "python")]


@pytest.mark.parametrize(
    ("path", "block"), PYTHON_BLOCKS, ids=[f"{path.stem}{i}" for i, (path, _) in enumerate(PYTHON_BLOCKS)]
)
def test_a_python_block_runs(
    path: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with restored_registry():
        exec(compile(block, str(path), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert not printed or printed in "".join(blocks(path, "text"))


def run_in_order(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the blocks of a page print, one after the other, in one namespace."""
    names, printed = {"__name__": "__main__"}, []
    torch._dynamo.reset()
    with restored_registry(), torch.random.fork_rng(devices=[]):
        for block in blocks(path, "python"):
            exec(compile(block, str(path), "exec"), names)
            printed.append(capsys.readouterr().out)
    return [text for text in printed if text]


@pytest.mark.parametrize("path", QUICKSTARTS, ids=lambda path: path.stem)
def test_the_blocks_of_a_quickstart_run_in_order_and_print_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_in_order(path, capsys) == blocks(path, "text")


def test_a_quickstart_that_fails_or_prints_otherwise_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "quickstart_planted.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n", encoding="utf-8")
    assert (run_in_order(page, capsys), blocks(page, "text")) == (["1\n"], ["2\n"])
    page.write_text("```python\nassert 1 == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        run_in_order(page, capsys)


def test_the_quickstarts_are_three() -> None:
    assert [path.stem for path in QUICKSTARTS] == [f"quickstart_{n}" for n in ("checkpoints", "inference", "training")]


def test_the_ten_line_provider_is_the_one_of_the_readme() -> None:
    code = blocks(README, "python")[0]
    example = REPOSITORY.joinpath("examples/ten_line_provider.py").read_text(encoding="utf-8")
    assert code.strip() == example.partition('"""\n\n')[2].strip()
    body = code[code.index("class") :].splitlines()
    assert len([line for line in body if line.strip()]) <= 10


def test_the_ten_line_provider_passes() -> None:
    verdict = judge_provider(TenLineProvider(), Options(cases=("one_row", "no_tokens", "aggregate_ties")))
    assert verdict.passed
    assert verdict.provenance["operators"]["h_aggregate_fwd"] == "ten-line"


@pytest.mark.parametrize(("provider", "boundary"), [(TruncatingStore, "post.r_new"), (DescendingFold, "controller.p")])
def test_a_faulty_provider_fails_where_the_readme_says(provider: type, boundary: str) -> None:
    verdict = judge_provider(provider(), Options(cases=("one_row",)))
    assert not verdict.passed
    assert verdict.first_divergence is not None
    assert verdict.first_divergence[1].boundary == boundary
    others = {check.group for check in verdict.failures} - {"boundaries"}
    assert not others
    if HOME:
        text = README.read_text(encoding="utf-8")
        assert verdict.first_divergence[1].message in text
        assert verdict.first_divergence[1].hint in text


def test_the_captured_tensors_of_the_readme_are_judged(tmp_path: Path) -> None:
    block = next(block for block in blocks(README, "python") if ".save(" in block)
    (words,) = [words for _, words in commands() if "--batch" in words]
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "rl_engine.mhc", *words[1:], "--quiet"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout[:4]) == (0, "PASS"), run.stdout + run.stderr


# --- commands ---


@pytest.mark.parametrize(
    ("document", "words"), list(commands()), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_a_command_exists(document: str, words: list[str]) -> None:
    program, rest = words[0], words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):.*##", REPOSITORY.joinpath("Makefile").read_text(encoding="utf-8"), re.M)
        assert {word for word in rest if "=" not in word} <= set(targets)
        assert rest
    elif program.endswith("python") and rest[0] == "-m":
        assert rest[1] in ("pip", "rl_engine.mhc.fixtures")
        assert "--profile" not in rest or rest[rest.index("--profile") + 1] in GOLDEN_CASES
    elif program.endswith("python") and rest[0] != "scripts/check_p1.py":
        assert REPOSITORY.joinpath(rest[0]).is_file()
    elif program.endswith(("python", "rl-mhc")):
        options = {word for word in rest if word.startswith("--")}
        assert options <= cli_options() | {"--help"}
        for option, value in itertools.pairwise(rest):
            if option == "--provider" and not value.startswith("your."):
                with restored_registry():
                    sys.modules.pop("examples.own_profiles", None)  # registers when imported
                    resolve_provider(value)
            if option == "--cases":
                assert set(value.split(",")) <= set(available_cases(Options()))
            if option == "--geometry":
                assert value in GEOMETRIES
    else:
        assert words in (["echo", "$?"], [".venv/bin/pre-commit", "install"])


def test_the_readme_leads_with_the_two_commands() -> None:
    first = blocks(README, "console")[0].splitlines()
    assert [line.split()[:2] for line in first] == [["make", "check"], ["make", "test"]]


def test_the_readme_lists_every_option() -> None:
    (section,) = re.findall(r"^## Options\n(.*?)^## ", README.read_text(encoding="utf-8"), re.M | re.S)
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    named = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row)}
    assert named == cli_options() - {"--help"}


def test_the_readme_lists_every_group() -> None:
    (section,) = re.findall(r"^## What is verified\n(.*?)^## ", README.read_text(encoding="utf-8"), re.M | re.S)
    named = re.findall(r"^\| `([a-z -]+)` \|", section, re.M)
    verdict = judge_provider(TenLineProvider(), Options(cases=("no_tokens", "fixed_gemm_empty")))
    assert named == list(dict.fromkeys(check.group for check in verdict.checks))


def test_the_tasks_are_the_providers() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    for operator, task in OWNING_TASKS.items():
        name, issue = re.fullmatch(r"(P1-\d) \((#\d+)\)", task).groups()  # type: ignore[union-attr]
        (row,) = re.findall(rf"^\| {name} \| {issue} \|.*$", text, re.M)
        assert operator in row or operator == "mhc_block"


# --- figures ---


@at_home
@pytest.mark.parametrize(
    ("path", "key"),
    [(README, "--provider stub"), (README, "--cases one_row"), (PROFILES, "TolerantFold"), (PROFILES, "RoundedMix")],
)
def test_the_printed_output_is_what_the_command_prints(path: Path, key: str) -> None:
    (block,) = [match[0] for match in refresh.CONSOLE.finditer(path.read_text(encoding="utf-8")) if key in match[0]]
    assert steady(refresh.CONSOLE.sub(refresh.console, block)) == steady(block)


def steady(output: str) -> str:
    """Output without what differs from run to run: seconds and the device."""
    return re.sub(r"^device.*|\(\d+\.\d s\)", "", output, flags=re.M)


@at_home
def test_the_errors_of_the_profiles_page_are_what_the_benchmark_prints() -> None:
    (printed,) = refresh.ERRORS.findall(PROFILES.read_text(encoding="utf-8"))
    tables = [part.splitlines()[2:] for part in printed.split("\nD=")]
    rows = list(profile_error.lines(profile_error.errors(128, 16), markdown=True))
    assert [line for line in tables[0] if line] == rows
    assert [line.split("|")[1] for line in tables[1] if line] == [line.split("|")[1] for line in rows]


def test_the_hardest_inputs_of_the_profiles_page_are_the_first_of_the_list() -> None:
    listed = REPOSITORY.joinpath("tests/elementary/hardest_inputs.txt").read_text(encoding="utf-8").splitlines()
    text = PROFILES.read_text(encoding="utf-8")
    for name in ("exp", "rsqrt"):
        first = next(line for line in listed if line.startswith(f"{name} ")).split()[1]
        assert re.search(rf"^\| {name} \| 4294967296 \| 0 \| `[0-9a-f]{{16}}` \| `0x{first}` ", text, re.M)


# --- profiles ---


@pytest.fixture
def own_profiles() -> Iterator[ModuleType]:
    """The example, imported anew; what it registers is forgotten after the test."""
    with restored_registry():
        module = importlib.import_module("examples.own_profiles")
        for profile in (module.TOLERANT, module.ROUNDED_MIX):  # an earlier test may have imported it already
            register_profile(profile)
        yield module


def test_the_profiles_of_the_example_are_judged_by_their_own_oracle(own_profiles: ModuleType) -> None:
    few = Options(cases=("one_row", "post_ties"))
    near = judge_provider(own_profiles.TolerantFold(), few)
    assert (near.passed, near.byte_equality, near.compared_with) == (True, False, "portable-fp32-mhc-v1")
    own = judge_provider(own_profiles.RoundedMixKernel(), few)
    assert (own.passed, own.byte_equality, own.compared_with) == (True, True, own_profiles.ROUNDED_MIX.id)


def test_a_kernel_that_is_the_oracle_of_its_profile_fails(own_profiles: ModuleType) -> None:
    class Inherits(own_profiles.RoundedMix, ReferenceProvider):  # type: ignore[misc, name-defined]
        name = "inherits"

    verdict = judge_provider(Inherits(own_profiles.ROUNDED_MIX.id), Options(cases=("post_ties",)))
    assert verdict.failures[0].name == "claimed operators are the provider's own"


def test_the_tolerance_of_the_example_has_an_end(own_profiles: ModuleType) -> None:
    class TooFar(own_profiles.TolerantFold):  # type: ignore[misc, name-defined]
        def mhc_post_fwd(self, *args: torch.Tensor) -> torch.Tensor:
            r_new: torch.Tensor = super().mhc_post_fwd(*args)
            return r_new * 1.03125

    verdict = judge_provider(TooFar(), Options(cases=("one_row",)))
    assert verdict.first_divergence is not None
    assert verdict.first_divergence[1].boundary == "post.r_new"


def test_the_numbers_of_published_hashes_are_those_of_the_manifests() -> None:
    text = DESIGN.parents[1].joinpath("numerical_contract.md").read_text(encoding="utf-8")
    for profile, blocks_of in GOLDEN_CASES.items():
        cases = load_manifest(numeric_profile=profile)["cases"]
        (row,) = re.findall(rf"^\| `{profile}` \|.*$", text, re.M)
        assert f" {sum(map(len, cases.values()))} hashes" in row
        assert all(f"| `{name}` |" in text for name in blocks_of)
    manifests = [load_manifest(numeric_profile=profile)["cases"] for profile in GOLDEN_CASES]
    oracle, portable = ((len(cases), sum(map(len, cases.values()))) for cases in manifests)
    said = "The oracle profile has {} cases and {} hashes, the portable one {} and {}.".format(*oracle, *portable)
    assert said in " ".join(text.split())


def test_fma_rounds_once() -> None:
    a = torch.tensor([1 + 2.0**-23, 1 + 2.0**-12, 3.0])
    c = torch.tensor([-1.0, -1 - 2.0**-11, 2.0**-30])
    want = torch.tensor([2.0**-22 + 2.0**-46, 2.0**-24, 9.0])
    assert not differing(frozen_decisions.fma(a, a, c), want).any()


@at_home
def test_the_table_of_the_design_document_is_what_the_example_prints() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    printed = [
        f"| {r.contract} | {r.alternative} | {r.tensor} | {r.moved} of {r.total} |" for r in frozen_decisions.rows()
    ]
    (table,) = re.findall(r"^\| the contract \| the alternative .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert table.splitlines() == printed


@at_home
def test_the_counts_in_the_prose_are_in_the_table() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    table = {(row.moved, row.total) for row in frozen_decisions.rows()}
    for moved, total in re.findall(r"\b(\d+) of (\d+)\s(?:elements|projections|rows|normalized)", prose(text)):
        assert (int(moved), int(total)) in table, f"{moved} of {total}"
