"""Safetensors files that say what they are and notice a changed byte.

A file holds named tensors and string metadata. ``kind`` names what is stored, ``digest`` is a SHA-256 over the metadata
and every tensor's name, dtype, shape and bytes. Files are replaced atomically; tensors never go through pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from rl_engine.mhc.bits import tensor_sha256


def write_tensor_file(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write ``tensors`` (any layout and device) and ``metadata`` to ``path``, replacing it in one step."""
    from safetensors.torch import save

    stored = {name: t.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    labels = {**metadata, "kind": kind}
    labels["digest"] = _digest(stored, labels)
    replace_file(path, save(stored, metadata=labels))


def read_tensor_file(
    path: str | os.PathLike[str], kind: str, names: Iterable[str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read what ``write_tensor_file`` wrote: exactly the tensors ``names``, on the CPU, and the metadata.

    Raises ``FileNotFoundError``, or ``ValueError`` for a foreign file, another kind, a missing or surplus tensor,
    and any changed byte.
    """
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        raise ValueError(f"{os.fspath(path)}: a folder, want a file")
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            labels = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)}: not a readable safetensors file ({error})") from None
    if labels.get("kind") != kind:
        raise ValueError(f"{os.fspath(path)}: kind: got {labels.get('kind')!r}, want {kind!r}")
    if not _header_ends_in_blanks(path):
        raise ValueError(f"{os.fspath(path)}: header was changed after it was written")
    wanted = set(names)
    for problem, which in (("missing", wanted - set(tensors)), ("unexpected", set(tensors) - wanted)):
        if which:
            raise ValueError(f"{os.fspath(path)}: {problem} tensors: {', '.join(sorted(which))}")
    recorded = labels.pop("digest", None)
    if recorded != _digest(tensors, labels):
        raise ValueError(f"{os.fspath(path)}: digest does not match: the file was changed after it was written")
    return tensors, labels


def _header_ends_in_blanks(path: str | os.PathLike[str]) -> bool:
    """Whether blanks alone pad the header, as written: the digest covers what the header says, not its padding."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    return header.rstrip(b" ").endswith(b"}")


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Put ``data`` at ``path`` atomically: a reader sees the old file or the new one, never a part of either.

    A link is followed. What is there and is no regular file (a device, a pipe, a folder) is an ``OSError``.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise OSError(f"{os.fspath(path)}: not a regular file")
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _digest(tensors: Mapping[str, torch.Tensor], labels: Mapping[str, str]) -> str:
    described = [[name, str(t.dtype), list(t.shape), tensor_sha256(t)] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps([sorted(labels.items()), described]).encode()).hexdigest()
