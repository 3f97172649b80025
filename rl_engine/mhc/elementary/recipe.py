"""What a recipe for the elementary functions has to provide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Unary = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Elementary:
    """Elementwise FP32 functions whose value at a point depends on that point alone, never on layout or size.

    ``exp, sigmoid, rsqrt, sqrt``: FP32 tensor of any shape and strides to a contiguous FP32 tensor of that shape.
    ``div(a, b)``: IEEE FP32 division of two tensors that broadcast, never a multiply by a reciprocal.
    """

    name: str
    exp: Unary
    sigmoid: Unary
    rsqrt: Unary
    sqrt: Unary
    div: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
