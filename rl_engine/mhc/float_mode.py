"""The floating-point mode of the threads that compute, as far as it could change a contracted byte."""

from __future__ import annotations

import sys

import torch

_SMALLEST_NORMAL = sys.float_info.min
_HALF, _TWO = 0.5, 2.0
_ONE_THREAD_BELOW = 1 << 13
"""An operation on fewer elements than this stays on the calling thread, with room to spare (ATen splits at 2^15)."""
_SHARE = 1 << 15
"""Elements for each thread in an operation that ATen splits over all of them."""


def require_subnormals(elements: int = 0) -> None:
    """Raise ``RuntimeError`` where a thread that would compute flushes subnormal numbers to zero.

    The contract keeps subnormals, and a CPU thread after ``torch.set_flush_denormal(True)`` does not; nor do worker
    threads started while it was on, even after it is off again. No getter tells that mode, so this looks at what
    arithmetic does: of the calling thread through Python's own floats, and of the workers, where ``elements`` are
    enough to be split, through one parallel multiplication.
    """
    if (_SMALLEST_NORMAL * _HALF) * _TWO != _SMALLEST_NORMAL:
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero, the contract keeps them: "
            "call torch.set_flush_denormal(False) first"
        )
    if elements >= _ONE_THREAD_BELOW and torch.get_num_threads() > 1:
        halves = torch.full((_SHARE * torch.get_num_threads(),), 2.0**-126, dtype=torch.float32, device="cpu").mul_(0.5)
        if int(halves.view(torch.int32).min()) == 0:
            raise RuntimeError(
                "a worker thread of torch flushes subnormal numbers to zero, the contract keeps them: it was started "
                "under torch.set_flush_denormal(True); start the process without it"
            )
