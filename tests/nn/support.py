"""What the tests of the modules share: a module on given tensors, what it leaves, what the contract says."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from rl_engine.mhc import block
from rl_engine.mhc.bits import same_bytes
from rl_engine.mhc.contract import (
    CONTROLLER_RMS,
    ORACLE_PROFILE,
    PORTABLE_PROFILE,
    GradBoundary,
    LayerContract,
    ResidualBatch,
)
from rl_engine.mhc.fixture_inputs import draw_batch, draw_grads
from rl_engine.mhc.nn import HyperConnection, MHCController
from rl_engine.mhc.provider import ReferenceProvider

PROFILES = (ORACLE_PROFILE, PORTABLE_PROFILE)
FORMULAS = CONTROLLER_RMS
PARAMETERS = {
    "controller.weight": "d_controller_weight",
    "controller.alpha_pre": "d_alpha_pre",
    "controller.alpha_post": "d_alpha_post",
    "controller.alpha_res": "d_alpha_res",
    "controller.bias": "d_bias",
    "norm.weight": "d_gamma",
}
"""A parameter of a HyperConnection, and its gradient's key in the contract."""

Named = dict[str, Tensor]


def drawn(
    tokens: int, hidden: int = 64, profile: str = PORTABLE_PROFILE, formula: str = FORMULAS[0]
) -> tuple[ResidualBatch, Tensor]:
    """A batch, and the gradient that arrives at its new streams."""
    name = f"nn.{tokens}.{hidden}"
    batch = draw_batch(name, tokens, LayerContract(hidden=hidden, numeric_profile=profile, controller_rms=formula))
    return batch, draw_grads(name, batch).d_r_new


def module_of(batch: ResidualBatch, sublayer: nn.Module | None = None) -> HyperConnection:
    """The module with the parameters of the batch, around the identity where no sublayer is given."""
    contract = batch.contract
    module = HyperConnection(
        nn.Identity() if sublayer is None else sublayer,
        contract.hidden,
        controller_rms=contract.controller_rms,
        numeric_profile=contract.numeric_profile,
    )
    module.controller = MHCController.from_params(batch.controller)
    with torch.no_grad():
        module.norm.weight.copy_(batch.norm.gamma)
    return module


def result(module: nn.Module, streams: Tensor, d_r_new: Tensor, call: Any = None) -> Named:
    """``r_new`` and every gradient of one step; ``call`` stands for the module where it is another form of it."""
    module.zero_grad()
    x = streams.detach().clone().requires_grad_()
    out = (module if call is None else call)(x)
    out.backward(d_r_new.reshape(out.shape))
    assert x.grad is not None
    left = {"r_new": out.detach(), "d_r_old": x.grad}
    return left | {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def contract_says(batch: ResidualBatch, d_r_new: Tensor) -> Named:
    """The same, by the reference's operators, for the identity as sublayer: what leaves is stored as BF16."""
    ref = ReferenceProvider(batch.contract.numeric_profile)
    _, normalized, *_ = ref.mhc_pre_rmsnorm_fused_fwd(batch)
    batch = dataclasses.replace(batch, y_sublayer=normalized, weight_fingerprint="")
    r_new, saved = block.mhc_block_forward(batch, ops=ref)
    dy = ref.mhc_post_bwd(d_r_new, batch.r_old, normalized, saved["c"], saved["post"])[1]
    arriving = GradBoundary(d_r_new, dy.bfloat16(), torch.zeros_like(normalized))
    grads: dict[str, Any] = block.mhc_block_backward(batch, saved, arriving, ops=ref)
    left = {"r_new": r_new, "d_r_old": grads["d_r_old"].bfloat16()}
    left |= {name: grads[key] for name, key in PARAMETERS.items()}
    return left | {"norm.weight": grads["d_gamma"].to(batch.norm.gamma.dtype)}


def assert_same(got: Named, want: Named) -> None:
    assert got.keys() == want.keys()
    wrong = [name for name in want if not same_bytes(got[name].reshape(want[name].shape), want[name])]
    assert not wrong
