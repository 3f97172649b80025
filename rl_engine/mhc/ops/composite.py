"""What the operations over several operators share: the batch that a provider takes, and what a forward keeps.

Kept for the backward are, besides the inputs, 51 FP32 values a token: ``p[T, 24]``, ``h[T, 24]`` and the three rows of
``scales[3, T]``, which are ``r``, what lies beneath it, and 1/rms of the norm. All else is computed again from them,
with the same operators on the same bits. Without a norm there are two rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from rl_engine.mhc.block import CONTROLLER_GRADS, Grads
from rl_engine.mhc.contract import (
    GAMMA_DTYPES,
    PROD_CONTROLLER_N,
    ControllerParams,
    LayerContract,
    NormParams,
    ResidualBatch,
)
from rl_engine.mhc.operators import Saved
from rl_engine.mhc.ops import gemm_rms, rmsnorm
from rl_engine.mhc.ops.define import FP32, stored
from rl_engine.mhc.provider import MHCProvider

Tensor = torch.Tensor
Parameters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""``(weight, alpha_pre, alpha_post, alpha_res, bias, gamma)``."""

ControllerTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""One for each of the first five of ``Parameters``."""

_GAMMA_NAMES = {dtype: name for name, dtype in GAMMA_DTYPES.items()}


class Modes(NamedTuple):
    """What a contract says besides width and storage, under the names of its fields."""

    controller_rms: str
    fusion_mode: str
    numeric_profile: str
    trainability: str = "full"

    def trained(self, trainable: bool) -> Modes:
        """The modes of a backward, where ``trainable`` says that a controller parameter needs a gradient."""
        return self if trainable else self._replace(trainability="mixer-frozen")


def batch_of(r_old: Tensor, y: Tensor | None, parameters: Parameters, modes: Modes) -> ResidualBatch:
    """The batch of these tensors, not validated; without ``y`` a view of ``r_old`` stands in for the sublayer's output.

    The provider validates it, and says what is wrong.
    """
    if y is None:
        y = r_old.select(1, 0) if r_old.dim() == 3 else r_old
    tokens, hidden = (r_old.shape[0], r_old.shape[-1]) if r_old.dim() else (0, 0)
    *controller, gamma = parameters
    contract = _contract(hidden, gamma.dtype, modes)
    return ResidualBatch(
        r_old, y, ControllerParams(*controller), NormParams(gamma), _token_ids(tokens, r_old.device), contract
    )


@functools.lru_cache(maxsize=256)
def _contract(hidden: int, gamma_dtype: torch.dtype, modes: Modes) -> LayerContract:
    # Another dtype than the two is refused by the batch's validation, whatever the contract says.
    named = _GAMMA_NAMES.get(gamma_dtype, "bfloat16")
    return LayerContract(hidden=hidden, gamma_dtype=named, **modes._asdict())


@functools.lru_cache(maxsize=16)
def _token_ids(tokens: int, device: torch.device) -> Tensor:
    return torch.arange(tokens, dtype=torch.int64, device=device)


def kept_of(saved: Saved, controller_rms: str) -> tuple[Tensor, Tensor, Tensor]:
    """``(p, h, scales)`` of a forward's ``saved``, in memory of their own."""
    scale = gemm_rms.scale_of(saved["gemm"], controller_rms)
    inv_rms = (saved["norm"]["r"],) if "norm" in saved else ()
    scales = torch.stack((saved["r"], scale, *inv_rms))
    return stored(saved["p"], FP32), stored(saved["h"], FP32), scales


def kept_fake(r_old: Tensor, norm: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of the shapes and strides of ``kept_of``."""
    tokens = r_old.shape[0]
    p, h, scales = (
        r_old.new_empty(shape, dtype=FP32)
        for shape in ((tokens, PROD_CONTROLLER_N), (tokens, PROD_CONTROLLER_N), (2 + norm, tokens))
    )
    return p, h, scales


def saved_again(
    ops: MHCProvider, batch: ResidualBatch, p: Tensor, h: Tensor, scales: Tensor, *, hidden: bool = True
) -> Saved:
    """The ``saved`` of ``mhc_pre_rmsnorm_fused_fwd`` again, from what ``kept_of`` kept of it.

    ``hidden=False`` is for a provider's own ``mhc_pre_rmsnorm_fused_bwd``, which makes ``hidden`` itself.
    """
    r, scale, *inv_rms = scales.unbind()
    pre, post, c, sinkhorn = ops.hc_split_sinkhorn_fwd(h, batch.contract)
    k, formula = batch.contract.flat_k, batch.contract.controller_rms
    again: Saved = {"hidden": ops.h_aggregate_fwd(pre, batch.r_old)} if hidden else {}
    if inv_rms:
        again["norm"] = rmsnorm.saved_of(inv_rms[0], batch.contract.hidden)
    return {
        "x_flat": batch.r_old.flatten(1),
        "p": p,
        "r": r,
        "m": r[:, None] * p,
        "h": h,
        "pre": pre,
        "post": post,
        "c": c,
        "gemm": gemm_rms.saved_of(r, scale, k, formula),
        "sinkhorn": sinkhorn,
        **gemm_rms.named_formula(formula),
        **again,
    }


def controller_grads(grads: Grads, like: Tensor) -> ControllerTensors:
    """The five controller gradients, FP32 and contiguous; empty ones where ``mixer-frozen`` left ``None``."""
    found = (grads[key] for key in CONTROLLER_GRADS)
    weight, pre, post, res, bias = (like.new_empty(0, dtype=FP32) if g is None else stored(g, FP32) for g in found)
    return weight, pre, post, res, bias


def controller_fakes(controller: Sequence[Tensor], trainable: bool) -> ControllerTensors:
    """Tensors of the shapes and strides of ``controller_grads``, of the five parameters."""
    weight, pre, post, res, bias = fakes_of(controller, trainable)
    return weight, pre, post, res, bias


def fakes_of(parameters: Sequence[Tensor], trainable: bool) -> Iterator[Tensor]:
    """An FP32 tensor of each parameter's shape; empty ones where nothing is to be trained."""
    return (t.new_empty(t.shape if trainable else 0, dtype=FP32) for t in parameters)
