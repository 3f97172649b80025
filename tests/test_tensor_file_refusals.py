"""A saved file that was changed, cut, completed or written by somebody else is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_engine.mhc.contract import GradBoundary, LayerContract, ResidualBatch
from rl_engine.mhc.tensor_file import read_tensor_file, write_tensor_file
from tests.operators.block_inputs import grad_leaves, make_block
from tests.operators.support import FP32

# --- what was changed ---


def saved_grads(path: Path, note: str = "xxx") -> bytes:
    batch, grads = make_block("changed", 1, 1)
    dataclasses.replace(grads, metadata={"a": note}).save(path, batch.contract)
    return path.read_bytes()


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def accepted(path: Path, places: Iterable[int], changes: Callable[[int], set[int]]) -> list[tuple[int, int]]:
    """The single-byte changes of the file after which it still loads."""
    data, found = path.read_bytes(), []
    with path.open("r+b", buffering=0) as file:
        for index in places:
            old = data[index]
            for new in changes(old) - {old}:
                os.pwrite(file.fileno(), bytes([new]), index)
                with contextlib.suppress(ValueError):
                    GradBoundary.load(path)
                    found.append((index, new))
            os.pwrite(file.fileno(), bytes([old]), index)
    assert path.read_bytes() == data
    return found


def test_every_changed_byte_is_refused(tmp_path: Path) -> None:
    data = saved_grads(tmp_path / "g")
    flips = accepted(tmp_path / "g", range(len(data)), lambda old: {old ^ 1, old ^ 0x20, old ^ 0x80, old ^ 0xFF})
    assert flips == []
    assert accepted(tmp_path / "g", range(header_end(data)), lambda _: {*b'0 1"}\0\\e'}) == []


@pytest.mark.parametrize("note", ["", "x", "xx", "xxx", "xxxx", "xxxxx", "xxxxxx", "xxxxxxx"])
def test_changed_white_space_is_refused(note: str, tmp_path: Path) -> None:
    """A header is filled up with blanks, which a JSON parser does not see."""
    data = saved_grads(tmp_path / "g", note)
    end = header_end(data)
    assert accepted(tmp_path / "g", range(end - 8, end), lambda _: {*b"\t\n\r "}) == []


def test_every_truncation_and_any_surplus_is_refused(tmp_path: Path) -> None:
    data = saved_grads(tmp_path / "g")
    for bad in [*(data[:stop] for stop in range(len(data))), data + b"\0", b"\0" + data, data + data]:
        (tmp_path / "g").write_bytes(bad)
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / "g"))):
            GradBoundary.load(tmp_path / "g")


@pytest.mark.parametrize("leaf", ["r_old", "y_sublayer", "token_id", "controller.weight", "norm.gamma"])
def test_a_changed_tensor_of_a_batch_is_refused(leaf: str, tmp_path: Path) -> None:
    batch, _ = make_block("batch bytes", 2, 3)
    dataclasses.replace(batch, weight_fingerprint="").save(tmp_path / "b")
    data = (tmp_path / "b").read_bytes()
    end = header_end(data)
    start, stop = json.loads(data[8:end])[leaf]["data_offsets"]
    for place in (start, stop - 1):
        changed = bytearray(data)
        changed[end + place] ^= 1
        (tmp_path / "b").write_bytes(changed)
        with pytest.raises(ValueError, match="digest does not match"):
            ResidualBatch.load(tmp_path / "b")


# --- what is foreign ---


def batch_parts(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    names = ["r_old", "y_sublayer", "token_id", "norm.gamma"]
    names += [f"controller.{name}" for name in ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias")]
    return read_tensor_file(path, "rl_engine.mhc/residual-batch/v1", names)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    make_block("parts", 1, 2)[0].save(tmp_path / "b")
    return batch_parts(tmp_path / "b")


def rewrite(path: Path, tensors: dict[str, Tensor], labels: dict[str, str]) -> None:
    """A file with a right digest, as somebody who knows the format can write it."""
    write_tensor_file(path, labels["kind"], tensors, labels)


def test_a_missing_or_surplus_tensor_is_refused(tmp_path: Path, parts: Any) -> None:
    tensors, labels = parts
    for name in tensors:
        rewrite(tmp_path / "b", {k: t for k, t in tensors.items() if k != name}, labels)
        with pytest.raises(ValueError, match=f"missing tensors: {name}$"):
            ResidualBatch.load(tmp_path / "b")
    rewrite(tmp_path / "b", {**tensors, "more": torch.zeros(1)}, labels)
    with pytest.raises(ValueError, match=r"unexpected tensors: more$"):
        ResidualBatch.load(tmp_path / "b")


@pytest.mark.parametrize("label", ["contract", "row_geometry", "weight_fingerprint"])
def test_a_missing_label_is_refused(label: str, tmp_path: Path, parts: Any) -> None:
    tensors, labels = parts
    rewrite(tmp_path / "b", tensors, {k: v for k, v in labels.items() if k != label})
    with pytest.raises(ValueError, match=label):
        ResidualBatch.load(tmp_path / "b")


@pytest.mark.parametrize("contract", ["", "{", "null", "[]", "3", '"x"', "{}", '{"hidden": 2}'])
def test_a_contract_that_is_none_is_refused(contract: str, tmp_path: Path, parts: Any) -> None:
    tensors, labels = parts
    rewrite(tmp_path / "b", tensors, {**labels, "contract": contract})
    with pytest.raises(ValueError):
        ResidualBatch.load(tmp_path / "b")
    _, grads = make_block("parts", 1, 2)
    names = ("d_r_new", "d_normalized", "d_residual")
    kept = {"contract": contract, "metadata": "{}", "schema_version": "p1-mhc-layer-v1"}
    write_tensor_file(
        tmp_path / "g", "rl_engine.mhc/grad-boundary/v1", dict(zip(names, grad_leaves(grads), strict=True)), kept
    )
    if contract != "null":  # which says that none was given
        with pytest.raises(ValueError):
            GradBoundary.load(tmp_path / "g", LayerContract(hidden=2))


@pytest.mark.parametrize("label", ["contract", "metadata", "schema_version"])
def test_gradients_without_a_label_or_of_another_schema_are_refused(label: str, tmp_path: Path) -> None:
    batch, grads = make_block("labels", 1, 2)
    tensors = dict(zip(("d_r_new", "d_normalized", "d_residual"), grad_leaves(grads), strict=True))
    labels = {"schema_version": "p1-mhc-layer-v1", "contract": "null", "metadata": "{}"}
    kind = "rl_engine.mhc/grad-boundary/v1"
    write_tensor_file(tmp_path / "g", kind, tensors, labels)
    GradBoundary.load(tmp_path / "g", batch.contract).validate(batch)
    write_tensor_file(tmp_path / "g", kind, tensors, {k: v for k, v in labels.items() if k != label})
    with pytest.raises(ValueError, match=label):
        GradBoundary.load(tmp_path / "g")
    if label == "schema_version":
        write_tensor_file(tmp_path / "g", kind, tensors, {**labels, label: "p1-mhc-layer-v2"})
        with pytest.raises(ValueError, match=label):
            GradBoundary.load(tmp_path / "g")


def test_what_is_in_the_file_is_validated(tmp_path: Path, parts: Any) -> None:
    tensors, labels = parts
    rewrite(tmp_path / "b", {**tensors, "norm.gamma": tensors["norm.gamma"].to(FP32)}, labels)
    with pytest.raises(TypeError, match=r"norm.gamma"):
        ResidualBatch.load(tmp_path / "b")
    rewrite(tmp_path / "b", {**tensors, "controller.bias": tensors["controller.bias"] + 1}, labels)
    with pytest.raises(ValueError, match="weight_fingerprint"):
        ResidualBatch.load(tmp_path / "b")
    rewrite(tmp_path / "b", tensors, {**labels, "row_geometry": "ragged"})
    with pytest.raises(ValueError, match="row_geometry"):
        ResidualBatch.load(tmp_path / "b")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    batch, grads = make_block("kinds", 1, 2)
    batch.save(tmp_path / "b")
    grads.save(tmp_path / "g")
    save_file({"r_old": batch.r_old}, tmp_path / "foreign")
    (tmp_path / "text").write_text("hello, this is no tensor file at all")
    (tmp_path / "empty").write_bytes(b"")
    torch.save(batch.r_old, tmp_path / "pickle")
    with pytest.raises(ValueError, match=r"kind: got 'rl_engine.mhc/grad-boundary/v1'"):
        ResidualBatch.load(tmp_path / "g")
    with pytest.raises(ValueError, match=r"kind: got 'rl_engine.mhc/residual-batch/v1'"):
        GradBoundary.load(tmp_path / "b")
    for kind in (ResidualBatch, GradBoundary):
        with pytest.raises(ValueError, match="kind: got None"):
            kind.load(tmp_path / "foreign")
        for name in ("text", "empty", "pickle"):
            with pytest.raises(ValueError, match="not a readable safetensors file"):
                kind.load(tmp_path / name)
        with pytest.raises(FileNotFoundError):
            kind.load(tmp_path / "nowhere")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    for kind in (ResidualBatch, GradBoundary):
        with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
            kind.load(tmp_path)


def test_gradients_of_another_contract_are_refused(tmp_path: Path) -> None:
    batch, grads = make_block("other contract", 1, 2)
    grads.save(tmp_path / "g", batch.contract)
    for same in (None, batch.contract, dataclasses.replace(batch.contract, layer_index=9)):
        GradBoundary.load(tmp_path / "g", same)
    for other in (LayerContract(hidden=3), dataclasses.replace(batch.contract, trainability="mixer-frozen")):
        with pytest.raises(ValueError, match=f"contract: .*{other.fingerprint()}"):
            GradBoundary.load(tmp_path / "g", other)
    grads.save(tmp_path / "g")
    GradBoundary.load(tmp_path / "g", LayerContract(hidden=3))
