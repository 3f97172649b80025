"""The state of the process that a candidate shares with its judge, and must leave as it was."""

from __future__ import annotations

import os
from typing import Any

import torch

from rl_engine.mhc.float_mode import require_subnormals


def snapshot() -> dict[str, Any]:
    """Whatever a candidate could set that would reach somebody else's numbers: name to value."""
    return {
        "flushing of subnormals": _flushes(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "working folder": os.getcwd(),
    }


def changes(before: dict[str, Any]) -> list[str]:
    """``name: before -> after`` of all that is no longer as in ``before``."""
    return [f"{name}: {before[name]} -> {value}" for name, value in snapshot().items() if value != before[name]]


def restore(before: dict[str, Any]) -> None:
    """Put back what ``before`` had, so that the rest of the run is sound."""
    torch.set_flush_denormal(before["flushing of subnormals"])
    torch.set_default_dtype(before["default dtype"])
    torch.set_default_device(before["default device"])
    torch.set_grad_enabled(before["grad mode"])
    enabled, warn_only = before["deterministic algorithms"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.set_num_threads(before["threads"])
    torch.set_float32_matmul_precision(before["float32 matmul precision"])
    os.chdir(before["working folder"])


def _flushes() -> bool:
    try:
        require_subnormals()
    except RuntimeError:
        return True
    return False
