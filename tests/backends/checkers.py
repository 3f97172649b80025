"""The checkers of this folder that need more than one run, and the allocator with canaries.

Each returns what it found, one line each; test_planted_defects.py shows that each can find something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from rl_engine.mhc.backends.native import block, operators
from tests.backends.support import Named, differences
from tests.threads import on_threads

Run = Callable[[], Named]

GUARD = 269
"""Elements on either side of an output. Odd, so that no output is aligned."""

_CANARY = {torch.float32: 0x7FA5A5A5, torch.bfloat16: 0x7FA5}
_POISON = {torch.float32: 0x7FDEADBE, torch.bfloat16: 0x7FDE}
_INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class GuardedAllocator:
    """Hands out poisoned outputs inside larger buffers full of canaries. Both patterns are NaNs of no arithmetic."""

    def __init__(self) -> None:
        self.made: list[tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = []

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        buffer = torch.full((count + 2 * GUARD,), _CANARY[dtype], dtype=_INTEGER[dtype])
        buffer[GUARD : GUARD + count] = _POISON[dtype]
        self.made.append((buffer, shape, dtype))
        return buffer.view(dtype)[GUARD : GUARD + count].view(shape)

    def touched(self) -> list[str]:
        """The outputs beside which a canary is gone."""
        found = []
        for buffer, shape, dtype in self.made:
            for side, guard in (("before", buffer[:GUARD]), ("behind", buffer[buffer.numel() - GUARD :])):
                wrong = (guard != _CANARY[dtype]).nonzero().reshape(-1).tolist()
                if wrong:
                    found.append(f"{dtype} {shape}: {len(wrong)} elements {side} it, first {wrong[0]} of {GUARD}")
        return found

    def unwritten(self) -> list[str]:
        """The outputs in which an element was never written."""
        found = []
        for buffer, shape, dtype in self.made:
            left = int((buffer[GUARD : buffer.numel() - GUARD] == _POISON[dtype]).sum())
            if left:
                found.append(f"{dtype} {shape}: {left} elements not written")
        return found


@contextmanager
def guarded_outputs() -> Iterator[GuardedAllocator]:
    """Within the block every output that the backend allocates is a guarded one."""
    allocator = GuardedAllocator()
    with pytest.MonkeyPatch.context() as patch:
        for module in (operators, block):
            patch.setattr(module, "new_fp32", lambda *shape: allocator.new(shape, torch.float32))
            patch.setattr(module, "new_bf16", lambda *shape: allocator.new(shape, torch.bfloat16))
        yield allocator


def thread_differences(run: Run, counts: tuple[int, ...] = (1, 2, 3, 7)) -> list[str]:
    """What differs between thread counts, against the first of them."""
    with on_threads(counts[0]):
        want = run()
    found = []
    for count in counts[1:]:
        with on_threads(count):
            found += [f"{count} threads: {line}" for line in differences(run(), want)]
    return found


def repeat_differences(run: Run, times: int = 100) -> list[str]:
    """What differs from the first of ``times`` runs."""
    want = run()
    return [f"run {n}: {line}" for n in range(1, times) for line in differences(run(), want)]


def concurrent_differences(run: Run, want: Named, callers: int = 4, times: int = 10) -> list[str]:
    """What differs from ``want`` when several Python threads call at once."""
    with ThreadPoolExecutor(callers) as pool:
        results = list(pool.map(lambda _: run(), range(callers * times)))
    return [f"call {n}: {line}" for n, got in enumerate(results) for line in differences(got, want)]
