"""Run what the documents print and paste what it prints now: ``python docs/refresh.py [FILE ...]`` (a few minutes).

- In every console block with ``$ command`` lines, the output of each of them.
- The table of the design document.
- The example of the verdict page: a real verdict, cut to its first failed check.
- What the benchmarks measure, in the page on numeric profiles.

With names of files, such as ``verdict_schema.md``, only those.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"


def run(command: str) -> tuple[int, str]:
    """Exit code and standard output of a command of the documents, blanks at line ends removed."""
    words = shlex.split(command)
    if words[0] == ".venv/bin/python":
        words[0] = sys.executable
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.returncode, "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def console(match: re.Match[str]) -> str:
    """A console block with the output of its commands; ``echo $?`` shows the exit code of the one before."""
    lines, code = [], 0
    for line in match[1].splitlines():
        if line == "$ echo $?":
            lines += [line, str(code)]
        elif line.startswith("$ "):
            code, output = run(line[2:])
            lines += [line, output]
    return "```console\n" + "\n".join(lines) + "\n```\n" if lines else match[0]


def table(match: re.Match[str]) -> str:
    """The table that ``examples/frozen_decisions.py`` prints."""
    return run(".venv/bin/python examples/frozen_decisions.py")[1] + "\n"


def verdict(match: re.Match[str]) -> str:
    """A verdict with one check left."""
    found = json.loads(run(".venv/bin/python scripts/check_p1.py " + EXAMPLE)[1])
    found["checks"] = [next(check for check in found["checks"] if check["status"] == "fail")]
    return "```json\n" + json.dumps(found, indent=2) + "\n```\n"


def printed_by(command: str) -> Callable[[re.Match[str]], str]:
    """What a command prints, in place of whatever was there."""
    return lambda match: run(command)[1] + "\n"


EXAMPLE = "--provider examples.faulty_providers:TruncatingStore --cases one_row,post_ties --json -"
CONSOLE = re.compile(r"^```console\n(.*?)^```\n", re.M | re.S)
TABLE = re.compile(r"^\| the contract \| the alternative .*\n(?:\|.*\n)+", re.M)
VERDICT = re.compile(r"^```json\n.*?^```\n", re.M | re.S)
MEASURED = re.compile(r"^torch \S+, .* threads\n\n(?:\| .*\n|\|-.*\n)+\nexp of .*\n", re.M)
ERRORS = re.compile(r"^D=128, .*?\n(?=\n## )", re.M | re.S)
PROFILES = DOCS / "numeric_profiles.md"

PLACES: tuple[tuple[Path, re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (REPOSITORY / "README.md", CONSOLE, console),
    (DOCS / "design" / "dsv4_p1_mhc_rmsnorm_start_kit.md", TABLE, table),
    (DOCS / "verdict_schema.md", VERDICT, verdict),
    (PROFILES, CONSOLE, console),
    (PROFILES, MEASURED, printed_by(".venv/bin/python benchmarks/elementary_profiles.py --markdown")),
    (PROFILES, ERRORS, printed_by(".venv/bin/python benchmarks/profile_error.py --markdown")),
)


def main(names: Sequence[str]) -> None:
    """Refresh every place, or those in the files of these names. Whoever edits a file meanwhile loses the edit."""
    unknown = set(names) - {path.name for path, _, _ in PLACES}
    if unknown:
        raise SystemExit(f"refresh: no place in: {', '.join(sorted(unknown))}")
    for path, pattern, renew in PLACES:
        if not names or path.name in names:
            path.write_text(pattern.sub(renew, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
