"""The strict arithmetic: the bytes of a token depend on that token and those it attends to, in their order, alone.

Not on the batch, its size or order, padding, packing, the length of the cache, or threads. Three things make it so.

- Every long sum is a fold in ascending order, ``fixed_k_gemm``: for each pair of a query and a key over the width of a
  head, for each query over its keys, for each token over the words.
- Products, sums and quotients are elementwise and IEEE 754 pins them. exp and sigmoid are the portable profile's,
  correctly rounded; ``torch.exp`` promises no such thing. The logarithm is ``math.log``, one number at a time.
- A key that a query does not see has the weight +0, and its products are +0 or -0. A fold starts at +0, and a sum that
  rounds to nearest is -0 only if both of its terms are: so the accumulator is never -0, and adding a zero of either
  sign leaves every bit of it as it was. A fold over 512 keys of which 17 are seen has the bytes of a fold over the 17.

  That holds while values are finite, which padding and other sequences are: they are tokens like any other.

Gradients come by the strict backward of ``fixed_k_gemm`` and of the block, the rest by torch's own for elementwise
operations and the embedding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from examples.parity.model import Arithmetic
from rl_engine.mhc import ops
from rl_engine.mhc.contract import HC_MULT, PORTABLE_PROFILE, RELEASED_RMS
from rl_engine.mhc.elementary import for_profile
from rl_engine.mhc.nn import HyperConnection, RMSNorm, expand_streams

ELEMENTARY = for_profile(PORTABLE_PROFILE)


class Exp(torch.autograd.Function):
    """``exp(x)`` where ``kept``, +0 elsewhere: FP32 and bool of one shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        """Correctly rounded."""
        y = torch.zeros_like(x)
        y[kept] = ELEMENTARY.exp(x[kept])
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """``dy * y``."""
        (y,) = ctx.saved_tensors
        return dy * y, None


class Sigmoid(torch.autograd.Function):
    """``1 / (1 + exp(-x))`` of FP32 of any shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Each step rounded to nearest."""
        y = ELEMENTARY.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """``dy * (y * (1 - y))``."""
        (y,) = ctx.saved_tensors
        return dy * (y * (1 - y))


class Log(torch.autograd.Function):
    """The natural logarithm of FP32 ``[T, 1]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """In FP64 by the C library's scalar function, then rounded to FP32: a vector library may treat a tail apart."""
        ctx.save_for_backward(x)
        return torch.tensor([math.log(value) for value in x.flatten().tolist()]).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """``dy / x``."""
        (x,) = ctx.saved_tensors
        return dy / x


def gemm(x: Tensor, w: Tensor) -> Tensor:
    """FP32 ``[M, N]`` of ``x[M, K]`` and ``w[N, K]``: one ascending fold for every element."""
    return ops.fixed_k_gemm(x, w, numeric_profile=PORTABLE_PROFILE)


def gemms(x: Tensor, w: Tensor) -> Tensor:
    """``gemm`` for each row and head: FP32 ``[B, H, M, N]`` of ``x[B, H, M, K]`` and ``w[B, H, N, K]``."""
    pairs = zip(x.flatten(0, 1), w.flatten(0, 1), strict=True)
    return torch.stack([gemm(*pair) for pair in pairs]).unflatten(0, x.shape[:2])


def linear(x: Tensor, w: Tensor) -> Tensor:
    """BF16 ``[..., N]`` of BF16 ``x[..., K]`` and ``w[N, K]``, rounded once."""
    return gemm(x.reshape(-1, x.shape[-1]), w).to(torch.bfloat16).view(*x.shape[:-1], w.shape[0])


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Softmax attention, shapes as in ``Arithmetic``: every product of two matrices by itself, one rounding to BF16.

    The largest score is exact in any order, up to the sign of a zero, which ``exp(score - top)`` does not show. A
    column of ones beside the values makes the denominator a fold like theirs.
    """
    scores = gemms(q, k) * q.shape[-1] ** -0.5
    top = scores.detach().masked_fill(~sees, -math.inf).amax(dim=-1, keepdim=True)
    weights = Exp.apply(scores - top, sees.expand_as(scores))
    folded = gemms(weights, torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1).transpose(-1, -2))
    return (folded[..., :-1] / folded[..., -1:]).to(torch.bfloat16)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``(gate * sigmoid(gate)) * up`` in FP32, rounded to BF16 once."""
    wide = gate.float()
    return (wide * Sigmoid.apply(wide) * up.float()).to(torch.bfloat16)


def log_probs(x: Tensor, w: Tensor) -> Tensor:
    """FP32 log-softmax of the FP32 logits: ``z - log(fold exp(z))`` with ``z`` the logits less their largest."""
    logits = gemm(x.reshape(-1, x.shape[-1]), w)
    z = logits - logits.detach().amax(dim=-1, keepdim=True)
    total = gemm(Exp.apply(z, torch.ones_like(z, dtype=torch.bool)), torch.ones(1, z.shape[1]))
    return (z - Log.apply(total)).view(*x.shape[:-1], w.shape[0])


def expand(x: Tensor) -> Tensor:
    """The embedding as each of the four streams."""
    return expand_streams(x, numeric_profile=PORTABLE_PROFILE)


def collapse(streams: Tensor) -> Tensor:
    """BF16 ``[..., D]``: the mean of the four streams, on the contract's tree."""
    flat = streams.reshape(-1, *streams.shape[-2:])
    quarters = torch.full((flat.shape[0], HC_MULT), 1 / HC_MULT)
    mean = ops.h_aggregate(quarters, flat, numeric_profile=PORTABLE_PROFILE)
    return mean.view(*streams.shape[:-2], streams.shape[-1])


def block(sublayer: nn.Module, hidden: int) -> nn.Module:
    """The contract's block, with the formula of the released model."""
    profile = PORTABLE_PROFILE
    return HyperConnection(
        sublayer, hidden, controller_rms=RELEASED_RMS, numeric_profile=profile, gamma_dtype=torch.float32
    )


def norm(hidden: int) -> nn.Module:
    """The contract's RMSNorm."""
    return RMSNorm(hidden, numeric_profile=PORTABLE_PROFILE, dtype=torch.float32)


def arithmetic() -> Arithmetic:
    """All of the above."""
    return Arithmetic("rl_engine.mhc", linear, attend, gated, log_probs, expand, collapse, block, norm)
