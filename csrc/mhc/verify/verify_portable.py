"""Hold the C++ block against the golden manifests of the portable profile.

    python csrc/mhc/verify/verify_portable.py --driver build/portable_driver
    python csrc/mhc/verify/verify_portable.py --driver 'qemu-aarch64 build/portable_driver_arm'

The fixture inputs go into a case file (its format is in portable_case_file.hpp), the driver runs them, and the SHA-256
of every tensor it gives is compared with the manifest's. With --stride, its checksums of exp, rsqrt, sqrt and sigmoid
are compared with those of the torch recipe. --driver may be repeated. Exit status: 0, or 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rl_engine.mhc.bits import tensor_bytes
from rl_engine.mhc.contract import RELEASED_RMS
from rl_engine.mhc.elementary import PORTABLE_PROFILE, for_profile
from rl_engine.mhc.fixtures import (
    GOLDEN_CASES,
    RMS_EDGES,
    SINKHORN_EDGES,
    Manifest,
    load_manifest,
    make_batch,
    make_grads,
    make_rms_edge_inputs,
    make_sinkhorn_edge_inputs,
)

MAGIC = b"mhc-case-file-1\n"
DTYPES = {torch.float32: 1, torch.bfloat16: 2}
ELEMENT_SIZE = {1: 4, 2: 2}
NAN = {4: (0x7FFFFFFF, 0x7F800000, 0x7FC00000), 2: (0x7FFF, 0x7F80, 0x7FC0)}
"""Element size to the magnitude bits, infinity and canonical NaN of FP32 and BF16."""
FUNCTIONS = ("exp", "rsqrt", "sqrt", "sigmoid")

Tensors = Mapping[str, torch.Tensor]
Hashes = dict[str, dict[str, str]]


class VerifyError(Exception):
    """What went wrong, in one line for a person."""


@dataclass(frozen=True)
class Case:
    """One case for the driver: its kind, its name in the manifest, its input tensors."""

    kind: str
    name: str
    tensors: Tensors


def fixture_cases() -> Iterator[Case]:
    """The inputs of every case of the portable manifests."""
    for name, case in GOLDEN_CASES[PORTABLE_PROFILE].items():
        kind = "block" if case.trainability == "full" else f"block-{case.trainability}"
        yield Case(kind, name, _block_tensors(name))
        yield Case(f"{kind}-rsqrt-mean", f"{name} under {RELEASED_RMS}", _block_tensors(name))
    edges = make_sinkhorn_edge_inputs(PORTABLE_PROFILE)
    yield Case("hc_split_sinkhorn", SINKHORN_EDGES, dict(zip(("h", "dpre", "dpost", "dc"), edges, strict=True)))
    rows = make_rms_edge_inputs(numeric_profile=PORTABLE_PROFILE)
    yield Case("rmsnorm_residual", RMS_EDGES, dict(zip(("x", "gamma", "dy", "d_residual"), rows, strict=True)))


def write_cases(path: Path, cases: Sequence[Case]) -> None:
    """Write a case file."""
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<I", len(cases)))
        for case in cases:
            file.write(_text(case.kind) + _text(case.name) + struct.pack("<I", len(case.tensors)))
            for name, tensor in case.tensors.items():
                shape = struct.pack(f"<II{tensor.dim()}Q", DTYPES[tensor.dtype], tensor.dim(), *tensor.shape)
                file.write(_text(name) + shape + tensor_bytes(tensor))


def result_hashes(path: Path) -> Hashes:
    """Case, tensor name, SHA-256 of the elements, from a case file; ``VerifyError`` where it is not a whole one."""
    data, at = path.read_bytes(), len(MAGIC)

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise VerifyError(f"{path}: ends too early")
        at += size
        return data[at - size : at]

    def number(code: str = "<I") -> int:
        return int(struct.unpack(code, take(struct.calcsize(code)))[0])

    def text() -> str:
        return take(number()).decode()

    if data[:at] != MAGIC:
        raise VerifyError(f"{path}: not a case file")
    hashes: Hashes = {}
    for _ in range(number()):
        _, tensors = text(), hashes.setdefault(text(), {})
        for _ in range(number()):
            name, width = text(), ELEMENT_SIZE[number()]
            count = math.prod(number("<Q") for _ in range(number()))
            tensors[name] = hashlib.sha256(_one_nan(take(width * count), width)).hexdigest()
    if at != len(data):
        raise VerifyError(f"{path}: bytes left over after the last case")
    return hashes


def _one_nan(data: bytes, width: int) -> bytes:
    """The elements with every FP32 or BF16 NaN made the canonical one: processors make different ones."""
    if width not in NAN:
        return data
    magnitude, infinity, nan = NAN[width]
    bits = np.frombuffer(data, dtype=f"<u{width}").copy()
    bits[(bits & magnitude) > infinity] = nan
    return bits.tobytes()


def compare(found: Mapping[str, Mapping[str, str]], manifest: Manifest) -> tuple[str, list[str]]:
    """``"N of M hashes equal"``, and a line for each case in which a hash differs, is missing or is extra.

    M counts the hashes of both sides.
    """
    equal, total, lines = 0, 0, []
    golden = manifest["cases"]
    for case in sorted(golden.keys() | found.keys()):
        want, got = golden.get(case, {}), found.get(case, {})
        keys = sorted(want.keys() | got.keys())
        wrong = [key for key in keys if want.get(key) != got.get(key)]
        total, equal = total + len(keys), equal + len(keys) - len(wrong)
        if wrong:
            lines.append(f"{case}: {len(wrong)} of {len(keys)} differ: {', '.join(wrong)}")
    return f"{equal} of {total} hashes equal", lines


def torch_checksum(name: str, stride: int) -> int:
    """The checksum of the torch recipe's ``name`` over every ``stride``-th FP32 input, as the driver computes it."""
    function, total = getattr(for_profile(PORTABLE_PROFILE), name), 0
    inputs = np.arange(0, 2**32, stride, dtype=np.uint64)
    for part in np.array_split(inputs, max(1, inputs.size >> 20)):
        values = torch.from_numpy(part.astype(np.uint32).view(np.float32))
        outputs = function(values).numpy().view(np.uint32).astype(np.uint64)
        mixed = ((part * np.uint64(0x9E3779B97F4A7C15)) ^ outputs) * np.uint64(0xBF58476D1CE4E5B9)
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**64


def run_driver(driver: str, cases: Path, results: Path, stride: int) -> dict[str, str]:
    """Run ``driver`` (a shell-quoted command) on a case file; the checksums that it printed, by function."""
    command = [*shlex.split(driver), str(cases), str(results), *(["--stride", str(stride)] if stride else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise VerifyError(f"{driver}: cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        raise VerifyError(f"{driver}: exit status {done.returncode}: {done.stderr.strip() or 'no message'}")
    return dict(re.findall(r"^(\w+) +inputs +\d+  checksum ([0-9a-f]{16})$", done.stdout, flags=re.MULTILINE))


def verify(driver: str, cases: Path, manifest: Manifest, checksums: Mapping[str, str], stride: int) -> bool:
    """Run one driver, print what came of it, and say whether all is equal."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        printed = run_driver(driver, cases, results, stride)
        summary, lines = compare(result_hashes(results), manifest)
    for name, want in checksums.items():
        if printed.get(name) != want:
            lines.append(f"{name}: checksum {printed.get(name, 'missing')}, the torch recipe has {want}")
    functions = f"; {', '.join(checksums)} have the torch recipe's checksum" if checksums else ""
    print(f"{driver}: {summary}{functions if not lines else ''}")
    for line in lines:
        print(f"  {line}")
    return not lines


def main(argv: Sequence[str] | None = None) -> int:
    """Verify each driver; exit 0 where all is equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", action="append", required=True, help="the command that runs the driver")
    parser.add_argument("--manifest", type=Path, help="in the place of the committed one of P1's formula")
    parser.add_argument(
        "--stride", type=_stride, default=0, help="also run every N-th input of the elementary functions"
    )
    options = parser.parse_args(argv)
    say = _progress()
    try:
        manifest = published(options.manifest)
        say("drawing the inputs")
        with tempfile.TemporaryDirectory() as folder:
            cases = Path(folder) / "cases"
            write_cases(cases, list(fixture_cases()))
            say("running the torch recipe")
            names = FUNCTIONS if options.stride else ()
            checksums = {name: f"{torch_checksum(name, options.stride):016x}" for name in names}
            verdicts = []
            for driver in options.driver:
                say(f"running {driver}")
                verdicts.append(verify(driver, cases, manifest, checksums, options.stride))
    except (VerifyError, OSError, ValueError) as error:
        print(f"verify_portable: {error}", file=sys.stderr)
        return 1
    return 0 if all(verdicts) else 1


def published(path: Path | None) -> Manifest:
    """The hashes at ``path`` (default: the committed ones of P1's formula), and the committed ones of the other."""
    manifest = load_manifest(path, numeric_profile=PORTABLE_PROFILE)
    other = load_manifest(numeric_profile=PORTABLE_PROFILE, controller_rms=RELEASED_RMS)
    cases = {f"{name} under {RELEASED_RMS}": hashes for name, hashes in other["cases"].items()}
    return {**manifest, "cases": manifest["cases"] | cases}


def _block_tensors(name: str) -> Tensors:
    batch = make_batch(name, numeric_profile=PORTABLE_PROFILE)
    grads, controller = make_grads(name, batch), batch.controller
    tensors = {"r_old": batch.r_old, "y_sublayer": batch.y_sublayer, "gamma": batch.norm.gamma}
    tensors |= {key: getattr(controller, key) for key in ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias")}
    tensors |= {key: getattr(grads, key) for key in ("d_r_new", "d_normalized", "d_residual")}
    return tensors


def _text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def _stride(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a number of at least 1")
    return int(text)


def _progress() -> Callable[[str], None]:
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda message: print(f"verify_portable: {message} ...", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
