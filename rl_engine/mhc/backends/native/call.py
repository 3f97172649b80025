"""One call into the library: tensors in as pointers, a status out as an exception.

What the kernels take is row-contiguous CPU memory. A tensor that lies otherwise is copied first, so every layout
gives the bytes of its contiguous copy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_engine.mhc.backends.native import library, memory
from rl_engine.mhc.elementary import Elementary

MHC_FP32, MHC_BF16 = 0, 1
ONE_THREAD_BELOW = 1 << 15
"""Elements from which ATen spreads a copy, and most functions, over its OpenMP threads."""

_EXP, _SIGMOID, _RSQRT, _SQRT = range(4)
_STATUS = {1: "another version of the interface", 2: "this instruction set is not there", 3: "a bad argument"}
_NO_MEMORY = 4


RowsTriple = tuple[int, int, int]
"""Address, elements from one row to the next, dtype: the fields of ``struct mhc_rows``."""

NO_ROWS: RowsTriple = (0, 0, 0)


class Native:
    """The loaded library at one instruction-set level."""

    def __init__(self) -> None:
        """Load the library; ``NativeBackendUnavailable`` where it is not there."""
        self.functions = library.load()
        self.isa_name = library.isa_level(self.functions)
        self._isa = library.ISA_LEVELS.index(self.isa_name)

    def run(self, function: str, *arguments: Any) -> None:
        """Call ``function`` on at most ``torch.get_num_threads()`` threads, the GIL released.

        ``MemoryError`` where scratch memory cannot be had, ``RuntimeError`` for any other status but success.
        """
        call = library.Call(library.ABI_VERSION, self._isa, max(1, torch.get_num_threads()), 0)
        status = getattr(self.functions, function)(call, *arguments)
        if status == _NO_MEMORY:
            raise MemoryError(f"native: {function}: no memory for scratch space")
        if status != 0:
            raise RuntimeError(f"native: {function}: {_STATUS.get(status, f'status {status}')}")

    @contextmanager
    def default_float_mode(self) -> Iterator[None]:
        """Within the block the calling thread rounds to nearest and keeps subnormals, whatever its caller has set."""
        mode = self.functions.mhc_float_mode_default()
        try:
            yield
        finally:
            self.functions.mhc_float_mode_restore(mode)


@functools.cache
def native() -> Native:
    """The one ``Native`` of the process."""
    return Native()


def new_fp32(*shape: int) -> torch.Tensor:
    """An uninitialised FP32 output on the CPU."""
    return memory.new_tensor(shape, torch.float32)


def new_bf16(*shape: int) -> torch.Tensor:
    """An uninitialised BF16 output on the CPU."""
    return memory.new_tensor(shape, torch.bfloat16)


def row_contiguous(t: torch.Tensor) -> torch.Tensor:
    """``t`` with everything behind its first axis contiguous, copied only where it is not; any stride between rows."""
    if t.device.type != "cpu":
        raise NotImplementedError(f"native: device: want 'cpu', got {t.device.type!r} (fail-closed)")
    if t.numel() and t.data_ptr() <= t.storage_offset() * t.element_size():
        raise NotImplementedError("native: want a tensor with memory of its own, got one without (fail-closed)")
    if t.is_neg():
        return copied(t)
    if t.is_contiguous():
        return t
    stride, inner = t.stride(), 1
    for size, step in zip(reversed(t.shape[1:]), reversed(stride[1:]), strict=True):
        if size != 1 and step != inner:
            return copied(t)
        inner *= size
    return t


def dense(t: torch.Tensor) -> torch.Tensor:
    """``t`` as one contiguous piece, copied only where it is not."""
    t = row_contiguous(t)
    return t if t.is_contiguous() else copied(t)


def copied(t: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, made on the calling thread: a forked child would wait for the others, which it lacks."""
    result = memory.new_tensor(tuple(t.shape), t.dtype)
    _copy(result, t)
    return result


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    if source.numel() < ONE_THREAD_BELOW:
        to.copy_(source)
        return
    axis = next(i for i, size in enumerate(source.shape) if size > 1)
    size = source.shape[axis]
    at_once = max(1, (ONE_THREAD_BELOW - 1) * size // source.numel())
    for part, piece in zip(torch.split(to, at_once, axis), torch.split(source, at_once, axis), strict=True):
        _copy(part, piece)


def rows(t: torch.Tensor) -> RowsTriple:
    """The fields of ``struct mhc_rows`` for a row-contiguous FP32 or BF16 tensor that the caller keeps alive."""
    return t.data_ptr(), t.stride(0), MHC_BF16 if t.dtype == torch.bfloat16 else MHC_FP32


def one_row(t: torch.Tensor) -> RowsTriple:
    """The same for a 1-D tensor as a single row."""
    return t.data_ptr(), t.numel(), MHC_BF16 if t.dtype == torch.bfloat16 else MHC_FP32


def as_rows(t: torch.Tensor) -> library.Rows:
    """``rows`` as the structure that a function takes by value."""
    return library.Rows(*rows(t))


def _portable(function: int, name: str, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"{name}: got dtype {x.dtype}, want torch.float32")
    values = dense(x.detach())
    result = new_fp32(*x.shape)
    native().run("mhc_elementary", function, values.numel(), values.data_ptr(), result.data_ptr())
    return result


def _div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("native: division happens inside the operators")


PORTABLE = Elementary(
    "portable-native",
    functools.partial(_portable, _EXP, "exp"),
    functools.partial(_portable, _SIGMOID, "sigmoid"),
    functools.partial(_portable, _RSQRT, "rsqrt"),
    functools.partial(_portable, _SQRT, "sqrt"),
    _div,
)
"""The functions of ``portable-fp32-mhc-v1``, vectorised in C++."""
