"""The block as one would write it in PyTorch without a contract: BF16 in memory, FP32 arithmetic, autograd backward.

Not strict: reductions run in whatever order the library likes, and gradients of BF16 tensors are rounded to BF16.
It is the first peer of the benchmark, and the text to read beside the contract.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_engine.mhc.contract import COMB_SLICE, HC_MULT, POST_SLICE, PRE_SLICE, SINKHORN_ITERS, ResidualBatch

SEGMENTS = (HC_MULT, HC_MULT, HC_MULT * HC_MULT)
"""How many controller outputs each of the three alphas scales."""


def gemm_rms(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(P[T, 24], r[T])`` of FP32 ``x[T, K]``."""
    return torch.matmul(x, weight.t()), 1 / (x.square().mean(dim=-1).sqrt() + eps)


def split_sinkhorn(h: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(pre[T, 4], post[T, 4], c[T, 4, 4])`` of the controller outputs ``h[T, 24]``."""
    pre, post = torch.sigmoid(h[:, PRE_SLICE]) + eps, 2 * torch.sigmoid(h[:, POST_SLICE])
    c = torch.softmax(h[:, COMB_SLICE].reshape(-1, HC_MULT, HC_MULT), dim=-1) + eps
    c = c / (c.sum(dim=1, keepdim=True) + eps)
    for _ in range(SINKHORN_ITERS - 1):
        c = c / (c.sum(dim=2, keepdim=True) + eps)
        c = c / (c.sum(dim=1, keepdim=True) + eps)
    return pre, post, c


def aggregate(pre: Tensor, r_old: Tensor) -> Tensor:
    """``hidden[T, D]``, BF16."""
    return (pre.unsqueeze(-1) * r_old.float()).sum(dim=1).to(r_old.dtype)


def rmsnorm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """``y[T, D]``, BF16."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * gamma.float()).to(x.dtype)


def mix(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
    """``r_new[T, 4, D]``, BF16: the streams mixed by ``c`` over its first axis, plus ``post`` times the sublayer."""
    mixed = torch.matmul(c.transpose(1, 2), r_old.float())
    return (mixed + post.unsqueeze(-1) * y.float().unsqueeze(1)).to(r_old.dtype)


class EagerBlock(nn.Module):
    """``(r_old[T, 4, D], y[T, D]) -> (r_new, normalized, hidden)`` with the parameters of a batch."""

    def __init__(self, batch: ResidualBatch) -> None:
        super().__init__()
        controller = batch.controller
        self.weight = nn.Parameter(controller.weight.clone())
        self.alpha = nn.Parameter(torch.cat(controller.alphas))
        self.bias = nn.Parameter(controller.bias.clone())
        self.gamma = nn.Parameter(batch.norm.gamma.clone())
        self.mhc_eps, self.rmsnorm_eps = batch.contract.mhc_eps, batch.contract.rmsnorm_eps
        self.segment = torch.repeat_interleave(torch.arange(3), torch.tensor(SEGMENTS))

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight, the three alphas, bias, gamma."""
        return self.weight, self.alpha, self.bias, self.gamma

    def forward(self, r_old: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The block boundary around a sublayer whose output is given; without ``y`` it is the identity."""
        p, r = gemm_rms(r_old.flatten(1).float(), self.weight, self.mhc_eps)
        h = r.unsqueeze(1) * p * self.alpha[self.segment] + self.bias
        pre, post, c = split_sinkhorn(h, self.mhc_eps)
        hidden = aggregate(pre, r_old)
        normalized = rmsnorm(hidden, self.gamma, self.rmsnorm_eps)
        return mix(r_old, normalized if y is None else y, c, post), normalized, hidden
