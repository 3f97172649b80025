"""Checkpoints on disk: what is written, what is read back, and that nothing is left half done."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rl_engine.mhc.integrations.deepseek_v4 import (
    LAYOUTS,
    ModelParams,
    checkpoint,
    model_from_state_dict,
    read_checkpoint,
    write_checkpoint,
)
from tests.integrations.support import D, expected, model_bits, published, raw

SITE_BYTES = 4 * (24 * 4 * D + 24 + 3)
INDEX = "model.safetensors.index.json"


def a_model(layers: int = 2) -> ModelParams:
    return model_from_state_dict(expected("published", layers), "published")


def in_shards(folder: Path) -> Path:
    """A whole published checkpoint in three shards, one for each layer and one for the rest."""
    folder.mkdir()
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}, "c.safetensors": {}}
    for name, tensor in published().items():
        home = "a" if name.startswith("layers.0.") else "b" if name.startswith("layers.1.") else "c"
        shards[f"{home}.safetensors"][name] = tensor
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / INDEX).read_text())
    edit(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


# --- what comes back ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_file_there_and_back(layout: Any, tmp_path: Path) -> None:
    path = tmp_path / "mhc.safetensors"
    write_checkpoint(path, a_model(), layout)
    assert raw(load_file(path)) == raw(expected(layout))
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert model_bits(read_checkpoint(path, layout)) == model_bits(a_model())
    assert model_bits(read_checkpoint(tmp_path, layout)) == model_bits(a_model())
    first = path.read_bytes()
    write_checkpoint(path, read_checkpoint(path, layout), layout)
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == ["mhc.safetensors"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_there_and_back(layout: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_checkpoint(folder, a_model(), layout, max_shard_bytes=SITE_BYTES)
    index = json.loads((folder / INDEX).read_text())
    stored = {}
    for shard in sorted({*index["weight_map"].values()}):
        tensors = load_file(folder / shard)
        assert sum(t.nbytes for t in tensors.values()) <= SITE_BYTES
        assert all(index["weight_map"][name] == shard for name in tensors)
        stored |= tensors
    assert raw(stored) == raw(expected(layout))
    assert set(index["weight_map"]) == set(stored)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)] + [INDEX]
    assert model_bits(read_checkpoint(folder, layout)) == model_bits(a_model())
    assert model_bits(read_checkpoint(folder / INDEX, layout)) == model_bits(a_model())
    assert os.listdir(tmp_path) == ["out"]


@given(st.integers(4 * 24 * 4 * D, 5 * SITE_BYTES), st.integers(1, 3), st.sampled_from(LAYOUTS))
def test_any_maximum_gives_the_same_bytes(tmp_path_factory: Any, most: int, layers: int, layout: Any) -> None:
    folder = tmp_path_factory.mktemp("any") / "out"
    write_checkpoint(folder, a_model(layers), layout, max_shard_bytes=most)
    for shard in folder.glob("*.safetensors"):
        assert 0 < sum(t.nbytes for t in load_file(shard).values()) <= most
    assert model_bits(read_checkpoint(folder, layout)) == model_bits(a_model(layers))


def test_a_published_checkpoint_is_read_and_only_what_is_wanted(tmp_path: Path, monkeypatch: Any) -> None:
    folder, taken = in_shards(tmp_path / "v4"), list[str]()
    real = safetensors.safe_open

    class Recording:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = real(*args, **kwargs)

        def __enter__(self) -> Recording:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            taken.append(name)
            tensor: torch.Tensor = self.file.get_tensor(name)
            return tensor

    monkeypatch.setattr(safetensors, "safe_open", Recording)
    assert model_bits(read_checkpoint(folder, "published")) == model_bits(a_model())
    assert sorted(taken) == sorted(expected("published"))
    taken.clear()
    with pytest.raises(ValueError, match="a name of layout 'published', want layout 'megatron'"):
        read_checkpoint(folder, "megatron")
    assert taken == []


def test_what_was_read_outlives_the_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, a_model(), "published")
    model = read_checkpoint(path, "published")
    path.write_bytes(b"\0" * path.stat().st_size)
    assert model_bits(model) == model_bits(a_model())


def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    real, links = in_shards(tmp_path / "blobs"), tmp_path / "snapshot"
    links.mkdir()
    for file in real.iterdir():
        (links / file.name).symlink_to(file)
    assert model_bits(read_checkpoint(links, "published")) == model_bits(a_model())


def test_a_prefix_and_no_head(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, ModelParams(a_model().controllers, None), "megatron", prefix="module.decoder.")
    back = read_checkpoint(path, "megatron", prefix="module.decoder.")
    assert back.head is None and len(back.controllers) == 4
    with pytest.raises(ValueError, match=r"got prefix 'module\.decoder\.', want 'decoder\.'"):
        read_checkpoint(path, "megatron")


def test_parameters_of_any_memory_are_written(tmp_path: Path) -> None:
    tensors = {n: torch.nn.Parameter(t.t().contiguous().t()) for n, t in expected("published").items() if t.dim() == 2}
    model = model_from_state_dict({**expected("published"), **tensors}, "published")
    write_checkpoint(tmp_path / "x.safetensors", model, "huggingface")
    assert raw(load_file(tmp_path / "x.safetensors")) == raw(expected("huggingface"))


# --- what an index may not say ---


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "x\\a", "C:a", "a\0"]
)
def test_an_index_stays_in_its_folder(shard: str, tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    edit_index(folder, lambda m: m.update({"embed.weight": shard}))
    match = re.escape(f"weight_map['embed.weight']: got {shard!r}, want the bare name of a file beside it")
    with pytest.raises(ValueError, match=match):
        read_checkpoint(folder, "published")


def test_an_index_names_files_that_are_there(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    (folder / "b.safetensors").unlink()
    match = r"weight_map\['layers\.1\.attn\.wq_a\.weight'\]: got 'b\.safetensors', want a file that is there"
    with pytest.raises(ValueError, match=match):
        read_checkpoint(folder, "published")


def test_an_index_names_the_shard_that_has_the_tensor(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    edit_index(folder, lambda m: m.update({"hc_head_fn": "a.safetensors"}))
    match = r"^hc_head_fn: got it in c\.safetensors, want it in a\.safetensors \(weight_map of model"
    with pytest.raises(ValueError, match=match):
        read_checkpoint(folder, "published")


def test_an_index_names_no_tensor_that_is_nowhere(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    edit_index(folder, lambda m: m.update({"layers.2.hc_attn_fn": "a.safetensors"}))
    with pytest.raises(ValueError, match=r"^layers\.2\.hc_attn_fn: got it in no shard, want it in a\.safetensors"):
        read_checkpoint(folder, "published")


def test_an_index_leaves_no_tensor_out(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    edit_index(folder, lambda m: m.pop("hc_head_base"))
    with pytest.raises(ValueError, match=r"^hc_head_base: got it in c\.safetensors, want it in the weight_map"):
        read_checkpoint(folder, "published")


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    both = load_file(folder / "c.safetensors") | {"layers.0.hc_ffn_base": torch.zeros(24)}
    save_file(both, folder / "c.safetensors")
    match = r"^layers\.0\.hc_ffn_base: got it in a\.safetensors and in c\.safetensors, want it in one shard"
    with pytest.raises(ValueError, match=match):
        read_checkpoint(folder, "published")


def test_a_tensor_twice_in_the_index_is_named(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    text = (folder / INDEX).read_text().replace('"weight_map": {', '"weight_map": {"hc_head_fn": "a.safetensors", ')
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match="hc_head_fn: got it twice in the index, want it once"):
        read_checkpoint(folder, "published")


BROKEN_INDEX = {
    "no json": (b"{", "not a readable index"),
    "no text": (b"\xff\xfe{}x", "not a readable index"),
    "too deep": (b"[" * 100_000, "not a readable index"),
    "a list": (b"[]", "weight_map: got NoneType, want an object"),
    "no map": (b'{"metadata": {}}', "weight_map: got NoneType, want an object"),
    "a map of numbers": (b'{"weight_map": {"a": 1}}', r"weight_map\['a'\]: got int, want a file name"),
    "an empty map": (b'{"weight_map": {}}', "no mHC parameter, want those of layout 'published'"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN_INDEX.values(), ids=BROKEN_INDEX)
def test_a_broken_index_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path, "published")


# --- what is no checkpoint ---


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing: no such file or folder"):
        read_checkpoint(tmp_path / "nothing", "published")
    with pytest.raises(ValueError, match="layout: got 'hf', want one of"):
        read_checkpoint(tmp_path / "nothing", "hf")  # type: ignore[arg-type]


def test_a_folder_with_none_or_several(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got a folder with neither, want a"):
        read_checkpoint(tmp_path, "published")
    for name in "ab":
        write_checkpoint(tmp_path / f"{name}.safetensors", a_model(), "published")
    with pytest.raises(ValueError, match=r"got a\.safetensors, b\.safetensors, want one safetensors file or an index"):
        read_checkpoint(tmp_path, "published")
    for name in "cd":
        (tmp_path / f"{name}.safetensors.index.json").touch()
    with pytest.raises(ValueError, match=r"got c\.safetensors\.index\.json, d\..*, want one index$"):
        read_checkpoint(tmp_path, "published")


def test_a_file_that_is_no_safetensors_or_has_nothing_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, a_model(), "published")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"x\.safetensors: not a readable safetensors file"):
        read_checkpoint(path, "published")
    save_file({"embed.weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"x\.safetensors: no mHC parameter, want those of layout 'megatron'"):
        read_checkpoint(path, "megatron")


def test_a_wrong_tensor_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(expected("published") | {"hc_head_base": torch.zeros(4, dtype=torch.float8_e4m3fn)}, path)
    with pytest.raises(TypeError, match=r"^hc_head_base: got dtype torch\.float8_e4m3fn, want torch\.float32"):
        read_checkpoint(path, "published")
    save_file(expected("published") | {"layers.0.hc_attn_foo": torch.zeros(4)}, path)
    with pytest.raises(ValueError, match=r"^layers\.0\.hc_attn_foo: unknown, looks like an mHC parameter"):
        read_checkpoint(path, "published")


# --- writing is all or nothing ---


@pytest.mark.parametrize("fails_at", [1, 3, 6])
def test_a_failure_leaves_nothing_behind(fails_at: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Five shards and an index are written; each may be the one that the disk has no room for."""
    real, calls = checkpoint.replace_file, list[Path]()

    def full_disk(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == fails_at:
            raise OSError("no space left")
        real(path, data)

    monkeypatch.setattr(checkpoint, "replace_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path / "out", a_model(), "published", max_shard_bytes=SITE_BYTES)
    assert len(calls) == fails_at and os.listdir(tmp_path) == []


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def broken(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(path, a_model(), "published")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "v4")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for target in (folder, folder / "a.safetensors"):
        with pytest.raises(FileExistsError, match="already there, want a folder that is not there or is empty"):
            write_checkpoint(target, a_model(), "published", max_shard_bytes=10**6)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", a_model(), "published", max_shard_bytes=10**6)
    assert model_bits(read_checkpoint(tmp_path / "empty", "published")) == model_bits(a_model())


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "5GB"])
def test_a_maximum_is_a_positive_integer(most: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"max_shard_bytes: got {most!r}, want an integer of at least 1")):
        write_checkpoint(tmp_path / "out", a_model(), "published", max_shard_bytes=most)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^layers\.0\.hc_attn_fn: got 3072 bytes, want at most 3071 \(max_shard_bytes\)"
    ):
        write_checkpoint(tmp_path / "out", a_model(), "published", max_shard_bytes=3071)
    with pytest.raises(ValueError, match=r"want a file name that ends in \.safetensors, or max_shard_bytes"):
        write_checkpoint(tmp_path / "out", a_model(), "published")
    with pytest.raises(ValueError, match="model: no controller and no head, want at least one of them"):
        write_checkpoint(tmp_path / "x.safetensors", ModelParams({}, None), "published")
    with pytest.raises(TypeError, match="model: got dict, want ModelParams"):
        write_checkpoint(tmp_path / "x.safetensors", {}, "published")  # type: ignore[arg-type]
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(OSError, match=r"d\.safetensors: not a regular file"):
        write_checkpoint(tmp_path / "d.safetensors", a_model(), "published")
    assert os.listdir(tmp_path) == ["d.safetensors"]
