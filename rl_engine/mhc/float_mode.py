"""The floating-point mode of the calling thread, as far as it could change a contracted byte."""

from __future__ import annotations

import torch


def require_subnormals() -> None:
    """Raise ``RuntimeError`` where this thread flushes subnormal FP32 numbers to zero.

    The contract keeps subnormals, and a CPU thread after ``torch.set_flush_denormal(True)`` does not. PyTorch has no
    getter for that mode, so this looks at what the arithmetic does: half of the smallest normal number.
    """
    half_of_smallest_normal = torch.full((1,), 2.0**-126, dtype=torch.float32, device="cpu").mul_(0.5)
    if int(half_of_smallest_normal.view(torch.int32)) != 1 << 22:
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero, the contract keeps them: "
            "call torch.set_flush_denormal(False) first"
        )
