"""The controller's scale under rsqrt-mean-plus-eps, the formula of the released model: every law that P1's has."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rl_engine.mhc import fixtures, oracle
from rl_engine.mhc.block import GRAD_KEYS
from rl_engine.mhc.contract import CONTROLLER_RMS, P1_RMS, PORTABLE_PROFILE, RELEASED_RMS
from rl_engine.mhc.trace import MHCTrace
from tests.operators.block_inputs import block_leaves, exact_input, grad_leaves, make_block, with_leaves
from tests.operators.support import BF16, FP32, Draws, assert_fresh, edge_rows, tensors
from tests.operators.test_block import check_backward, check_controller, check_forward, run
from tests.operators.test_block_gradients import BOUNDS as BLOCK_BOUNDS
from tests.operators.test_block_gradients import LEAF_OF
from tests.operators.test_gemm_rms import BOUNDS, EPS, N, inputs
from tests.reference import autograd64, exact, exact_block
from tests.reference.autograd64 import BlockTensors
from tests.reference.bridge import TORCH_ELEMENTARY, assert_encodings, assert_same_tensor, to_exact
from tests.reference.scalar import round_f32


def forward(x: Tensor, weight: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return oracle.fp32_gemm_rms_fwd(x, weight, eps, RELEASED_RMS)


def check(x: Tensor, weight: Tensor, dp: Tensor, dr: Tensor, eps: float = EPS) -> None:
    ex, ew = to_exact(x), to_exact(weight)
    want = exact.gemm_rms_fwd(ex, ew, round_f32(Fraction(eps)), TORCH_ELEMENTARY, released=True)
    p, r, saved = forward(x, weight, eps)
    assert_encodings("p", p, want.p)
    assert_encodings("r", r, want.r)
    assert set(saved) == {"s", "mean", "r", "k", "controller_rms"}
    assert (saved["k"], saved["controller_rms"]) == (x.shape[1], RELEASED_RMS)
    for key in ("s", "mean", "r"):
        assert_encodings(f"saved {key}", saved[key], getattr(want, key))
    dx, dw = oracle.fp32_gemm_rms_bwd(dp, dr, x, weight, saved)
    want_dx, want_dw = exact.gemm_rms_bwd(to_exact(dp), to_exact(dr), ex, ew, want)
    assert_encodings("dx", dx, want_dx)
    assert_encodings("dw", dw, want_dw)


# --- the operator ---


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "k"), [(0, 8), (1, 4), (3, 12), (2, 20), (9, 16)])
def test_random(tokens: int, k: int, dtype: torch.dtype) -> None:
    args = inputs(f"released {tokens} {k}", tokens, k, dtype)
    check(args["x_flat"], args["weight"], args["dp"], args["dr"])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_edge_rows(dtype: torch.dtype) -> None:
    x, draws = edge_rows("released edges", 8, dtype), Draws("released edge grads")
    check(x, draws(N, 8), draws(x.shape[0], N), draws(x.shape[0]))


@settings(max_examples=30)
@given(tensors(2, 4), tensors(N, 4), tensors(2, N), tensors(2))
def test_any_finite_encodings(x: Tensor, weight: Tensor, dp: Tensor, dr: Tensor) -> None:
    check(x, weight, dp, dr)


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.3])
def test_eps_is_inside_the_root(eps: float) -> None:
    args = inputs("released eps", 2, 8)
    check(args["x_flat"], args["weight"], args["dp"], args["dr"], eps)


def test_known_values_that_no_other_formula_gives() -> None:
    """A row of 0.002 has a mean square of 4 eps: r is 1 / sqrt(5 eps), where P1's formula has 1 / (2e-3 + eps)."""
    x = torch.full((1, 8), 0.002)
    _, r, saved = forward(x, torch.ones(N, 8))
    assert saved["mean"].item() == pytest.approx(5e-6, rel=1e-6)
    assert r.item() == pytest.approx((5e-6) ** -0.5, rel=1e-6)
    assert oracle.fp32_gemm_rms_fwd(x, torch.ones(N, 8), EPS)[1].item() == pytest.approx(1 / 0.002001, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30])
def test_a_zero_row_is_finite(value: float) -> None:
    """Its mean is eps, so nothing divides by zero; the RMS leg is finite, and zero where x is."""
    x, dr = torch.full((1, 4), value), torch.tensor([3.0])
    p, r, saved = forward(x, torch.ones(N, 4))
    assert r.item() == pytest.approx(1e3, rel=1e-6) and p.isfinite().all()
    dx, dw = oracle.fp32_gemm_rms_bwd(torch.zeros(1, N), dr, x, torch.zeros(N, 4), saved)
    assert dx.isfinite().all() and dw.isfinite().all()
    assert bool((dx == 0).all()) == (value == 0.0)


def test_p_does_not_depend_on_the_formula() -> None:
    args = inputs("released p", 5, 12)
    assert_same_tensor("p", forward(args["x_flat"], args["weight"])[0], oracle.fp32_gemm_rms_fwd(**_named(args))[0])


def test_outputs_are_fresh() -> None:
    args = inputs("released storage", 2, 4)
    p, r, saved = forward(args["x_flat"], args["weight"])
    assert_fresh([p, r], args)
    assert_fresh(oracle.fp32_gemm_rms_bwd(args["dp"], args["dr"], **_two(args), saved=saved), [args, saved])


def test_gradients_are_those_of_the_mathematics_at_every_scale() -> None:
    """At small rows eps rules, and the two formulas have different gradients: that of the other breaks the bound."""
    for scale in (1.0, 1e-2, 1e-3):
        args = inputs(f"released autograd {scale}", 6, 20, FP32)
        args["x_flat"] *= scale
        leaves = {"x": args["x_flat"], "weight": args["weight"]}
        want = autograd64.gradients(autograd64.gemm_rms_released, leaves, [args["dp"], args["dr"]])
        saved = forward(args["x_flat"], args["weight"])[2]
        dx, dw = oracle.fp32_gemm_rms_bwd(args["dp"], args["dr"], **_two(args), saved=saved)
        BOUNDS["x"].check("x", dx, want["x"])
        BOUNDS["weight"].check("weight", dw, want["weight"])
    p1 = oracle.fp32_gemm_rms_fwd(**_named(args))[2]
    other = oracle.fp32_gemm_rms_bwd(args["dp"], args["dr"], **_two(args), saved=p1)[0]
    with pytest.raises(AssertionError, match="relative error"):
        BOUNDS["x"].check("x", other, want["x"])


def test_an_unknown_formula_is_refused() -> None:
    args = inputs("released refusal", 2, 4)
    with pytest.raises(ValueError, match=r"controller_rms: got 'rms', want one of: inverse-.*, rsqrt-.*"):
        oracle.fp32_gemm_rms_fwd(**_named(args), controller_rms="rms")


# --- the block ---


@pytest.mark.parametrize("gamma_dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "width", "scale"), [(1, 1, 1.0), (2, 3, 1e-3), (3, 4, 30.0), (3, 5, 1e-2)])
def test_block(tokens: int, width: int, scale: float, gamma_dtype: torch.dtype) -> None:
    check_block(tokens, width, scale, gamma_dtype=gamma_dtype)


@pytest.mark.parametrize("mode", [{"fusion_mode": "fused-pre-norm"}, {}])
def test_block_in_its_modes(mode: dict[str, str]) -> None:
    check_block(3, 4, 1e-2, **mode)


def check_block(tokens: int, width: int, scale: float, **contract: Any) -> None:
    batch, grads = make_block(
        f"released {tokens} {width}", tokens, width, scale=scale, controller_rms=RELEASED_RMS, **contract
    )
    numbers = exact_input(batch)
    want = exact_block.block_fwd(numbers, TORCH_ELEMENTARY, released=True)
    r_new, saved, got = run(batch, grads)
    check_forward(r_new, saved, want)
    check_backward(got, exact_block.block_bwd(*map(to_exact, grad_leaves(grads)), numbers, want))


@pytest.mark.parametrize(("scale", "keys"), [(1.0, tuple(BLOCK_BOUNDS)), (1e-2, ("d_r_old",))])
def test_block_gradients_are_those_of_the_mathematics(scale: float, keys: tuple[str, ...]) -> None:
    """At the small scale the sums over tokens cancel, so there only the rows have a bound; P1's rows break it."""
    batch, grads = make_block("released autograd", 4, 11, gamma_dtype=FP32, scale=scale, controller_rms=RELEASED_RMS)
    _, saved, got = run(batch, grads)

    def fn(**leaves: Tensor) -> tuple[Tensor, ...]:
        hidden = saved["hidden"].to(torch.float64)
        return autograd64.block(BlockTensors(**leaves), hidden, autograd64.gemm_rms_released)

    want = autograd64.gradients(fn, block_leaves(batch), grad_leaves(grads))
    for key in keys:
        BLOCK_BOUNDS[key].check(key, got[key], want[LEAF_OF[key]])
    if scale == 1.0:
        return
    p1 = dataclasses.replace(batch, contract=batch.contract.with_mode("controller_rms", P1_RMS), weight_fingerprint="")
    with pytest.raises(AssertionError, match="relative error"):
        BLOCK_BOUNDS["d_r_old"].check("d_r_old", run(p1, grads)[2]["d_r_old"], want["r_old"])


def test_a_zero_row_of_a_block_is_finite() -> None:
    for formula in CONTROLLER_RMS:
        batch, grads = make_block("released zero", 3, 4, controller_rms=formula)
        batch.r_old[1] = 0
        r_new, _, got = run(with_leaves(batch), grads)
        assert r_new.isfinite().all()
        assert all(got[key].isfinite().all() for key in GRAD_KEYS)


def test_a_backward_refuses_the_forward_of_the_other_formula() -> None:
    batch, grads = make_block("released mixed", 2, 3)
    _, saved, _ = run(batch, grads)
    other = dataclasses.replace(batch, contract=batch.contract.with_mode("controller_rms", RELEASED_RMS))
    other = dataclasses.replace(other, weight_fingerprint="")
    with pytest.raises(ValueError, match=f"controller_rms: got '{P1_RMS}', want '{RELEASED_RMS}'"):
        oracle.mhc_block_backward(other, saved, grads)


def test_the_formula_is_in_the_trace_and_in_the_fingerprints() -> None:
    notes, contracts = [], set()
    for formula in CONTROLLER_RMS:
        batch, _ = make_block("released trace", 2, 3, controller_rms=formula)
        trace = MHCTrace(batch.contract.numeric_profile)
        oracle.mhc_block_forward(batch, trace)
        notes.append(trace.notes.get("controller_rms"))
        contracts.add(batch.contract.fingerprint())
    assert notes == [None, RELEASED_RMS]
    assert len(contracts) == 2


# --- the published hashes ---


def test_one_row_from_exact_arithmetic_alone() -> None:
    batch = fixtures.make_batch("one_row", controller_rms=RELEASED_RMS)
    numbers, grads = exact_input(batch), fixtures.make_grads("one_row", batch)
    want = exact_block.block_fwd(numbers, TORCH_ELEMENTARY, released=True)
    r_new, saved, got = run(batch, grads)
    check_forward(r_new, saved, want)
    back = exact_block.block_bwd(*map(to_exact, grad_leaves(grads)), numbers, want)
    check_backward(got, back)
    check_controller(got, back.controller)
    hashes = fixtures.load_manifest(controller_rms=RELEASED_RMS)["cases"]["one_row"]
    assert fixtures.golden_manifest(controller_rms=RELEASED_RMS)["cases"]["one_row"] == hashes


@pytest.mark.parametrize("profile", [fixtures.ORACLE_PROFILE, PORTABLE_PROFILE])
def test_the_manifests_of_the_two_formulas(profile: str) -> None:
    """The same draws: what stands before the scale is the same, and every block's scale moves."""
    p1, released = (fixtures.load_manifest(numeric_profile=profile, controller_rms=f) for f in CONTROLLER_RMS)
    assert released["controller_rms"] == RELEASED_RMS and "controller_rms" not in p1
    assert set(released["cases"]) == set(p1["cases"]) - {fixtures.SINKHORN_EDGES, fixtures.RMS_EDGES}
    for name, hashes in released["cases"].items():
        before = p1["cases"][name]
        assert hashes.keys() == before.keys()
        assert hashes["controller.p"] == before["controller.p"]
        assert (hashes["controller.r"] == before["controller.r"]) == (name == "no_tokens")


def _two(args: dict[str, Any]) -> dict[str, Any]:
    return {key: args[key] for key in ("x_flat", "weight")}


def _named(args: dict[str, Any]) -> dict[str, Any]:
    return {**_two(args), "eps": EPS}
