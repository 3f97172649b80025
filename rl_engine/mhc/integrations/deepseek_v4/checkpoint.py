"""The mHC parameters of a DeepSeek-V4 checkpoint: safetensors in one file, or in shards with an index.

Reading looks at the header of every file and at the data of the wanted tensors alone. Writing puts a file or a whole
folder in place in one step. The index is the usual one: ``weight_map`` says which file holds which tensor.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rl_engine.mhc.integrations.deepseek_v4.names import Layout, default_prefix, is_mhc_name
from rl_engine.mhc.integrations.deepseek_v4.state_dict import ModelParams, model_from_state_dict, state_dict_of
from rl_engine.mhc.tensor_file import replace_file

_INDEX_SUFFIX = ".safetensors.index.json"
_INDEX_NAME = "model" + _INDEX_SUFFIX


def read_checkpoint(path: str | os.PathLike[str], layout: Layout, prefix: str | None = None) -> ModelParams:
    """The controllers and the head of a checkpoint, FP32, on the CPU, independent of the files.

    ``path`` is a safetensors file, a ``*.safetensors.index.json`` with its shards beside it, or a folder that holds
    one index, or else one safetensors file. Other tensors are not read. ``head`` is None where the checkpoint has none.

    Raises ``FileNotFoundError`` for no such path; ``ValueError`` for a folder without a checkpoint or with several, an
    unreadable file, an index that names a file that is not there, lies elsewhere or lacks the tensor, a tensor that is
    in several shards or not in the index, no layer and no head at all; and what ``model_from_state_dict`` raises.
    """
    default_prefix(layout)
    file = _locate(Path(path))
    with ExitStack() as stack:
        tensors = _sharded(file, stack) if file.name.endswith(".json") else _Lazy(_opened(file, stack))
        model = model_from_state_dict(tensors, layout, prefix)
    if not model.controllers and model.head is None:
        raise ValueError(f"{os.fspath(path)}: no mHC parameter, want those of layout {layout!r}")
    return model


def write_checkpoint(
    path: str | os.PathLike[str],
    model: ModelParams,
    layout: Layout,
    prefix: str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write the parameters under the names of ``layout``, in one step: a reader sees all of it or nothing of it.

    Without ``max_shard_bytes``, ``path`` is a file and is replaced; its name ends in ``.safetensors``. With it,
    ``path`` is a folder that is not there yet or is empty, and gets shards of at most so many bytes of tensors, filled
    in the order of the layers, and ``model.safetensors.index.json``.

    Raises ``TypeError`` for another model; ``ValueError`` for another file name, no parameters at all, a maximum that
    is no positive integer, and a tensor larger than it; ``FileExistsError`` for a folder that holds something;
    ``OSError`` for a path that is no regular file; and what ``state_dict_of`` raises.
    """
    if not isinstance(model, ModelParams):
        raise TypeError(f"model: got {type(model).__name__}, want ModelParams")
    tensors = state_dict_of(model.controllers, model.head, layout, prefix)
    if not tensors:
        raise ValueError("model: no controller and no head, want at least one of them")
    if max_shard_bytes is None:
        if not Path(path).name.endswith(".safetensors"):
            raise ValueError(f"{os.fspath(path)}: want a file name that ends in .safetensors, or max_shard_bytes")
        replace_file(path, _encoded(tensors))
        return
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: got {max_shard_bytes!r}, want an integer of at least 1")
    _write_folder(Path(path).resolve(), _in_shards(tensors, max_shard_bytes))


# --- reading ---


class _Lazy(Mapping[str, torch.Tensor]):
    """Tensors by name, each read from its open file when it is asked for, into memory of its own."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{name}: not a readable tensor ({error})") from None
        return tensor.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _locate(path: Path) -> Path:
    """The index or the safetensors file that ``path``, which may be a folder, means."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        return path
    for kind, pattern in (("index", f"*{_INDEX_SUFFIX}"), ("safetensors file", "*.safetensors")):
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            more = "" if kind == "index" else " or an index"
            raise ValueError(f"{path}: got {', '.join(f.name for f in found)}, want one {kind}{more}")
        if found:
            return found[0]
    raise ValueError(f"{path}: got a folder with neither, want a *{_INDEX_SUFFIX} or a *.safetensors file")


def _opened(file: Path, stack: ExitStack) -> dict[str, Any]:
    """The mHC names in ``file``, each with the handle that reads it."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = stack.enter_context(safe_open(os.fspath(file), framework="pt", device="cpu"))
    except SafetensorError as error:
        raise ValueError(f"{file}: not a readable safetensors file ({error})") from None
    return {name: handle for name in handle.keys() if is_mhc_name(name)}  # noqa: SIM118


def _sharded(index: Path, stack: ExitStack) -> _Lazy:
    """The mHC tensors of every shard that ``index`` names, after both have said the same about each."""
    mapped = _weight_map(index)
    handles, homes = dict[str, Any](), dict[str, str]()
    for shard in sorted(set(mapped.values())):
        for name, handle in _opened(index.parent / shard, stack).items():
            if name in homes:
                raise ValueError(f"{name}: got it in {homes[name]} and in {shard}, want it in one shard")
            handles[name], homes[name] = handle, shard
    for name in filter(is_mhc_name, mapped):
        if homes.get(name) != mapped[name]:
            found = f"got it in {homes[name]}" if name in homes else "got it in no shard"
            raise ValueError(f"{name}: {found}, want it in {mapped[name]} (weight_map of {index.name})")
    for name, shard in homes.items():
        if name not in mapped:
            raise ValueError(f"{name}: got it in {shard}, want it in the weight_map of {index.name} as well")
    return _Lazy(handles)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to the name of a file that lies beside ``index``."""
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_without_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{index}: not a readable index ({error})") from None
    mapped = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(mapped, dict):
        raise ValueError(f"{index}: weight_map: got {type(mapped).__name__}, want an object of tensor to file name")
    there = dict[str, bool]()
    for name, shard in mapped.items():
        if not isinstance(shard, str):
            raise ValueError(f"{index}: weight_map[{name!r}]: got {type(shard).__name__}, want a file name")
        # Only the name is looked at: in a download cache a shard is a link to a folder elsewhere.
        if shard in {"", ".", ".."} or any(c in shard for c in "/\\:\0"):
            raise ValueError(f"{index}: weight_map[{name!r}]: got {shard!r}, want the bare name of a file beside it")
        if shard not in there:
            there[shard] = (index.parent / shard).is_file()
        if not there[shard]:
            raise ValueError(f"{index}: weight_map[{name!r}]: got {shard!r}, want a file that is there")
    return mapped


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice}: got it twice in the index, want it once")
    return found


# --- writing ---


def _encoded(tensors: Mapping[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    stored = {name: t.to("cpu").clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return save(stored, metadata={"format": "pt"})


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_shards(tensors: Mapping[str, torch.Tensor], most: int) -> list[dict[str, torch.Tensor]]:
    """The tensors in order, a new shard wherever the next one would not fit."""
    shards, used = [dict[str, torch.Tensor]()], 0
    for name, tensor in tensors.items():
        size = _bytes_of(tensor)
        if size > most:
            raise ValueError(f"{name}: got {size} bytes, want at most {most} (max_shard_bytes)")
        if used + size > most:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    return shards


def _write_folder(target: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: already there, want a folder that is not there or is empty")
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        weight_map = dict[str, str]()
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            replace_file(temporary / name, _encoded(shard))
            weight_map |= dict.fromkeys(shard, name)
        size = sum(_bytes_of(tensor) for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        replace_file(temporary / _INDEX_NAME, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
