"""The golden hashes of the portable profile: on every code path of torch, at any number of threads, in any memory."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.mhc import fixtures
from rl_engine.mhc.acceptance.judge import run_block
from rl_engine.mhc.acceptance.origin import golden_check
from rl_engine.mhc.block import CONTROLLER_GRADS, GRAD_KEYS
from rl_engine.mhc.contract import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES
from tests.elementary.golden_process import CASES, THREADS, avx2_supported, avx512_supported

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "tests" / "fixtures" / "p1" / "golden_hashes_portable.json"
EDGES = {"sinkhorn_edges": {"pre", "post", "c", "grad.dh"}, "rms_edges": {"y", "residual", "grad.dx", "grad.dgamma"}}


def committed() -> dict[str, Any]:
    return fixtures.load_manifest(COMMITTED)


# --- the hashes ---


# torch obeys a request that the processor cannot serve and dies of it, so the levels are those that can run, and the
# names of these tests say which did.
LEVELS = ("default", *(["avx2"] if avx2_supported() else []), *(["avx512"] if avx512_supported() else []))


@pytest.mark.parametrize("level", LEVELS)
def test_every_code_path_of_torch_gives_the_committed_hashes(level: str) -> None:
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": level}
    command = [sys.executable, "-m", "tests.elementary.golden_process"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["capability"] == level.upper()
    assert list(told["manifests"]) == [str(count) for count in THREADS]
    for count, manifest in told["manifests"].items():
        assert fixtures.moved_hashes(committed(), manifest) == [], f"{count} threads"


def test_the_oracle_profile_has_its_published_ones_still() -> None:
    check = golden_check(torch.device("cpu"), ORACLE_PROFILE)
    assert (check.status, check.detail) == ("pass", "163 of 163 hashes")


def test_the_committed_file_is_as_it_is_written() -> None:
    text = json.dumps(committed(), indent=2, sort_keys=True) + "\n"
    assert text.encode() == COMMITTED.read_bytes()
    assert fixtures.manifest_path(PORTABLE_PROFILE) == COMMITTED


def test_header_cases_and_keys() -> None:
    manifest = committed()
    assert {key: value for key, value in manifest.items() if key != "cases"} == {
        "schema_version": "p1-mhc-layer-v1",
        "numeric_profile": "portable-fp32-mhc-v1",
        "fixture_hidden": 128,
    }
    every = {*FORWARD_BOUNDARIES, *BACKWARD_BOUNDARIES, "r_new", *(f"grad.{key}" for key in GRAD_KEYS)}
    want = {name: every for name in CASES} | EDGES
    want["mixer_frozen"] = every - {f"grad.{key}" for key in CONTROLLER_GRADS}
    assert {name: set(hashes) for name, hashes in manifest["cases"].items()} == want
    assert sum(map(len, want.values())) == 13 * 32 + 27 + 2 * 4 == 451
    digests = [value for hashes in manifest["cases"].values() for value in hashes.values()]
    assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)


@pytest.mark.parametrize("name", CASES)
def test_the_contract_of_a_case(name: str) -> None:
    contract = fixtures.make_contract(name, numeric_profile=PORTABLE_PROFILE)
    batch = fixtures.make_batch(name, numeric_profile=PORTABLE_PROFILE)
    modes = (contract.fusion_mode, contract.trainability, contract.gamma_dtype)
    assert (batch.tokens, contract.hidden, batch.row_geometry, *modes) == CASES[name]
    assert (contract.numeric_profile, contract.layer_index) == (PORTABLE_PROFILE, 3)
    assert batch.contract == contract
    batch.validate()
    assert batch.weight_fingerprint == batch.compute_weight_fingerprint() != ""
    assert str(batch.norm.gamma.dtype) == f"torch.{contract.gamma_dtype}"


def test_nothing_is_nan_but_one_gradient_row() -> None:
    spoiled = {}
    for name in CASES:
        batch = fixtures.make_batch(name, numeric_profile=PORTABLE_PROFILE)
        for key, value in run_block(None, batch, fixtures.make_grads(name, batch)).tensors.items():
            if value is not None and value.isnan().any():
                spoiled[name, key] = sorted(set(value.isnan().nonzero()[:, 0].tolist()))
    gradients = ["bwd.d_r_old", *(f"bwd.d_stream{i}" for i in range(4))]
    assert spoiled == {("extreme_rows", key): [1] for key in gradients}


# --- writing ---


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The manifest, as if computed."""
    monkeypatch.setattr(fixtures, "golden_manifest", lambda **_: copy.deepcopy(committed()))
    return committed()


def test_hashes_move_for_a_reason_only(computed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m"
    computed["cases"]["pro_width"]["r_new"] = "0" * 64
    path.write_text(json.dumps(computed))
    before = path.read_bytes()
    for reason in ("", " \n"):
        with pytest.raises(ValueError, match="no reason is given: pro_width/r_new"):
            fixtures.write_manifest(path, numeric_profile=PORTABLE_PROFILE, reason=reason)
        assert path.read_bytes() == before
    moved = fixtures.write_manifest(path, numeric_profile=PORTABLE_PROFILE, reason="a test")
    assert moved == ["pro_width/r_new"]
    assert path.read_bytes() == COMMITTED.read_bytes()
    assert fixtures.write_manifest(path, numeric_profile=PORTABLE_PROFILE) == []


def test_another_profile_is_never_overwritten_by_accident(computed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(fixtures.manifest_path(ORACLE_PROFILE).read_bytes())
    with pytest.raises(ValueError, match=r"no reason is given: .*numeric_profile"):
        fixtures.write_manifest(path, numeric_profile=PORTABLE_PROFILE)
    assert path.read_bytes() == fixtures.manifest_path(ORACLE_PROFILE).read_bytes()


def test_the_command(computed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fixtures.main(["--profile", PORTABLE_PROFILE]) == 0
    assert capsys.readouterr().out == COMMITTED.read_text()
    path, write = tmp_path / "m", ["--profile", PORTABLE_PROFILE, "--write-manifest", "--path"]
    assert fixtures.main([*write, str(path)]) == 0
    assert path.read_bytes() == COMMITTED.read_bytes()
    path.write_text(path.read_text().replace('"r_new": "', '"r_new": "0', 1))
    capsys.readouterr()
    assert fixtures.main([*write, str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "/r_new" in err and "--reason" in err
    with pytest.raises(SystemExit):
        fixtures.main(["--profile", "misspelt"])


@pytest.mark.parametrize("call", [fixtures.manifest_path, lambda name: fixtures.golden_manifest(numeric_profile=name)])
def test_a_profile_without_goldens_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="'misspelt' has no golden cases, want one of: oracle-fp32-mhc-v1, portable-"):
        call("misspelt")


def test_the_cases_are_the_listed_ones() -> None:
    assert list(fixtures.GOLDEN_CASES[PORTABLE_PROFILE]) == list(CASES)
    assert list(fixtures.GOLDEN_CASES[ORACLE_PROFILE]) == list(CASES)[:5]
    with pytest.raises(dataclasses.FrozenInstanceError):
        fixtures.GOLDEN_CASES[PORTABLE_PROFILE]["pro_width"].tokens = 3  # type: ignore[misc]
