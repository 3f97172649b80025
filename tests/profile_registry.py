"""A registry of numeric profiles that a test may change, and installed packages that offer some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_engine.mhc import elementary, profiles
from rl_engine.mhc.operators import reference_operators
from rl_engine.mhc.profiles import ENTRY_POINT_GROUP

_installed: set[str] = set()


@contextmanager
def restored_registry() -> Iterator[None]:
    """What is registered, installed or cached within the block is forgotten after it."""
    registries = (profiles._REGISTRY, elementary._recipe_of_profile)
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, kept in zip(registries, before, strict=True):
            registry.clear()
            registry.update(kept)
        while _installed:
            sys.modules.pop(_installed.pop(), None)
        reference_operators.cache_clear()


def install(folder: Path, package: str, module: str, offered: dict[str, str]) -> None:
    """A package as pip leaves it: its module, and metadata with one entry point for each profile."""
    _installed.add(package)
    (folder / f"{package}.py").write_text(module, encoding="utf-8")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{ENTRY_POINT_GROUP}]", *(f"{name} = {target}" for name, target in offered.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
