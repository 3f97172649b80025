"""A plain C++ block, written from the contract alone, gives the golden hashes of the portable profile.

`make verify-arm` runs the same program on an emulated aarch64.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rl_engine.mhc.elementary import PORTABLE_PROFILE
from rl_engine.mhc.fixtures import load_manifest

ROOT = Path(__file__).resolve().parents[2]
VERIFY = ROOT / "csrc" / "mhc" / "verify"
INCLUDE = ROOT / "csrc" / "mhc" / "include"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_portable", VERIFY / "verify_portable.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


def build(target: Path, *flags: str) -> Path:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to verify the portable profile in C++: apt-get install g++"
    sources = sorted(map(str, VERIFY.glob("portable_*.cpp")))
    command = [compiler, "-std=c++20", "-O2", "-ffp-contract=off", *flags, f"-I{INCLUDE}", *sources]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("portable") / "portable_driver")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "cases"
    script.write_cases(path, list(script.fixture_cases()))
    return path


def run(driver: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(driver), *map(str, arguments)], capture_output=True, text=True, check=False)


def verdict(driver: Path, cases: Path, results: Path) -> tuple[str, list[str]]:
    done = run(driver, cases, results)
    assert done.returncode == 0, done.stderr
    summary, lines = script.compare(script.result_hashes(results), script.published(None))
    assert isinstance(summary, str) and isinstance(lines, list)
    return summary, lines


def test_every_hash_and_checksum_is_equal(driver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = script.main(["--driver", str(driver), "--stride", "65536"])
    told = capsys.readouterr()
    assert told.out == (
        f"{driver}: 894 of 894 hashes equal; exp, rsqrt, sqrt, sigmoid have the torch recipe's checksum\n"
    )
    assert (status, told.err) == (0, "")


def test_another_reduction_tree_is_caught(tmp_path: Path, cases: Path) -> None:
    right, wrong = "(term(0) + term(1)) + (term(2) + term(3))", "((term(0) + term(1)) + term(2)) + term(3)"
    text = (INCLUDE / "mhc" / "reduction.hpp").read_text()
    assert text.count(right) == 1
    (tmp_path / "mhc").mkdir()
    (tmp_path / "mhc" / "reduction.hpp").write_text(text.replace(right, wrong))
    planted = build(tmp_path / "planted", "-O0", f"-I{tmp_path}")
    summary, lines = verdict(planted, cases, tmp_path / "results")
    assert summary != "894 of 894 hashes equal"
    assert any(line.startswith("packed_t16: ") and "bwd.dy_sublayer" in line for line in lines)


def test_a_flipped_input_byte_is_caught(tmp_path: Path, driver: Path, cases: Path) -> None:
    data = bytearray(cases.read_bytes())
    # The last tensor of the last case: d_residual of rms_edges.
    data[-1] ^= 0x80
    flipped = tmp_path / "flipped"
    flipped.write_bytes(data)
    summary, lines = verdict(driver, flipped, tmp_path / "results")
    assert (summary, lines) == ("893 of 894 hashes equal", ["rms_edges: 1 of 4 differ: grad.dx"])


def test_a_wrong_and_a_missing_hash_are_caught(
    tmp_path: Path, driver: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = load_manifest(numeric_profile=PORTABLE_PROFILE)
    manifest["cases"]["one_row"]["split.c"] = "0" * 64
    del manifest["cases"]["pro_width"]["r_new"]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest))
    status = script.main(["--driver", str(driver), "--manifest", str(path)])
    assert capsys.readouterr().out.splitlines() == [
        f"{driver}: 892 of 894 hashes equal",
        "  one_row: 1 of 32 differ: split.c",
        "  pro_width: 1 of 32 differ: r_new",
    ]
    assert status == 1


def test_a_bad_input_file_is_refused(tmp_path: Path, driver: Path, cases: Path) -> None:
    data, bad, results = cases.read_bytes(), tmp_path / "bad", tmp_path / "results"
    for content, words in {
        data[:40000]: "the file ends too early",
        data + b"x": "bytes left over",
        b"x" * 100: "not a case file",
        data.replace(b"y_sublayer", b"n_sublayer", 1): "one_row: y_sublayer: missing",
        data.replace(b"rmsnorm_residual", b"rmsnorm_recidual", 1): "unknown kind 'rmsnorm_recidual'",
    }.items():
        bad.write_bytes(content)
        done = run(driver, bad, results)
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert done.stderr.startswith("portable_driver: ") and done.stderr.count("\n") == 1
    assert not results.exists()
    for arguments in ([tmp_path / "absent", results], [], [cases, results, "--stride", "0"]):
        assert run(driver, *arguments).returncode == 2


def test_a_driver_that_fails_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in {"false": "exit status 1: no message", "no/such/driver": "cannot be started"}.items():
        assert script.main(["--driver", command]) == 1
        assert words in capsys.readouterr().err
