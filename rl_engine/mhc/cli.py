"""The command line: ``rl-mhc check``, which is also ``scripts/check_p1.py``.

Exit codes: 0 the provider passed, 1 it diverged or was refused, 2 the call itself was wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rl_engine.mhc.acceptance.cases import DEFAULT_TOKENS, captured_case
from rl_engine.mhc.acceptance.runner import Options, available_cases, judge_provider
from rl_engine.mhc.contract import GradBoundary, ResidualBatch
from rl_engine.mhc.profiles import get_profile
from rl_engine.mhc.provider import ALIASES, resolve_provider
from rl_engine.mhc.reports import render_json, render_text, write_json
from rl_engine.mhc.reports.text import render_line

EXIT_PASS, EXIT_FAIL, EXIT_USAGE = 0, 1, 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, rich_markup_mode=None)


class UsageError(Exception):
    """The call is wrong; the message says how, in one line."""


@app.callback()
def _root() -> None:
    """Judge kernels for mHC and RMSNorm of DeepSeek-V4 at the byte."""


@app.command()
def check(
    provider: Annotated[str, typer.Option(help="alias (reference, stub) or module.path:ClassName")] = "reference",
    profile: Annotated[str, typer.Option(help="run the cases under this numeric profile")] = "",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="where the provider and the oracle run")] = "cpu",
    cases: Annotated[str, typer.Option(help="only these cases, separated by commas")] = "",
    geometry: Annotated[
        Literal["fixture", "production", "pro"], typer.Option(help="hidden width: 128, 4096 or 7168")
    ] = "fixture",
    tokens: Annotated[int | None, typer.Option(min=1, help="T, for --geometry production or pro (default 16)")] = None,
    batch: Annotated[Path | None, typer.Option(help="judge this saved ResidualBatch instead")] = None,
    grads: Annotated[Path | None, typer.Option(help="the saved GradBoundary for --batch")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="add fresh random cases drawn from this seed")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="how many repeated runs of each case")] = 2,
    json: Annotated[Path | None, typer.Option(help="write the verdict here as JSON; - for standard output")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="list providers and cases and stop")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print the verdict line only")] = False,
) -> None:
    """Judge a provider against the contract, byte for byte. Exit 0: it passed; 1: it did not; 2: the call is wrong."""
    json = json if json is None or str(json) == "-" else json.absolute()
    out, err = Console(stderr=str(json) == "-"), Console(stderr=True)
    try:
        options = Options(
            device=_device(device),
            geometry=geometry,
            tokens=_tokens(tokens, geometry),
            cases=tuple(name.strip() for name in cases.split(",") if name.strip()),
            seed=seed,
            repeat=repeat,
            numeric_profile=profile,
            captured=_captured(
                batch, grads, (bool(cases), tokens is not None, seed is not None, geometry != "fixture")
            ),
        )
        if list_cases:
            _list(options, out)
            raise typer.Exit(EXIT_PASS)
        _writable(json)
        _known(profile, err)
        candidate = resolve_provider(provider, profile)
        with _progress(err, hidden=quiet) as progress:
            verdict = judge_provider(candidate, options, progress)
        if str(json) == "-":
            sys.stdout.write(render_json(verdict))
        elif json is not None:
            write_json(verdict, json)
    except (UsageError, ValueError, OSError) as error:
        err.print(f"error: {' '.join(str(error).split())}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from None
    try:
        if quiet:
            out.print(render_line(verdict), highlight=False, soft_wrap=True)
        else:
            render_text(verdict, out)
        sys.stdout.flush()
    except (
        BrokenPipeError,
        SystemExit,
    ):  # rich exits on a closed pipe; whoever read has seen enough, the verdict stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(EXIT_PASS if verdict.passed else EXIT_FAIL)


def main() -> int:
    """The console script ``rl-mhc``: run the command of ``sys.argv`` and return its exit code."""
    return _run(app)


def check_p1_main() -> int:
    """``scripts/check_p1.py``: the ``check`` command by itself."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command()(check)
    return _run(alone)


def _run(command: Callable[..., object]) -> int:
    try:
        command()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    return EXIT_PASS


def _device(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: got cuda, but this torch sees no CUDA device")
    return name


def _tokens(tokens: int | None, geometry: str) -> int:
    if tokens is not None and geometry == "fixture":
        raise UsageError("--tokens goes with --geometry production or pro; fixture cases have their own T")
    return DEFAULT_TOKENS if tokens is None else tokens


def _captured(batch: Path | None, grads: Path | None, drawn: tuple[bool, ...]):  # type: ignore[no-untyped-def]
    if batch is None:
        if grads is not None:
            raise UsageError("--grads goes with --batch")
        return None
    if any(drawn):
        raise UsageError("--batch is a case of its own: leave out --cases, --geometry, --tokens and --seed")
    loaded = ResidualBatch.load(batch)
    gradients = None if grads is None else GradBoundary.load(grads, loaded.contract)
    if gradients is not None:
        gradients.validate(loaded)
    return captured_case(loaded, gradients)


def _writable(json: Path | None) -> None:
    if json is None or str(json) == "-":
        return
    if not json.parent.is_dir() or (json.exists() and not json.is_file()):
        raise UsageError(f"--json: cannot write {json}: its folder does not exist, or it is not a regular file")


def _known(profile: str, err: Console) -> None:
    """An unknown profile is a refusal, not a wrong call: nobody can judge by it."""
    try:
        if profile:
            get_profile(profile)
    except ValueError as error:
        err.print(f"refused: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAIL) from None


def _list(options: Options, out: Console) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, target in ALIASES.items():
        table.add_row("provider", name, target)
    for name, about in available_cases(options).items():
        table.add_row("case", name, about)
    out.print(table, highlight=False)


@contextmanager
def _progress(err: Console, hidden: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on a terminal's standard error; nothing in a pipe."""
    if hidden or not err.is_terminal:
        yield None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total)
