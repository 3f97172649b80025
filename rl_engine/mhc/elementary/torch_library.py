"""The recipe of ``oracle-fp32-mhc-v1``: whatever torch's own library returns, on one pinned code path.

On a CPU ``torch.exp``, ``torch.sqrt`` and ``torch.rsqrt`` give each value the same bits in any layout
(``torch.sqrt`` is not IEEE there: up to a fifth of its results are one ULP off). ``torch.sigmoid`` has two answers:
ATen's vector body and its scalar tail differ in 4 % of results, and which one an element gets depends on layout and
position. The published golden bytes are the scalar path's, so ``sigmoid`` always evaluates on an inner-strided
buffer, where ATen has no vector body.
"""

from __future__ import annotations

import torch

from rl_engine.mhc.elementary.recipe import Elementary
from rl_engine.mhc.float_mode import require_subnormals


def _fp32(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"{name}: got dtype {x.dtype}, want torch.float32")
    require_subnormals(x.numel())
    return x.contiguous()


def exp(x: torch.Tensor) -> torch.Tensor:
    """``torch.exp`` of an FP32 tensor, any shape."""
    return torch.exp(_fp32("exp", x))


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """``torch.sqrt`` of an FP32 tensor, any shape (on a CPU not always the IEEE square root)."""
    return torch.sqrt(_fp32("sqrt", x))


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """``torch.rsqrt`` of an FP32 tensor, any shape."""
    return torch.rsqrt(_fp32("rsqrt", x))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``torch.sigmoid`` of an FP32 tensor, any shape, always on ATen's scalar path.

    The values are laid two elements apart: a stride that the vector body does not accept, on every ISA level and at
    every size, so an element's bits cannot depend on its neighbours.
    """
    flat = _fp32("sigmoid", x).reshape(-1)
    spaced = torch.zeros((flat.numel(), 2), dtype=torch.float32, device=x.device)
    spaced[:, 0] = flat
    return torch.sigmoid(spaced[:, 0]).reshape(x.shape)


def div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """FP32 ``a / b`` with one rounding; both are tensors, as a Python divisor may become a reciprocal on a GPU."""
    return torch.div(_fp32("dividend", a), _fp32("divisor", b))


TORCH_LIBRARY = Elementary("torch-library", exp, sigmoid, rsqrt, sqrt, div)
