"""Calls of single operators, how many operations each takes, and how many bytes it has to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import eager
from benchmarks.inputs import Inputs

EAGER_OPERATORS = ("fp32_gemm_rms_fwd", "mhc_post_fwd", "h_aggregate_fwd", "rmsnorm_residual_fwd")
BANDWIDTH_OPERATORS = ("mhc_post_fwd", "h_aggregate_fwd")
DEFAULT_OPERATORS = ("fp32_gemm_rms_fwd", *BANDWIDTH_OPERATORS)


def flops(operator: str, tokens: int, hidden: int) -> int | None:
    """FP32 multiplies and adds of the K folds; ``None`` where the operator is not bound by them.

    Forward: 24 chains and the sum of squares, one multiply and one add each for each k. Backward: dX and dW.
    """
    k = 4 * hidden
    return {"fp32_gemm_rms_fwd": 50 * k * tokens, "fp32_gemm_rms_bwd": 96 * k * tokens}.get(operator)


def nbytes(*tensors: Any) -> int:
    """Bytes of the tensors among ``tensors``, tuples taken apart; what a forward saves is left out."""
    found = (nbytes(*t) if isinstance(t, tuple) else t.nbytes if isinstance(t, Tensor) else 0 for t in tensors)
    return sum(found)


def intermediates(inputs: Inputs) -> dict[str, Tensor]:
    """h, pre, post, c and hidden of the batch, roughly: plain PyTorch's."""
    batch = inputs.batch
    eps = batch.contract.mhc_eps
    with torch.no_grad():
        p, r = eager.gemm_rms(batch.r_old.flatten(1).float(), batch.controller.weight, eps)
        h = r.unsqueeze(1) * p * batch.controller.expanded_alpha(batch.contract) + batch.controller.bias
        pre, post, c = eager.split_sinkhorn(h, eps)
        hidden = eager.aggregate(pre, batch.r_old)
    return {"h": h, "pre": pre.contiguous(), "post": post.contiguous(), "c": c.contiguous(), "hidden": hidden}


def arguments(inputs: Inputs, operator: str) -> tuple[Any, ...]:
    """What an operator is called with, without ``saved``."""
    batch, grads, contract = inputs.batch, inputs.grads, inputs.batch.contract
    some = intermediates(inputs)
    x_flat, weight, gamma = batch.r_old.flatten(1), batch.controller.weight, batch.norm.gamma
    h, pre, post, c, hidden = (some[key] for key in ("h", "pre", "post", "c", "hidden"))
    return {
        "hc_split_sinkhorn_fwd": (h, contract),
        "hc_split_sinkhorn_bwd": (pre, post, c),
        "fp32_gemm_rms_fwd": (x_flat, weight, contract.mhc_eps),
        "fp32_gemm_rms_bwd": (h, h[:, 0].contiguous(), x_flat, weight),
        "mhc_post_fwd": (batch.r_old, batch.y_sublayer, c, post),
        "mhc_post_bwd": (grads.d_r_new, batch.r_old, batch.y_sublayer, c, post),
        "h_aggregate_fwd": (pre, batch.r_old),
        "h_aggregate_bwd": (grads.d_normalized, pre, batch.r_old),
        "rmsnorm_residual_fwd": (hidden, gamma, contract.rmsnorm_eps),
        "rmsnorm_residual_bwd": (grads.d_normalized, grads.d_residual, hidden, gamma),
        "fixed_k_gemm_fwd": (x_flat, weight),
        "fixed_k_gemm_bwd": (h, x_flat, weight),
    }[operator]


SAVING = ("hc_split_sinkhorn", "fp32_gemm_rms", "rmsnorm_residual")
"""Operators whose forward hands a dict to their backward, as its last result and last argument."""


def contract_call(ops: Any, inputs: Inputs, operator: str) -> Callable[[], Any]:
    """An operator of a provider or the oracle on arguments made from the inputs."""
    function, args = getattr(ops, operator), arguments(inputs, operator)
    stem, direction = operator.rsplit("_", 1)
    if direction == "bwd" and stem in SAVING:
        args = (*args, getattr(ops, f"{stem}_fwd")(*arguments(inputs, f"{stem}_fwd"))[-1])
    return lambda: function(*args)


def eager_call(inputs: Inputs, operator: str) -> Callable[[], Any]:
    """The same in plain PyTorch, without autograd; BF16 is widened inside the call, as a model would."""
    args = arguments(inputs, operator)

    def gemm_rms(x_flat: Tensor, weight: Tensor, eps: float) -> Any:
        return eager.gemm_rms(x_flat.float(), weight, eps)

    def rmsnorm(x: Tensor, gamma: Tensor, eps: float) -> Any:
        return eager.rmsnorm(x, gamma, eps), x

    functions: dict[str, Callable[..., Any]] = {
        "fp32_gemm_rms_fwd": gemm_rms,
        "mhc_post_fwd": eager.mix,
        "h_aggregate_fwd": eager.aggregate,
        "rmsnorm_residual_fwd": rmsnorm,
    }
    function = functions[operator]

    def call() -> Any:
        with torch.no_grad():
            return function(*args)

    return call


def returned_tensors(returned: Any) -> tuple[Tensor, ...]:
    """The tensors that an operator returned, without what it saved."""
    return tuple(t for t in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(t, Tensor))
