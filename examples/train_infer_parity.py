"""Training and inference give the same bytes: ``python examples/train_infer_parity.py --plot parity.png``.

A small causal language model with mHC blocks is trained for some steps, then scores sequences that it has not seen: as
one packed training batch, in batches of other sizes, orders and paddings, and token by token with a KV cache. With
``rl_engine.mhc`` every log-probability has the same bytes each time; the same weights in plain PyTorch stand beside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

# Threads that wait by spinning starve each other where cores are shared. No result of the strict model depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.parity import plain, plotting, strict
from examples.parity.comparing import Comparison, all_compared, table_of
from examples.parity.corpus import Corpus
from examples.parity.model import LONGEST, LanguageModel
from examples.parity.scoring import Scored, scorings
from examples.parity.training import Progress, train

EXIT_SAME, EXIT_DIFFERENT, EXIT_USAGE = 0, 1, 2
PIPE_WIDTH = 120


@dataclass(frozen=True)
class Result:
    """The losses of the training steps, what each model scored in each way, and the comparisons."""

    losses: list[float]
    found: dict[str, dict[str, Scored]]
    comparisons: list[Comparison]

    @property
    def same(self) -> bool:
        """Whether every scoring of the strict model is exactly the packed one."""
        mine = [c for c in self.comparisons if c.model == next(iter(self.found))]
        return bool(mine) and all(c.exact for c in mine)

    def to_dict(self) -> dict[str, Any]:
        """All but the tensors."""
        return {"same": self.same, "losses": self.losses, "comparisons": [c.to_dict() for c in self.comparisons]}


def run(hidden: int, layers: int, steps: int, tokens: int, sequences: int, seed: int, progress: Progress) -> Result:
    """Train the strict model, copy its weights into the plain one, score with both."""
    corpus = Corpus(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, twin = (LanguageModel(parts.arithmetic(), hidden, layers) for parts in (strict, plain))
    losses = train(model, corpus, steps, tokens, sequences, progress)
    twin.load_state_dict(model.state_dict())
    unseen = corpus.draw(tokens, sequences)
    found = {m.arithmetic.name: scorings(m, unseen, seed, progress) for m in (model, twin)}
    return Result(losses, found, all_compared(found))


@contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """A line that says what goes on, on a terminal; nothing in a pipe."""
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda doing: bar.update(task, description=doing)


def report(result: Result, out: Console, seconds: float) -> None:
    """The loss, the table, and the verdict in one line."""
    if result.losses:
        first, last = result.losses[0], result.losses[-1]
        out.print(
            f"loss {first:.3f} at the first of {len(result.losses)} steps, {last:.3f} at the last", highlight=False
        )
    out.print("each scoring beside that of the packed training batch:\n")
    out.print(table_of(result.comparisons), highlight=False)
    name = next(iter(result.found))
    if result.same:
        verdict, style = f"SAME  {name}: every byte equal, KL 0, every ratio 1, in all scorings", "bold green"
    else:
        bad = ", ".join(f"'{c.scoring}'" for c in result.comparisons if c.model == name and not c.exact)
        verdict, style = f"DIFFERENT  {name}: not the bytes of the packed batch: {bad}", "bold red"
    out.print(f"\n{verdict} ({seconds:.1f} s)", style=style, highlight=False, soft_wrap=True)


def consoles(as_json: Path | None) -> tuple[Console, Console]:
    """For the report, which leaves standard output to JSON where that goes there, and for errors."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=str(as_json) == "-", width=width), Console(stderr=True)


def check_files(*paths: Path | None) -> None:
    """``ValueError`` for a path that nothing can be written to, before any work is done."""
    for path in paths:
        if path is not None and str(path) != "-" and (not path.parent.is_dir() or path.is_dir()):
            raise ValueError(f"cannot write {path}: its folder does not exist, or it is a folder")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=0, help="training steps before the scoring")] = 40,
    hidden: Annotated[int, typer.Option(help="width of a stream, a multiple of 32")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="layers, each of two mHC blocks")] = 4,
    tokens: Annotated[int, typer.Option(max=LONGEST, help="tokens of a batch")] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="sequences of a batch")] = 8,
    seed: Annotated[int, typer.Option(help="of the weights, the corpus and the orders")] = 0,
    plot: Annotated[Path | None, typer.Option(help="draw the plot to this file; needs matplotlib")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="write the figures to this file, or with - to standard output")
    ] = None,
) -> None:
    """Exit 0: the strict model gave the same bytes in every scoring; 1: it did not; 2: the call is wrong."""
    (out, err), start = consoles(as_json), time.perf_counter()
    try:
        check_files(plot, as_json)
        if plot is not None:
            plotting.pyplot()
        with shown(err) as progress:
            result = run(hidden, layers, steps, tokens, sequences, seed, progress)
        if as_json is not None:
            text = json.dumps(result.to_dict(), indent=2) + "\n"
            _ = sys.stdout.write(text) if str(as_json) == "-" else as_json.write_text(text, encoding="utf-8")
        report(result, out, time.perf_counter() - start)
        if plot is not None:
            plotting.draw(result.found, result.comparisons, plot)
    except (ValueError, OSError, plotting.NoMatplotlib) as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from None
    raise typer.Exit(EXIT_SAME if result.same else EXIT_DIFFERENT)


if __name__ == "__main__":
    app()
