"""The block's hand-written backward against autograd in FP64, and the refusals of mhc_pre and the block."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.mhc import oracle
from rl_engine.mhc.contract import GradBoundary
from tests.operators.block_inputs import block_leaves, grad_leaves, make_block, with_leaves
from tests.operators.support import BF16, FAULTS, FP32, Draws, assert_fault
from tests.reference import autograd64
from tests.reference.autograd64 import BlockTensors, Bound

# Everything after the controller carries the error of h: folds over K=44 (2K = 88) and about 10 operations.
# Gradients that come back through Sinkhorn add its 400 roundings (see test_sinkhorn).
H = 98
SINKHORN = 400
BOUNDS = {
    "d_r_old": Bound(H + SINKHORN + 48 + 4, "h, Sinkhorn, a fold over N=24, the sum of three legs"),
    "dy_sublayer": Bound(H + 7, "h, sigmoid (as 4 roundings), a tree of 3"),
    "d_gamma": Bound(8 + 22 + 4, "a fold over T=4 of terms that carry a fold over D=11 and 4 operations"),
    "d_controller_weight": Bound(H + SINKHORN + 8, "h, Sinkhorn, a fold over T=4"),
    "d_alpha_pre": Bound(H + 22 + 8 + 8 + 4, "h, sigmoid's derivative, folds over D=11, T=4 and 4 columns"),
    "d_alpha_post": Bound(H + 22 + 8 + 8 + 4, "likewise"),
    "d_alpha_res": Bound(H + SINKHORN + 8 + 16, "h, Sinkhorn, folds over T=4 and 16 columns"),
    "d_bias": Bound(H + SINKHORN + 4, "h, Sinkhorn, a fold over T=4"),
}
LEAF_OF = {
    "d_r_old": "r_old",
    "dy_sublayer": "y",
    "d_gamma": "gamma",
    "d_controller_weight": "weight",
    "d_alpha_pre": "alpha_pre",
    "d_alpha_post": "alpha_post",
    "d_alpha_res": "alpha_res",
    "d_bias": "bias",
}


@pytest.fixture(scope="module")
def case() -> dict[str, Any]:
    batch, grads = make_block("autograd", 4, 11, gamma_dtype=FP32)
    _, saved = oracle.mhc_block_forward(batch)

    def fn(**leaves: Tensor) -> tuple[Tensor, ...]:
        return autograd64.block(BlockTensors(**leaves), saved["hidden"].to(torch.float64))

    want = autograd64.gradients(fn, block_leaves(batch), grad_leaves(grads))
    return {"batch": batch, "grads": grads, "saved": saved, "want": want}


def backward(case: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = {**case, **changes}
    return oracle.mhc_block_backward(values["batch"], values["saved"], values["grads"])


@pytest.mark.parametrize("key", BOUNDS)
def test_gradient_is_that_of_the_mathematics(case: dict[str, Any], key: str) -> None:
    BOUNDS[key].check(key, backward(case)[key], case["want"][LEAF_OF[key]])


def wrong_backwards(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    batch, grads, saved = case["batch"], case["grads"], case["saved"]
    eighteen = {**saved["sinkhorn"], "steps": saved["sinkhorn"]["steps"][2:]}
    zero = {key: torch.zeros_like(getattr(grads, key)) for key in ("d_normalized", "d_residual")}
    return {
        "two Sinkhorn steps left out": backward(case, saved={**saved, "sinkhorn": eighteen}),
        "comb transposed": backward(case, saved={**saved, "c": saved["c"].transpose(1, 2).contiguous()}),
        "r off by 2**-11": backward(case, saved={**saved, "r": saved["r"] * (1 + 2.0**-11)}),
        "no norm leg": backward(case, grads=dataclasses.replace(grads, **zero)),
        "POST halved": backward(case, saved={**saved, "post": saved["post"] / 2}),
        "BF16 m": backward(case, saved={**saved, "m": saved["m"].to(BF16).to(FP32)}),
        "BF16 alpha": backward(case, batch=with_leaves(batch, alpha_pre=batch.controller.alpha_pre.to(BF16).to(FP32))),
    }


CAUGHT = [
    ("two Sinkhorn steps left out", "d_controller_weight"),
    ("two Sinkhorn steps left out", "d_alpha_res"),
    ("two Sinkhorn steps left out", "d_bias"),
    ("comb transposed", "d_r_old"),
    ("r off by 2**-11", "d_controller_weight"),
    ("no norm leg", "d_gamma"),
    ("POST halved", "dy_sublayer"),
    ("BF16 m", "d_alpha_pre"),
    ("BF16 m", "d_alpha_post"),
    ("BF16 m", "d_alpha_res"),
    ("BF16 alpha", "d_r_old"),
]


def test_every_bound_is_shown_to_fail() -> None:
    assert {key for _, key in CAUGHT} == set(BOUNDS)


@pytest.mark.parametrize(("mutant", "key"), CAUGHT)
def test_a_wrong_gradient_breaks_its_bound(case: dict[str, Any], mutant: str, key: str) -> None:
    got = wrong_backwards(case)[mutant][key]
    scale = case["want"][LEAF_OF[key]].abs().max()
    if mutant == "no norm leg":
        assert (got == 0).all()
    with pytest.raises(AssertionError, match="relative error"):
        BOUNDS[key].check(key, got / scale, case["want"][LEAF_OF[key]] / scale)


def spoiled(field: str, fault: str) -> tuple[type[Exception], Any]:
    """The error that a fault must raise, and a batch that has it."""
    batch, _ = make_block("refusals", 2, 3)
    error, spoil = FAULTS[fault]
    return error, with_leaves(batch, **{field: spoil(block_leaves(batch)[field])})


@pytest.mark.parametrize("fault", ["rank", "flat", "fp64", "fp16", "int", "fp32", "device"])
@pytest.mark.parametrize("field", ["r_old", "y"])
def test_block_refuses_streams(field: str, fault: str) -> None:
    error, batch = spoiled(field, fault)
    with pytest.raises(error, match="y_sublayer" if (field, fault) == ("r_old", "device") else field):
        oracle.mhc_block_forward(batch)


@pytest.mark.parametrize("fault", ["rank", "fp64", "fp16", "int", "bf16", "width", "device"])
@pytest.mark.parametrize("field", ["weight", "alpha_pre", "alpha_post", "alpha_res", "bias"])
def test_block_refuses_controller_parameters(field: str, fault: str) -> None:
    error, batch = spoiled(field, fault)
    with pytest.raises(error, match="alpha_pre" if (field, fault) == ("weight", "device") else field):
        oracle.mhc_block_forward(batch)


@pytest.mark.parametrize("fault", ["bf16", "fp64", "width"])
@pytest.mark.parametrize("field", ["weight", "alpha_pre", "alpha_res", "bias"])
def test_pre_alone_refuses_controller_parameters(field: str, fault: str) -> None:
    """Called without the block, mhc_pre is the first to see the batch."""
    error, batch = spoiled(field, fault)
    for entry in (oracle.mhc_pre_fwd, oracle.mhc_pre_rmsnorm_fused_fwd):
        with pytest.raises(error, match=field):
            entry(batch)


@pytest.mark.parametrize("fault", ["rank", "flat", "fp64", "fp16", "int", "width", "tokens", "device"])
@pytest.mark.parametrize("field", ["dhidden", "dpost", "dc"])
def test_pre_backward_refuses(field: str, fault: str) -> None:
    batch, _ = make_block("refusals", 2, 3)
    draws = Draws("block refusal grads")
    args: dict[str, Any] = {"dhidden": draws(2, 3), "dpost": draws(2, 4), "dc": draws(2, 4, 4), "batch": batch}
    saved = oracle.mhc_pre_fwd(batch)[-1]
    # dhidden comes first: where sizes or devices disagree, the field that it disagrees with may be named.
    also = ("dpost", "r_old") if field == "dhidden" and fault in ("width", "tokens", "device") else ()
    assert_fault(oracle.mhc_pre_bwd, {**args, "saved": saved}, field, fault, also)


@pytest.mark.parametrize("fault", ["rank", "flat", "fp64", "fp16", "int", "fp32", "width", "tokens", "device"])
@pytest.mark.parametrize("field", ["d_r_new", "d_normalized", "d_residual"])
def test_block_backward_refuses(field: str, fault: str) -> None:
    batch, grads = make_block("refusals", 2, 3)
    _, saved = oracle.mhc_block_forward(batch)
    error, spoil = FAULTS[fault]
    bad: GradBoundary = dataclasses.replace(grads, **{field: spoil(getattr(grads, field))})
    with pytest.raises(error, match=field):
        oracle.mhc_block_backward(batch, saved, bad)


def test_a_stale_fingerprint_is_refused() -> None:
    batch, _ = make_block("refusals", 2, 3)
    other = with_leaves(batch, bias=batch.controller.bias + 1)
    with pytest.raises(ValueError, match="weight_fingerprint"):
        oracle.mhc_block_forward(dataclasses.replace(other, weight_fingerprint=batch.weight_fingerprint))
