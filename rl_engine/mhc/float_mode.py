"""The floating-point mode of the calling thread, as far as it could change a contracted byte."""

from __future__ import annotations

import sys

_SMALLEST_NORMAL = sys.float_info.min
_HALF, _TWO = 0.5, 2.0


def require_subnormals() -> None:
    """Raise ``RuntimeError`` where this thread flushes subnormal numbers to zero.

    The contract keeps subnormals, and a CPU thread after ``torch.set_flush_denormal(True)`` does not. No getter
    tells that mode, but it is the thread's, so Python's own floats show it: half of the smallest normal, doubled.
    """
    if (_SMALLEST_NORMAL * _HALF) * _TWO != _SMALLEST_NORMAL:
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero, the contract keeps them: "
            "call torch.set_flush_denormal(False) first"
        )
