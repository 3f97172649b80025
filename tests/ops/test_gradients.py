"""Gradients against autograd of the plain formulas in float64: what the contract's backward is the gradient *of*.

The plain formulas share nothing with the package but two roundings: ``hidden`` is BF16 in the contract, so the float64
run takes the contract's value there and lets the gradient through. What is left is FP32 rounding. A gradient may differ
by ``BOUNDS`` units of 2^-24 of its tensor's largest element, and by half a BF16 ulp where it is stored as BF16.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from rl_engine.mhc.contract import P1_RMS
from tests.ops.support import FORMULAS, PROFILES, Call, Tensors, calls, run

Tensor = torch.Tensor
EPS = float(torch.tensor(1e-6))
TOKENS, HIDDEN = 48, 256

BOUNDS = {
    "r_old": 16,  # the fold over n and three legs
    "y": 4,  # one stream tree
    "weight": 64,  # a fold over T of what comes through the 39 normalizations
    "alpha_pre": 128,  # folds over T and over a segment: terms of both signs, and a small sum
    "alpha_post": 128,
    "alpha_res": 32,
    "alpha": 32,
    "bias": 16,  # a fold over T
    "gamma": 16,  # a fold over T
}
BF16_HALF_ULP = 2.0**-8


def _controller(x: Tensor, weight: Tensor, alpha: Tensor, bias: Tensor, formula: str) -> Tensor:
    mean = x.square().mean(-1, keepdim=True)
    scale = 1 / (mean.sqrt() + EPS) if formula == P1_RMS else (mean + EPS).rsqrt()
    return (x @ weight.T) * scale * alpha + bias


def _mixing(logits: Tensor) -> Tensor:
    c = logits.unflatten(1, (4, 4)).softmax(-1) + EPS
    c = c / (c.sum(1, keepdim=True) + EPS)
    for _ in range(19):
        c = c / (c.sum(2, keepdim=True) + EPS)
        c = c / (c.sum(1, keepdim=True) + EPS)
    return c


def plain_block(inputs: Mapping[str, Tensor], formula: str, hidden_bf16: Tensor) -> Tensors:
    """``(r_new, normalized, residual)`` of float64 inputs."""
    r, y, gamma = inputs["r_old"], inputs["y"], inputs["gamma"]
    parts = (inputs[f"alpha_{name}"].expand(n) for name, n in (("pre", 4), ("post", 4), ("res", 16)))
    h = _controller(r.flatten(1), inputs["weight"], torch.cat([*parts]), inputs["bias"], formula)
    pre, post, c = h[:, :4].sigmoid() + EPS, 2 * h[:, 4:8].sigmoid(), _mixing(h[:, 8:])
    hidden = torch.einsum("ti,tid->td", pre, r)
    hidden = hidden + (hidden_bf16.double() - hidden).detach()
    normalized = hidden * (hidden.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma
    return torch.einsum("tij,tid->tjd", c, r) + post[:, :, None] * y[:, None], normalized, hidden


def plain_head(inputs: Mapping[str, Tensor], formula: str) -> Tensors:
    """``(hidden,)`` of float64 inputs."""
    r = inputs["r_old"]
    pre = _controller(r.flatten(1), inputs["weight"], inputs["alpha"], inputs["bias"], formula).sigmoid() + EPS
    return (torch.einsum("ti,tid->td", pre, r),)


def excess(call: Call, formula: str) -> dict[str, float]:
    """By what factor each gradient's worst element exceeds its bound: below 1 all is well."""
    outputs, got = run(call)
    inputs = {name: t.double().requires_grad_() for name, t in call.inputs.items()}
    plain = plain_head(inputs, formula) if call.name == "mhc_head" else plain_block(inputs, formula, outputs[2])
    wanted = torch.autograd.grad(plain, list(inputs.values()), [g.double() for g in call.grads])
    found = {}
    for (name, t), want in zip(call.inputs.items(), wanted, strict=True):
        stored = BF16_HALF_ULP if t.dtype == torch.bfloat16 else 0.0
        bound = BOUNDS[name] * 2.0**-24 * want.abs().max() + stored * (1 + 2.0**-8) * want.abs()
        grad = got[name]
        assert grad is not None
        found[name] = float(((grad.double() - want).abs() / bound).max())
    return found


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", ["mhc_block", "mhc_head"])
def test_every_gradient_is_within_its_bound(name: str, profile: str, formula: str) -> None:
    found = excess(calls(profile, formula, TOKENS, HIDDEN)[name], formula)
    assert max(found.values()) < 1, found


@pytest.mark.parametrize("name", ["mhc_block", "mhc_head"])
def test_the_bounds_tell_the_two_formulas_apart(name: str) -> None:
    """On streams of RMS 0.01, where their gradients differ by 1e-2 of themselves."""
    call = calls(PROFILES[1], FORMULAS[0], TOKENS, HIDDEN)[name]
    small = call.inputs["r_old"] * 0.01
    call = Call(call.name, call.function, {**call.inputs, "r_old": small}, call.settings, call.grads)
    assert max(excess(call, FORMULAS[0]).values()) < 1
    assert excess(call, FORMULAS[1])["weight"] > 10
