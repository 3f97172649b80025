"""The plain mathematics of every operator in FP64; autograd, not a hand-written formula, gives the gradients.

No rounding to FP32 or BF16 happens here except where `rounded_hidden` pins the value of a stored tensor: then the
value is the stored one and the gradient passes straight through. Results of the package agree with this file only up
to FP32 rounding; `Bound` says how far, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6
UNIT = 2.0**-24  # the largest relative error of one FP32 rounding


def split_sinkhorn(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h [T, 24] -> PRE [T, 4], POST [T, 4], C [T, 4, 4]."""
    m = torch.softmax(h[:, 8:].reshape(-1, 4, 4), dim=-1) + EPS
    m = m / (m.sum(dim=1, keepdim=True) + EPS)
    for _ in range(19):
        m = m / (m.sum(dim=2, keepdim=True) + EPS)
        m = m / (m.sum(dim=1, keepdim=True) + EPS)
    return torch.sigmoid(h[:, :4]) + EPS, 2 * torch.sigmoid(h[:, 4:8]), m


def gemm_rms(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K], weight [N, K] -> P [T, N], r [T]."""
    return x @ weight.T, 1 / (x.square().mean(dim=-1).sqrt() + EPS)


def gemm_rms_released(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same under rsqrt-mean-plus-eps."""
    return x @ weight.T, 1 / (x.square().mean(dim=-1) + EPS).sqrt()


def post(r_old: Tensor, y: Tensor, c: Tensor, post_scale: Tensor) -> Tensor:
    """Stream j receives sum_i C[i, j] R[i] + POST[j] y."""
    return torch.einsum("tij,tid->tjd", c, r_old) + torch.einsum("tj,td->tjd", post_scale, y)


def aggregate(pre: Tensor, r_old: Tensor) -> Tensor:
    return torch.einsum("ti,tid->td", pre, r_old)


def rmsnorm(x: Tensor, gamma: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * gamma


def fixed_gemm(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


@dataclass(frozen=True)
class BlockTensors:
    """Names follow the contract; every tensor is FP64."""

    r_old: Tensor
    y: Tensor
    weight: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor
    bias: Tensor
    gamma: Tensor


Controller = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def mhc_pre(b: BlockTensors, controller: Controller = gemm_rms) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, D] (not rounded), POST [T, 4], C [T, 4, 4]."""
    p, r = controller(b.r_old.flatten(1), b.weight)
    alpha = torch.cat([b.alpha_pre.expand(4), b.alpha_post.expand(4), b.alpha_res.expand(16)])
    pre, post_scale, c = split_sinkhorn(r[:, None] * p * alpha + b.bias)
    return aggregate(pre, b.r_old), post_scale, c


def block(b: BlockTensors, rounded_hidden: Tensor, controller: Controller = gemm_rms) -> tuple[Tensor, Tensor, Tensor]:
    """r_new [T, 4, D], normalized [T, D], hidden as stored [T, D]."""
    hidden, post_scale, c = mhc_pre(b, controller)
    stored = hidden + (rounded_hidden - hidden).detach()
    return post(b.r_old, b.y, c, post_scale), rmsnorm(stored, b.gamma), stored


def gradients(
    fn: Callable[..., Tensor | Sequence[Tensor]], inputs: Mapping[str, Tensor], cotangents: Sequence[Tensor]
) -> dict[str, Tensor]:
    """FP64 gradients of sum(output * cotangent) by input name."""
    leaves = {name: t.detach().to(torch.float64).requires_grad_() for name, t in inputs.items()}
    outputs = fn(**leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    loss = sum(
        ((o * g.to(torch.float64)).sum() for o, g in zip(outputs, cotangents, strict=True)),
        start=torch.zeros((), dtype=torch.float64),
    )
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@dataclass(frozen=True)
class Bound:
    """Largest admitted error of a tensor, relative to the tensor's largest magnitude: 4 * sqrt(depth) * 2**-24.

    `depth` counts the FP32 roundings on the longest path to one element, as `reason` says. Their errors are of either
    sign and add as a random walk, whose step is below one unit; the factor 4 leaves room for cancellation in sums.
    """

    depth: int
    reason: str

    def check(self, name: str, actual: Tensor, exact: Tensor) -> None:
        assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, want {tuple(exact.shape)}"
        scale = exact.abs().max().item()
        assert scale > 0, f"{name}: the exact tensor is zero, so the bound says nothing"
        error = (actual.to(torch.float64) - exact).abs().max().item() / scale
        admitted = 4 * math.sqrt(self.depth) * UNIT
        assert error <= admitted, f"{name}: relative error {error:.3g} exceeds {admitted:.3g} ({self.reason})"
