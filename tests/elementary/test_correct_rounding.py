"""The portable recipe is correctly rounded: in C++ against __float128, in torch against C++.

`make verify-elementary` runs all 2^32 inputs; here every 64th runs, and the inputs nearest to a rounding boundary.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_engine.mhc.elementary import PORTABLE_PROFILE, for_profile

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "mhc" / "verify" / "verify_elementary.cpp"
HARDEST = Path(__file__).with_name("hardest_inputs.txt")
BUILDS = {"plain": ["-ffp-contract=off"], "fma": ["-mfma", "-ffp-contract=fast"]}
STRIDE, COARSE = 64, 4096

Key = tuple[str, str]


@dataclass(frozen=True)
class Line:
    inputs: int
    wrong: str
    checksum: int


def compiler() -> str:
    found = shutil.which("g++")
    assert found, "g++ (with libquadmath) is needed to verify the elementary functions: apt-get install g++"
    return found


def build(target: Path, *flags: str, source: Path = SOURCE) -> Path:
    include = str(ROOT / "csrc" / "mhc" / "include")
    command = [compiler(), "-std=c++20", "-O2", *flags, f"-I{include}", str(source), "-o", str(target)]
    subprocess.run([*command, "-lquadmath", "-lpthread"], check=True)
    return target


def verify(program: Path, *options: str) -> dict[Key, Line]:
    done = subprocess.run([str(program), *options], capture_output=True, text=True, check=False)
    assert done.stderr == "", done.stderr
    pattern = r"^(\w+) +(\w+) +inputs +(\d+)  wrong (\S+)  checksum ([0-9a-f]{16})$"
    rows = re.findall(pattern, done.stdout, flags=re.MULTILINE)
    lines = {(name, which): Line(int(n), wrong, int(total, 16)) for name, which, n, wrong, total in rows}
    assert done.returncode == int(any(line.wrong not in ("0", "-") for line in lines.values())), done.stdout
    return lines


def checksum(name: str, inputs: np.ndarray) -> int:
    """The checksum of verify_elementary over the torch recipe's results; `inputs` are uint32 encodings."""
    function, total = getattr(for_profile(PORTABLE_PROFILE), name), 0
    for part in np.array_split(inputs, max(1, inputs.size >> 20)):
        values = torch.from_numpy(part.view(np.float32).copy())
        outputs = function(values).numpy().view(np.uint32).astype(np.uint64)
        mixed = ((part.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ outputs) * np.uint64(0xBF58476D1CE4E5B9)
        total = (total + int(mixed.sum(dtype=np.uint64))) % 2**64
    return total


def every(stride: int) -> np.ndarray:
    return np.arange(0, 2**32, stride, dtype=np.uint64).astype(np.uint32)


def hardest(name: str) -> np.ndarray:
    words = [line.split() for line in HARDEST.read_text().splitlines()]
    return np.array([int(bits, 16) for function, bits in words if function == name], dtype=np.uint32)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("verify")
    return {name: build(folder / name, *flags) for name, flags in BUILDS.items()}


def test_recipes_are_correctly_rounded_and_torch_has_the_same_bits(programs: dict[str, Path]) -> None:
    lines = verify(programs["plain"], "--stride", str(STRIDE), "--hardest", str(HARDEST))
    for name in ("exp", "rsqrt"):
        assert lines[name, "sweep"] == Line(2**32 // STRIDE, "0", checksum(name, every(STRIDE)))
        assert lines[name, "hardest"] == Line(10_000, "0", checksum(name, hardest(name)))
    assert lines["sqrt", "sweep"].wrong == "0"


def test_an_fma_build_gives_the_same_bits(programs: dict[str, Path]) -> None:
    options = ("--stride", str(COARSE), "--hardest", str(HARDEST), "--no-reference")
    plain, fma = (verify(programs[name], *options) for name in BUILDS)
    assert plain == fma
    for name in ("exp", "rsqrt", "sqrt", "sigmoid"):
        assert plain[name, "sweep"].checksum == checksum(name, every(COARSE))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("exp", "const double series = 1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720));", "const double series = 0.0;"),
        ("rsqrt", "return round_once(hi, correction - (hi - y));", "return 1.0f / std::sqrt(value) + 0 * hi;"),
    ],
)
def test_a_recipe_that_is_less_exact_is_caught(tmp_path: Path, name: str, right: str, wrong: str) -> None:
    for header in (ROOT / "csrc" / "mhc" / "include" / "mhc").glob("*.hpp"):
        text = header.read_text()
        (tmp_path / "mhc").mkdir(exist_ok=True)
        (tmp_path / "mhc" / header.name).write_text(text.replace(right, wrong))
    assert wrong in (tmp_path / "mhc" / "elementary.hpp").read_text()
    program = build(tmp_path / "planted", f"-I{tmp_path}")
    lines = verify(program, "--stride", "65536", "--hardest", str(HARDEST))
    assert int(lines[name, "hardest"].wrong) > 0


def test_bad_options_are_refused(programs: dict[str, Path]) -> None:
    for options in (["--stride"], ["--nothing", "1"], ["--hardest", "no/such/file"]):
        done = subprocess.run([str(programs["plain"]), *options], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith("verify_elementary: ")
