"""Hold that no object file of the native backend has a fused multiply-add, which would round once instead of twice.

    python csrc/mhc/verify/verify_unfused.py build/verify_native
    python csrc/mhc/verify/verify_unfused.py build/verify_native_arm --objdump aarch64-linux-gnu-objdump

The golden hashes would show a fused operation only where the second rounding matters for their inputs. The kernels and
the core in a build folder are disassembled, every level of instructions. Exit status: 0, or 1 where one was found.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# vfmadd231ps, vfnmsub132ss, vfmaddsub... on x86; fmadd, fnmsub, fmla, fmls, fmlal... on aarch64.
FUSED = re.compile(r"vfn?m(add|sub)\w*|fn?m(add|sub)|fml[as]\w*")
INSTRUCTION = re.compile(r"\s+[0-9a-f]+:\s+(\S+)")
FUNCTION = re.compile(r"[0-9a-f]+ <(.*)>:")
SHOWN = 10


class UnfusedError(Exception):
    """What went wrong, in one line for a person."""


def instructions(disassembly: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The function and the mnemonic of each instruction that ``objdump -d --no-show-raw-insn`` printed."""
    function = "?"
    for line in disassembly:
        if found := FUNCTION.match(line):
            function = found[1]
        elif found := INSTRUCTION.match(line):
            yield function, found[1]


def disassemble(objdump: str, path: Path) -> list[str]:
    """The lines that ``objdump`` prints for an object file."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnfusedError(f"{objdump}: cannot be started: {error.strerror} (it is part of binutils)") from None
    if done.returncode != 0:
        raise UnfusedError(f"{objdump}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout.splitlines()


def verify(objdump: str, folder: Path) -> tuple[str, list[str]]:
    """A summary in one line, and a line for each fused instruction."""
    objects = sorted(folder.glob("**/rl_mhc_*.dir/**/*.o"))
    total, fused = 0, []
    for path in objects:
        for function, mnemonic in instructions(disassemble(objdump, path)):
            total += 1
            if FUSED.fullmatch(mnemonic):
                fused.append(f"{path.relative_to(folder)}: {function}: {mnemonic}")
    # A wrong folder or an output that is not understood must not pass for a clean one.
    if total == 0:
        raise UnfusedError(f"{folder}: no instruction found in {len(objects)} object files of the native backend")
    return f"{folder}: {len(fused)} fused among {total} instructions of {len(objects)} object files", fused


def main(argv: Sequence[str] | None = None) -> int:
    """Disassemble and count; exit 0 where nothing is fused, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the build folder")
    parser.add_argument("--objdump", default="objdump", help="the disassembler for the processor of the build")
    options = parser.parse_args(argv)
    try:
        summary, fused = verify(options.objdump, options.folder)
    except UnfusedError as error:
        print(f"verify_unfused: {error}", file=sys.stderr)
        return 1
    print(summary)
    for line in fused[:SHOWN]:
        print(f"  {line}")
    if len(fused) > SHOWN:
        print(f"  and {len(fused) - SHOWN} more")
    if fused:
        print("verify_unfused: the native backend must be compiled with -ffp-contract=off", file=sys.stderr)
    return 1 if fused else 0


if __name__ == "__main__":
    raise SystemExit(main())
