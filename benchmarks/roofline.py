"""What this machine can do at most: unfused multiply + add, a chain of dependent adds, a copy through memory.

Measured by the native library's own probes, interleaved with what is held against them. A limit is the best that was
seen in the whole run, while times are medians: on a busy machine shares come out too low. A strict fold may not be
split, so one row's projection takes at least K dependent additions; many rows are bound by the multiply + add peak, and
the stream operators by the copy bandwidth.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

LIBRARY = "rl_engine.mhc.backends.native.library"
PEAK, CHAIN, COPY = "multiply+add", "dependent add", "copy"
PEAK_STEPS, CHAIN_STEPS, COPY_BYTES = 1 << 20, 1 << 22, 128 << 20


@dataclass(frozen=True)
class Roofline:
    """``peak_gflops`` over all threads; ``copy_gbs`` counts what is read and what is written."""

    isa: str
    threads: int
    peak_gflops: float
    add_ns: float
    copy_gbs: float


class Probes:
    """The three probes as calls, and what their seconds mean. Whatever keeps the library from loading is raised."""

    def __init__(self, threads: int, copy_bytes: int = COPY_BYTES) -> None:
        native: Any = importlib.import_module(LIBRARY)
        lib = native.load()
        self.threads, self.isa = threads, str(native.isa_level(lib))
        call = native.Call(native.ABI_VERSION, native.ISA_LEVELS.index(self.isa), threads, 0)
        self._operations = int(lib.mhc_probe_multiply_add(ctypes.byref(call), PEAK_STEPS))
        if self._operations <= 0:
            raise RuntimeError(f"mhc_probe_multiply_add: status {-self._operations}")
        self._copy_bytes = copy_bytes
        self._buffers = torch.ones(copy_bytes, dtype=torch.uint8), torch.zeros(copy_bytes, dtype=torch.uint8)
        source, target = (t.data_ptr() for t in self._buffers)
        self.calls: dict[str, Callable[[], Any]] = {
            PEAK: lambda: lib.mhc_probe_multiply_add(ctypes.byref(call), PEAK_STEPS),
            CHAIN: lambda: lib.mhc_probe_add_chain(CHAIN_STEPS),
            COPY: lambda: lib.mhc_probe_copy(ctypes.byref(call), copy_bytes, source, target),
        }

    def roofline(self, seconds: Mapping[str, float]) -> Roofline:
        """The limits that the fastest seconds of each call show."""
        return Roofline(
            isa=self.isa,
            threads=self.threads,
            peak_gflops=self._operations * self.threads / seconds[PEAK] / 1e9,
            add_ns=seconds[CHAIN] / CHAIN_STEPS * 1e9,
            copy_gbs=2 * self._copy_bytes / seconds[COPY] / 1e9,
        )


def best(known: Roofline | None, found: Roofline) -> Roofline:
    """The higher of each limit: what a machine did once, it can do."""
    if known is None:
        return found
    return replace(
        found,
        peak_gflops=max(known.peak_gflops, found.peak_gflops),
        add_ns=min(known.add_ns, found.add_ns),
        copy_gbs=max(known.copy_gbs, found.copy_gbs),
    )
