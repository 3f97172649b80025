"""The published hashes, the draws behind them, and the writing of a manifest."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.mhc import fixtures
from rl_engine.mhc.block import CONTROLLER_GRADS, GRAD_KEYS
from rl_engine.mhc.contract import ResidualBatch
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES
from tests.operators.block_inputs import block_leaves, grad_leaves
from tests.operators.support import BF16, FP32
from tests.reference.bridge import assert_same_tensor

COMMITTED = Path(__file__).parent / "fixtures" / "p1" / "golden_hashes.json"
CASES = {
    "one_row": (1, "one-row", "unfused", "full"),
    "packed_t16": (16, "packed", "unfused", "full"),
    "packed_t7_odd": (7, "packed", "unfused", "full"),
    "fused_pre_norm": (16, "packed", "fused-pre-norm", "full"),
    "mixer_frozen": (16, "packed", "unfused", "mixer-frozen"),
}
COUNTS = dict.fromkeys(CASES, 32) | {"mixer_frozen": 27, "sinkhorn_edges": 4, "rms_edges": 4}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return fixtures.golden_manifest()


# --- the manifest ---


def test_the_manifest_is_the_published_one(golden: dict[str, Any]) -> None:
    text = json.dumps(golden, indent=2, sort_keys=True) + "\n"
    assert text.encode() == COMMITTED.read_bytes()
    assert golden == fixtures.load_manifest() == fixtures.load_manifest(COMMITTED)
    assert fixtures.manifest_path() == COMMITTED


def test_its_header_and_counts(golden: dict[str, Any]) -> None:
    header = {key: value for key, value in golden.items() if key != "cases"}
    assert header == {
        "schema_version": "p1-mhc-layer-v1",
        "numeric_profile": "oracle-fp32-mhc-v1",
        "fixture_hidden": 128,
    }
    assert {name: len(hashes) for name, hashes in golden["cases"].items()} == COUNTS
    assert sum(COUNTS.values()) == 163 and len(COUNTS) == 7


def test_its_keys(golden: dict[str, Any]) -> None:
    boundaries = {*FORWARD_BOUNDARIES, *BACKWARD_BOUNDARIES, "r_new"}
    gradients = {f"grad.{key}" for key in GRAD_KEYS}
    withheld = {f"grad.{key}" for key in CONTROLLER_GRADS}
    for name in CASES:
        want = boundaries | gradients - (withheld if name == "mixer_frozen" else set())
        assert set(golden["cases"][name]) == want
    assert set(golden["cases"]["sinkhorn_edges"]) == {"pre", "post", "c", "grad.dh"}
    assert set(golden["cases"]["rms_edges"]) == {"y", "residual", "grad.dx", "grad.dgamma"}


def test_what_is_the_same_tensor_has_the_same_hash(golden: dict[str, Any]) -> None:
    for name in CASES:
        hashes = golden["cases"][name]
        assert hashes["r_new"] == hashes["post.r_new"]
        assert hashes["pre.hidden"] == hashes["norm.residual"]
        for key in ("dy_sublayer", "d_c", "d_post", "d_hidden", "d_gamma", "d_r_old"):
            assert hashes[f"bwd.{key}"] == hashes[f"grad.{key}"]
        assert len({hashes[f"bwd.d_stream{i}"] for i in range(4)}) == 4


def test_a_wide_gamma_moves_what_reads_it_and_no_more(golden: dict[str, Any]) -> None:
    """gamma enters the norm's output and its hidden gradient; from there PRE's part of the controller, and r_old."""
    back = {"grad.d_hidden", "bwd.d_hidden", "grad.d_r_old", "bwd.d_r_old", *(f"bwd.d_stream{i}" for i in range(4))}
    controller = {"grad.d_controller_weight", "grad.d_alpha_pre", "grad.d_bias"}
    want = {"rms_edges": {"y", "grad.dx"}, "sinkhorn_edges": set()}
    want |= {name: {"norm.normalized", *back, *controller} for name in CASES}
    want["mixer_frozen"] = {"norm.normalized", *back}
    wide = fixtures.golden_manifest("float32")
    moved = {
        name: {key for key, value in hashes.items() if wide["cases"][name][key] != value}
        for name, hashes in golden["cases"].items()
    }
    assert moved == want
    listed = fixtures.moved_hashes(golden, wide)
    assert listed == sorted(f"{name}/{key}" for name, keys in want.items() for key in keys)


# --- the draws ---


class Stream:
    """The draws as the specification words them, written again."""

    def __init__(self, name: str) -> None:
        seed = 2026 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32) * scale


def assert_tensors(got: list[Tensor], want: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_tensor(f"draw {index}", a, b)


@pytest.mark.parametrize("gamma", [BF16, FP32])
@pytest.mark.parametrize("name", CASES)
def test_the_draws_of_a_block(name: str, gamma: torch.dtype) -> None:
    tokens = CASES[name][0]
    draw, back = Stream(name), Stream(f"{name}.grad")
    want = [draw(tokens, 4, 128).to(BF16), draw(tokens, 128).to(BF16), draw(24, 512, scale=1 / 512**0.5)]
    want += [draw(1, scale=0.5) for _ in range(3)]
    want += [draw(24, scale=0.1), (1 + draw(128, scale=0.05)).to(gamma)]
    batch = fixtures.make_batch(name, gamma_dtype="float32" if gamma == FP32 else "bfloat16")
    assert_tensors(list(block_leaves(batch).values()), want)
    grads = [back(tokens, 4, 128).to(BF16), back(tokens, 128).to(BF16), back(tokens, 128, scale=0.25).to(BF16)]
    assert_tensors(grad_leaves(fixtures.make_grads(name, batch)), grads)
    assert batch.token_id.tolist() == [1000 + i for i in range(tokens)]


@pytest.mark.parametrize("name", CASES)
def test_the_contract_of_a_block(name: str) -> None:
    batch = fixtures.make_batch(name)
    contract = batch.contract
    assert contract == fixtures.make_contract(name)
    assert (batch.tokens, batch.row_geometry, contract.fusion_mode, contract.trainability) == CASES[name]
    assert (contract.hidden, contract.layer_index, contract.placement) == (128, 3, "replicated")
    assert batch.weight_fingerprint == batch.compute_weight_fingerprint() != ""
    batch.validate()
    assert list(fixtures.BLOCK_CASES) == list(CASES)


def test_the_draws_of_the_edges() -> None:
    row = [0.5, -0.5, 2, -2, 1, -1, 3, -3, 40, -40]
    rows = [[-30.0, -8.0, 8.0, 30.0] * 6, [0.0] * 8 + [0.75] * 16, [0.0] * 24, row + [0.0] * 14]
    back = Stream("sinkhorn_edges.grad")
    assert_tensors(
        list(fixtures.make_sinkhorn_edge_inputs()), [torch.tensor(rows), back(4, 4), back(4, 4), back(4, 4, 4)]
    )
    back, ramp = Stream("rms_edges.grad"), torch.linspace(-8, 8, 128)
    x = torch.stack([torch.zeros(128), torch.full((128,), 2.0**-12), torch.full((128,), 4.0), ramp]).to(BF16)
    gradients = [back(4, 128).to(BF16), back(4, 128, scale=0.25).to(BF16)]
    for name, dtype in (("bfloat16", BF16), ("float32", FP32)):
        gamma = (1 + Stream("rms_edges.gamma")(128, scale=0.05)).to(dtype)
        assert_tensors(list(fixtures.make_rms_edge_inputs(name)), [x, gamma, *gradients])


def test_the_draws_need_nothing_from_outside() -> None:
    want = block_leaves(fixtures.make_batch("packed_t7_odd"))
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = block_leaves(fixtures.make_batch("packed_t7_odd"))
            edges = [*fixtures.make_sinkhorn_edge_inputs(), *fixtures.make_rms_edge_inputs()]
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)
    assert_tensors(list(got.values()), list(want.values()))
    assert_tensors(edges, [*fixtures.make_sinkhorn_edge_inputs(), *fixtures.make_rms_edge_inputs()])


def test_an_unknown_case_or_gamma_is_refused() -> None:
    for call in (fixtures.make_contract, fixtures.make_batch):
        with pytest.raises(ValueError, match="case: got 'packed', want one of: one_row, packed_t16"):
            call("packed")
    with pytest.raises(ValueError, match="gamma_dtype"):
        fixtures.make_batch("one_row", gamma_dtype="float16")
    with pytest.raises(ValueError, match="gamma_dtype"):
        fixtures.make_rms_edge_inputs("float16")


# --- slices ---


@pytest.mark.parametrize(("start", "stop"), [(0, 16), (0, 1), (15, 16), (3, 9), (5, 5), (16, 16), (0, 0)])
def test_a_slice_keeps_its_rows(start: int, stop: int) -> None:
    batch = fixtures.make_batch("packed_t16")
    part = fixtures.slice_batch(batch, start, stop)
    part.validate()
    assert part.row_geometry == ("one-row" if stop - start == 1 else "packed")
    assert part.token_id.tolist() == [1000 + i for i in range(start, stop)]
    assert_same_tensor("r_old", part.r_old, batch.r_old[start:stop])
    assert_same_tensor("y", part.y_sublayer, batch.y_sublayer[start:stop])
    assert (part.controller, part.norm, part.contract) == (batch.controller, batch.norm, batch.contract)


def test_a_slice_of_one_row() -> None:
    batch = fixtures.make_batch("one_row")
    assert fixtures.slice_batch(batch, 0, 1).row_geometry == "one-row"
    empty = fixtures.slice_batch(batch, 1, 1)
    assert (empty.tokens, empty.row_geometry) == (0, "packed")
    empty.validate()
    assert isinstance(empty, ResidualBatch)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 17), (5, 4), (17, 17), (-3, -1)])
def test_a_slice_out_of_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"slice: got \[{start}, {stop}\), want 0 <= start <= stop <= 16"):
        fixtures.slice_batch(fixtures.make_batch("packed_t16"), start, stop)


# --- writing ---

MOVED = ["one_row/r_new", "packed_t16/gone", "rms_edges/y", "schema_version"]


@pytest.fixture
def written(golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The manifest, computed once for all writes."""
    monkeypatch.setattr(fixtures, "golden_manifest", lambda **_: copy.deepcopy(golden))
    return golden


def older(golden: dict[str, Any], path: Path) -> bytes:
    old = copy.deepcopy(golden)
    old["schema_version"] = "p0"
    old["cases"]["one_row"]["r_new"] = "0" * 64
    old["cases"]["packed_t16"]["gone"] = "1" * 64
    del old["cases"]["rms_edges"]["y"]
    path.write_text(json.dumps(old))
    return path.read_bytes()


def test_what_moved(written: dict[str, Any], tmp_path: Path) -> None:
    older(written, tmp_path / "m")
    old = fixtures.load_manifest(tmp_path / "m")
    assert fixtures.moved_hashes(old, written) == fixtures.moved_hashes(written, old) == MOVED
    assert fixtures.moved_hashes(written, written) == []


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_hashes_do_not_move_without_a_reason(written: dict[str, Any], tmp_path: Path, reason: str) -> None:
    before = older(written, tmp_path / "m")
    with pytest.raises(ValueError, match=f"4 hashes would move and no reason is given: {', '.join(MOVED)}"):
        fixtures.write_manifest(tmp_path / "m", reason=reason)
    assert (tmp_path / "m").read_bytes() == before
    assert os.listdir(tmp_path) == ["m"]


def test_with_a_reason_they_do(written: dict[str, Any], tmp_path: Path) -> None:
    older(written, tmp_path / "m")
    assert fixtures.write_manifest(tmp_path / "m", reason="another schema") == MOVED
    assert (tmp_path / "m").read_bytes() == COMMITTED.read_bytes()
    assert fixtures.write_manifest(tmp_path / "m") == []
    assert fixtures.write_manifest(tmp_path / "new" / "deep" / "m") == []
    assert (tmp_path / "new" / "deep" / "m").read_bytes() == COMMITTED.read_bytes()


def test_a_write_that_fails_leaves_the_old_manifest(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = older(written, tmp_path / "m")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        fixtures.write_manifest(tmp_path / "m", reason="any")
    monkeypatch.undo()
    assert (tmp_path / "m").read_bytes() == before
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("text", ["", "{", "\udcff", "[]", "3", "null", "{}", '{"cases": []}', '{"cases": {"a": []}}'])
def test_what_is_no_manifest_is_refused(
    written: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="not a "):
        fixtures.load_manifest(path)
    assert fixtures.main(["--write-manifest", "--path", str(path), "--reason", "x"]) == 1
    assert str(path) in capsys.readouterr().err
    assert path.read_bytes() == text.encode("utf-8", "surrogateescape")


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fixtures.load_manifest(tmp_path / "m")


def test_the_command(written: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fixtures.main([]) == 0
    assert capsys.readouterr().out == COMMITTED.read_text()
    path = tmp_path / "m"
    write = ["--write-manifest", "--path", str(path)]
    assert fixtures.main(write) == 0
    assert path.read_bytes() == COMMITTED.read_bytes()
    before = older(written, path)
    capsys.readouterr()
    assert fixtures.main(write) == 1
    out, err = capsys.readouterr()
    assert out == "" and all(key in err for key in (*MOVED, "--reason"))
    assert path.read_bytes() == before
    assert fixtures.main([*write, "--reason", "another schema"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("moved: ")] == [f"moved: {key}" for key in MOVED]
    assert err == "" and path.read_bytes() == COMMITTED.read_bytes()
    assert fixtures.main(["--write-manifest", "--path", str(tmp_path)]) == 1
    with pytest.raises(SystemExit) as stopped:
        fixtures.main(["--nonsense"])
    assert stopped.value.code == 2


def test_the_cases_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fixtures.BLOCK_CASES["one_row"].tokens = 2  # type: ignore[misc]
