"""A block of two linked halves around a sublayer that moves values and computes none, so that its bytes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_engine.mhc import block, ops
from rl_engine.mhc.contract import GradBoundary
from rl_engine.mhc.provider import ReferenceProvider
from tests.ops.expected import batch_of
from tests.ops.support import CONTROLLER, Call, Grads, Tensors

Tensor = torch.Tensor


def sublayer(normalized: Tensor, graph_break: bool = False) -> Tensor:
    """Each row back to front: its gradient is the same permutation, exact in BF16."""
    if graph_break:
        torch._dynamo.graph_break()
    return normalized.flip(-1)


def block_of(inputs: Mapping[str, Tensor], settings: Mapping[str, Any], graph_break: bool = False) -> Tensor:
    """``r_new`` of the two halves."""
    r_old, *parameters = inputs.values()
    normalized, _, post, c, link = ops.mhc_pre_rmsnorm(r_old, *parameters, **settings)
    y = sublayer(normalized, graph_break)
    return ops.mhc_post_linked(r_old, y, c, post, link, numeric_profile=settings["numeric_profile"])


def unlinked_block_of(inputs: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """The same, where autograd adds the two gradients of ``r_old``."""
    r_old, *parameters = inputs.values()
    normalized, _, post, c, _ = ops.mhc_pre_rmsnorm(r_old, *parameters, **settings)
    return ops.mhc_post(r_old, sublayer(normalized), c, post, numeric_profile=settings["numeric_profile"])


def run_block(call: Call, d_r_new: Tensor, wanted: tuple[str, ...] | None = None, form: Any = block_of) -> Any:
    """``(r_new,)`` and the gradients of ``wanted``, of the inputs of a call of ``mhc_pre_rmsnorm``."""
    names = tuple(call.inputs) if wanted is None else wanted
    inputs = {name: t.detach().clone().requires_grad_(name in names) for name, t in call.inputs.items()}
    r_new = form(inputs, call.settings)
    grads = torch.autograd.grad(r_new, [inputs[name] for name in names], d_r_new)
    return (r_new.detach(),), dict(zip(names, grads, strict=True))


def expected_block(call: Call, d_r_new: Tensor) -> tuple[Tensors, Grads]:
    """The same by ``mhc_block_backward`` over the reference, ``d_residual`` being zeros."""
    ref = ReferenceProvider(call.settings["numeric_profile"])
    r_old = call.inputs["r_old"]
    empty = torch.zeros(len(r_old), r_old.shape[2], dtype=torch.bfloat16)
    normalized = ref.mhc_pre_rmsnorm_fused_fwd(batch_of(call, y=empty))[1]
    batch = batch_of(call, y=sublayer(normalized))
    r_new, saved = block.mhc_block_forward(batch, ops=ref)
    first = block.mhc_block_backward(batch, saved, GradBoundary(d_r_new, empty, empty), ops=ref)
    dy = first["dy_sublayer"]
    assert dy is not None
    d_normalized = sublayer(dy.to(torch.bfloat16))
    found = block.mhc_block_backward(batch, saved, GradBoundary(d_r_new, d_normalized, empty), ops=ref)
    keys = ("d_r_old", *block.CONTROLLER_GRADS, "d_gamma")
    grads: Grads = {}
    for name, key in zip(("r_old", *CONTROLLER, "gamma"), keys, strict=True):
        grad = found[key]
        assert grad is not None
        grads[name] = grad.to(call.inputs[name].dtype)
    return (r_new,), grads
