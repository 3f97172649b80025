"""Tiny blocks for the composite tests: a batch, its gradients, and the same numbers for the two references."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rl_engine.mhc.contract import ControllerParams, GradBoundary, LayerContract, NormParams, ResidualBatch
from tests.operators.support import BF16, FP32, Draws
from tests.reference.autograd64 import BlockTensors
from tests.reference.bridge import to_exact
from tests.reference.exact_block import BlockInput

CONTROLLER_KEYS = ("d_controller_weight", "d_alpha_pre", "d_alpha_post", "d_alpha_res", "d_bias")
GRAD_KEYS = ("d_r_old", "dy_sublayer", "d_hidden", "d_gamma", "d_c", "d_post", *CONTROLLER_KEYS)
BLOCK_FIELDS = tuple(f.name for f in dataclasses.fields(BlockInput))


def make_block(
    name: str, tokens: int, width: int, *, gamma_dtype: torch.dtype = BF16, scale: float = 1.0, **contract: Any
) -> tuple[ResidualBatch, GradBoundary]:
    draws = Draws(f"block {name}")
    controller = ControllerParams(
        weight=draws(24, 4 * width, scale=(4 * width) ** -0.5),
        alpha_pre=draws(1, scale=0.5),
        alpha_post=draws(1, scale=0.5),
        alpha_res=draws(1, scale=0.5),
        bias=draws(24, scale=0.1),
    )
    batch = ResidualBatch(
        r_old=draws(tokens, 4, width, dtype=BF16, scale=scale),
        y_sublayer=draws(tokens, width, dtype=BF16),
        controller=controller,
        norm=NormParams(gamma=(1 + draws(width, scale=0.05)).to(gamma_dtype)),
        token_id=torch.arange(tokens) + 1000,
        contract=LayerContract(hidden=width, gamma_dtype="float32" if gamma_dtype == FP32 else "bfloat16", **contract),
    )
    grads = GradBoundary(
        d_r_new=draws(tokens, 4, width, dtype=BF16),
        d_normalized=draws(tokens, width, dtype=BF16),
        d_residual=draws(tokens, width, dtype=BF16, scale=0.25),
    )
    return batch.sealed(), grads


def block_leaves(batch: ResidualBatch) -> dict[str, Tensor]:
    """The batch's tensors by the names of `BlockInput` and `BlockTensors`."""
    c = batch.controller
    values = (batch.r_old, batch.y_sublayer, c.weight, c.alpha_pre, c.alpha_post, c.alpha_res, c.bias)
    return dict(zip(BLOCK_FIELDS, (*values, batch.norm.gamma), strict=True))


def grad_leaves(grads: GradBoundary) -> list[Tensor]:
    return [grads.d_r_new, grads.d_normalized, grads.d_residual]


def exact_input(batch: ResidualBatch) -> BlockInput:
    values = {name: to_exact(t) for name, t in block_leaves(batch).items()}
    for name in ("alpha_pre", "alpha_post", "alpha_res"):
        (values[name],) = values[name]
    return BlockInput(**values)


def block_tensors(**leaves: Tensor) -> BlockTensors:
    return BlockTensors(**leaves)


def take(batch: ResidualBatch, grads: GradBoundary, rows: list[int]) -> tuple[ResidualBatch, GradBoundary]:
    """The chosen rows, in their order, as a batch of their own."""
    part = dataclasses.replace(
        batch, r_old=batch.r_old[rows], y_sublayer=batch.y_sublayer[rows], token_id=batch.token_id[rows]
    )
    return part, GradBoundary(*(t[rows] for t in grad_leaves(grads)))


def with_leaves(batch: ResidualBatch, **changed: Tensor) -> ResidualBatch:
    """An unsealed batch with some tensors, named as in `block_leaves`, replaced."""
    values = {**block_leaves(batch), **changed}
    controller = ControllerParams(**{k: values[k] for k in ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias")})
    return dataclasses.replace(
        batch,
        r_old=values["r_old"],
        y_sublayer=values["y"],
        controller=controller,
        norm=NormParams(gamma=values["gamma"]),
        weight_fingerprint="",
    )
