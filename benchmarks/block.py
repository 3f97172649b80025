"""The block boundary, timed: the native backend beside the oracle, plain PyTorch and HF transformers.

    python -m benchmarks.block [--quick] [--json PATH] [--plot PATH] [--tokens 1,16,...] [--implementations a,b]

Correctness first: a strict implementation that does not have the oracle's bytes is RED, has no time, and the command
returns 1. Everything that is compared runs interleaved in this process; the limits of the machine are measured in it
too. Progress goes to stderr where that is a terminal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import measure, rendering
from benchmarks.implementations import IMPLEMENTATIONS, Implementation
from benchmarks.operator_calls import DEFAULT_OPERATORS
from benchmarks.session import Options
from rl_engine.mhc.operators.interface import LEAF_OPERATORS

QUICK = {"tokens": "1,16,512", "budget": 0.15, "compile_budget": 0.0}


def names(text: str, known: Sequence[str], option: str, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """A list of names with commas; ``all`` and ``none`` are lists too."""
    wanted = {"all": tuple(known), "none": ()}.get(text, tuple(name for name in text.split(",") if name))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"{option}: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return wanted


def arguments(argv: Sequence[str] | None, registry: Mapping[str, Implementation]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="comma-separated T (default: 1,16,128,512,4096)")
    parser.add_argument("--hidden", type=int, default=4096, help="D (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of everything but the 1t rows (default: 2)")
    parser.add_argument("--implementations", default="all", help=f"from: {', '.join(registry)} (default: all)")
    parser.add_argument("--operators", default=",".join(DEFAULT_OPERATORS), help="to time alone; all; none")
    parser.add_argument("--budget", type=float, help="seconds for each cell (default: 0.5)")
    parser.add_argument("--compile-budget", type=float, help="seconds for torch.compile in all (default: 110)")
    parser.add_argument("--quick", action="store_true", help="T 1, 16, 512; a third of the repeats; no child process")
    parser.add_argument("--json", type=Path, help="write the result as JSON")
    parser.add_argument("--plot", type=Path, help="write µs/token against T as PNG or SVG")
    options = parser.parse_args(argv)
    for key, usual in (("tokens", "1,16,128,512,4096"), ("budget", 0.5), ("compile_budget", 110.0)):
        if getattr(options, key) is None:
            setattr(options, key, QUICK[key] if options.quick else usual)
    try:
        options.tokens = tuple(sorted({int(t) for t in options.tokens.split(",")}))
    except ValueError:
        parser.error("--tokens: want integers with commas between them")
    if min(*options.tokens, options.hidden, options.threads) < 1:
        parser.error("--tokens, --hidden and --threads must be positive")
    options.implementations = names(options.implementations, list(registry), "--implementations", parser)
    options.operators = names(options.operators, LEAF_OPERATORS, "--operators", parser)
    if options.plot is not None and options.plot.suffix not in (".png", ".svg"):
        parser.error("--plot: want a path that ends in .png or .svg")
    return options


def progress(text: str) -> None:
    """One line on stderr that the next one replaces; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None, registry: Mapping[str, Implementation] = IMPLEMENTATIONS) -> int:
    options = arguments(argv, registry)
    wanted = Options(
        tokens=options.tokens,
        hidden=options.hidden,
        threads=options.threads,
        implementations=options.implementations,
        operators=options.operators,
        budget_s=options.budget,
        compile_s=options.compile_budget,
        extras=not options.quick,
    )
    try:
        result = measure.run(wanted, progress, registry)
    finally:
        progress("")
    console = Console(width=None if sys.stdout.isatty() else 120)
    rendering.show(result, console)
    if options.json is not None:
        options.json.write_text(rendering.to_json(result), encoding="utf-8")
    if options.plot is not None:
        try:
            rendering.plot(result, options.plot)
        except ImportError as error:
            print(f"no plot: {error} (the `bench` extra installs it)", file=sys.stderr)
    return 1 if result.red else 0


if __name__ == "__main__":
    raise SystemExit(main())
