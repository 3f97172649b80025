"""Saved batches and gradients: every bit comes back, and a write that fails leaves what was there."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.mhc import tensor_file
from rl_engine.mhc.bits import tensor_sha256
from rl_engine.mhc.contract import GradBoundary, ResidualBatch
from rl_engine.mhc.tensor_file import read_tensor_file, replace_file, write_tensor_file
from tests.operators.block_inputs import block_leaves, grad_leaves, make_block, with_leaves
from tests.operators.support import BF16, FP32, offset, strided, transposed
from tests.reference.bridge import from_bits

PACKAGE = Path(tensor_file.__file__).parent
SPECIAL32 = [0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFBFFFFF, 1, 0x80000001, 0x7F800000, 0xFF800000]


def raw(t: Tensor) -> tuple[str, tuple[int, ...], str]:
    return str(t.dtype), tuple(t.shape), tensor_sha256(t)


def batch_facts(batch: ResidualBatch) -> list[Any]:
    tensors = [raw(t) for t in (*block_leaves(batch).values(), batch.token_id)]
    return [tensors, batch.contract, batch.row_geometry, batch.weight_fingerprint]


def specials(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """NaN payloads, signed zeros, subnormals and infinities, again and again."""
    bits = [SPECIAL32[i % len(SPECIAL32)] for i in range(shape.numel())]
    if dtype == BF16:
        return from_bits([(v >> 16) | (v & 1) for v in bits], BF16).reshape(shape)
    return from_bits(bits).reshape(shape)


def special_batch(tokens: int, width: int, gamma_dtype: torch.dtype) -> tuple[ResidualBatch, GradBoundary]:
    batch, grads = make_block("special", tokens, width, gamma_dtype=gamma_dtype)
    changed = {name: specials(t.shape, t.dtype) for name, t in block_leaves(batch).items()}
    return with_leaves(batch, **changed).sealed(), GradBoundary(*(specials(t.shape, BF16) for t in grad_leaves(grads)))


@settings(max_examples=25)
@given(
    st.integers(0, 5),
    st.integers(1, 9),
    st.sampled_from([BF16, FP32]),
    st.integers(0, 99),
    st.booleans(),
    st.booleans(),
)
def test_a_batch_comes_back_bit_for_bit(
    tmp_path_factory: Any, tokens: int, width: int, gamma: torch.dtype, layer: int, seal: bool, odd: bool
) -> None:
    path = tmp_path_factory.mktemp("batch") / "b.safetensors"
    batch = special_batch(tokens, width, gamma)[0] if odd else make_block("saved", tokens, width, gamma_dtype=gamma)[0]
    contract = dataclasses.replace(batch.contract, layer_index=layer, trainability="mixer-frozen")
    geometry = "one-row" if tokens == 1 and odd else "packed"
    batch = dataclasses.replace(batch, contract=contract, weight_fingerprint="", row_geometry=geometry)
    batch = batch.sealed() if seal else batch
    batch.save(path)
    assert batch_facts(ResidualBatch.load(path)) == batch_facts(batch)
    assert os.listdir(path.parent) == [path.name]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.integers(0, 4), st.integers(1, 6), st.dictionaries(st.text(), JSON, max_size=3))
def test_gradients_come_back_bit_for_bit(
    tmp_path_factory: Any, tokens: int, width: int, metadata: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("grads") / "g.safetensors"
    batch, grads = special_batch(tokens, width, BF16)
    grads = dataclasses.replace(grads, metadata=metadata)
    grads.save(path, batch.contract)
    got = GradBoundary.load(path, batch.contract)
    got.validate(batch)
    assert [raw(t) for t in grad_leaves(got)] == [raw(t) for t in grad_leaves(grads)]
    assert got.metadata == metadata


@pytest.mark.parametrize("layout", [strided, transposed, offset])
def test_layouts_and_parameters_are_saved_as_their_values(layout: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    batch, grads = make_block("layouts", 3, 4)
    moved = with_leaves(batch, **{name: layout(t) for name, t in block_leaves(batch).items()})
    moved.controller.weight.requires_grad_()
    moved.save(tmp_path / "b")
    loaded = ResidualBatch.load(tmp_path / "b")
    assert batch_facts(loaded)[:2] == batch_facts(batch)[:2]
    assert not loaded.controller.weight.requires_grad
    assert all(t.is_contiguous() for t in block_leaves(loaded).values())
    GradBoundary(*map(layout, grad_leaves(grads))).save(tmp_path / "g")
    assert [raw(t) for t in grad_leaves(GradBoundary.load(tmp_path / "g"))] == [raw(t) for t in grad_leaves(grads)]


def test_views_of_one_storage_are_saved_apart(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=FP32)
    lazy = torch.complex(base, base).conj().imag
    tensors = {"a": base[:6], "b": base[3:9].view(2, 3), "c": base[::4], "d": base[0].expand(4), "e": lazy}
    tensors |= {"f": base.as_strided((3, 1), (2, 7)), "g": torch.empty(0, 3), "h": base[5]}
    write_tensor_file(tmp_path / "t", "views", tensors, {})
    got, labels = read_tensor_file(tmp_path / "t", "views", tensors)
    assert {name: raw(t) for name, t in got.items()} == {name: raw(t) for name, t in tensors.items()}
    assert labels == {"kind": "views"}


def test_loading_under_other_defaults(tmp_path: Path) -> None:
    batch, _ = make_block("defaults", 2, 3)
    batch.save(tmp_path / "b")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = ResidualBatch.load(tmp_path / "b")
    finally:
        torch.set_default_dtype(before)
    assert batch_facts(got) == batch_facts(batch)
    assert {t.device.type for t in block_leaves(got).values()} == {"cpu"}


# --- how it is written ---


def saved_grads(path: Path, note: str = "xxx") -> bytes:
    batch, grads = make_block("changed", 1, 1)
    dataclasses.replace(grads, metadata={"a": note}).save(path, batch.contract)
    return path.read_bytes()


@pytest.mark.parametrize("bad", [{"a": {1, 2}}, {"a": object()}, {"a": b"x"}, {"a": torch.zeros(1)}, {(1, 2): 3}])
def test_metadata_that_is_not_json_leaves_the_old_file(bad: dict[Any, Any], tmp_path: Path) -> None:
    data = saved_grads(tmp_path / "g")
    _, grads = make_block("not json", 1, 1)
    with pytest.raises((TypeError, ValueError)):
        dataclasses.replace(grads, metadata=bad).save(tmp_path / "g")
    assert (tmp_path / "g").read_bytes() == data
    assert os.listdir(tmp_path) == ["g"]


def test_metadata_that_json_would_lose_is_refused(tmp_path: Path) -> None:
    """Two keys that become one on disk: a part of the caller's data would be gone without a word."""
    _, grads = make_block("lossy", 1, 1)
    with pytest.raises((TypeError, ValueError)):
        dataclasses.replace(grads, metadata={1: "a", "1": "b"}).save(tmp_path / "g")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_failing_write_leaves_the_old_file_alone(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved_grads(tmp_path / "g")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os if step == "fsync" else Path, step, fail)
    with pytest.raises(OSError, match="no space left"):
        make_block("failing", 1, 1)[1].save(tmp_path / "g")
    monkeypatch.undo()
    assert (tmp_path / "g").read_bytes() == data
    assert os.listdir(tmp_path) == ["g"]


def test_writing_where_nothing_can_be(tmp_path: Path) -> None:
    batch, grads = make_block("nowhere", 1, 1)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "b", tmp_path / "folder"):
        for owner in (batch, grads):
            with pytest.raises(OSError):
                owner.save(path)
    assert sorted(os.listdir(tmp_path)) == ["folder"] and os.listdir(tmp_path / "folder") == []


def test_a_link_is_followed_and_a_pipe_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "real").read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        replace_file(tmp_path / "pipe", b"new")
    assert (tmp_path / "pipe").is_fifo() and sorted(os.listdir(tmp_path)) == ["link", "pipe", "real"]


def test_a_batch_that_is_not_valid_is_not_written(tmp_path: Path) -> None:
    batch, _ = make_block("invalid", 1, 2)
    with pytest.raises(ValueError, match="weight_fingerprint"):
        dataclasses.replace(batch, weight_fingerprint="0" * 64).save(tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_a_new_file_obeys_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved_grads(tmp_path / "g")
    finally:
        os.umask(before)
    assert (tmp_path / "g").stat().st_mode & 0o777 == 0o640


def test_nothing_in_the_package_unpickles() -> None:
    unsafe = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            assert not unsafe & set(names), f"{path.name} imports {names}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "torch.save", "np.load", "numpy.load"}, f"{path.name}: {called}"
