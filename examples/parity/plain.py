"""The same model as one writes it in PyTorch: matmul, ``scaled_dot_product_attention``, ``log_softmax``, autograd.

Nothing here is careless. The controllers are FP32, the activations BF16, each operation is the library's own; but the
library picks the order of a sum by the shape of the whole call, so the bits of a token depend on its company.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.parity.model import Arithmetic
from rl_engine.mhc.contract import (
    COMB_SLICE,
    HC_MULT,
    MHC_EPS,
    POST_SLICE,
    PRE_SLICE,
    PROD_CONTROLLER_N,
    RMSNORM_EPS,
    SINKHORN_ITERS,
)


class PlainNorm(nn.Module):
    """RMSNorm of BF16 ``[..., D]`` in FP32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """BF16 ``[..., D]``."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, RMSNORM_EPS).to(x.dtype)


class PlainHyperConnection(nn.Module):
    """An mHC block around ``sublayer`` in PyTorch eager: BF16 streams ``[..., 4, D]`` to the same.

    The formulas are those of the released DeepSeek-V4, as docs/numerical_contract.md writes them down.
    """

    def __init__(self, sublayer: nn.Module, hidden: int) -> None:
        super().__init__()
        controller = {
            "weight": torch.zeros(PROD_CONTROLLER_N, HC_MULT * hidden),
            "bias": torch.zeros(PROD_CONTROLLER_N),
        }
        controller |= {name: torch.ones(1) for name in ("alpha_pre", "alpha_post", "alpha_res")}
        self.controller = nn.ParameterDict(controller)
        self.norm = PlainNorm(hidden)
        self.sublayer = sublayer

    def forward(self, streams: Tensor, *args: object) -> Tensor:
        """The new streams; ``args`` go to the sublayer."""
        wide = streams.float()
        pre, post, comb = self.coefficients(wide.flatten(-2))
        hidden = (pre.unsqueeze(-1) * wide).sum(dim=-2).to(streams.dtype)
        y = self.sublayer(self.norm(hidden), *args)
        mixed = comb.transpose(-1, -2) @ wide
        return (mixed + post.unsqueeze(-1) * y.float().unsqueeze(-2)).to(streams.dtype)

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """FP32 ``pre[..., 4]``, ``post[..., 4]``, ``comb[..., 4, 4]`` of FP32 ``x[..., 4D]``."""
        own = self.controller
        scaled = F.linear(x, own["weight"]) * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + MHC_EPS)
        bias = own["bias"]
        pre = torch.sigmoid(scaled[..., PRE_SLICE] * own["alpha_pre"] + bias[PRE_SLICE]) + MHC_EPS
        post = 2 * torch.sigmoid(scaled[..., POST_SLICE] * own["alpha_post"] + bias[POST_SLICE])
        logits = scaled[..., COMB_SLICE] * own["alpha_res"] + bias[COMB_SLICE]
        comb = torch.softmax(logits.unflatten(-1, (HC_MULT, HC_MULT)), dim=-1) + MHC_EPS
        comb = comb / (comb.sum(dim=-2, keepdim=True) + MHC_EPS)
        for _ in range(SINKHORN_ITERS - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + MHC_EPS)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + MHC_EPS)
        return pre, post, comb


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """One call for the whole batch."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in BF16."""
    return F.silu(gate) * up


def log_probs(x: Tensor, w: Tensor) -> Tensor:
    """FP32 log-softmax of the logits."""
    return F.log_softmax(F.linear(x, w).float(), dim=-1)


def expand(x: Tensor) -> Tensor:
    """The embedding as each of the four streams."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], HC_MULT, x.shape[-1])


def collapse(streams: Tensor) -> Tensor:
    """The mean of the four streams, taken in FP32."""
    return streams.float().mean(dim=-2).to(streams.dtype)


def arithmetic() -> Arithmetic:
    """All of the above."""
    return Arithmetic(
        "plain PyTorch", F.linear, attend, gated, log_probs, expand, collapse, PlainHyperConnection, PlainNorm
    )
