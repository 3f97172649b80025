"""fp32_gemm_rms against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rl_engine.mhc import oracle
from tests.operators.support import (
    BF16,
    FP32,
    LAYOUTS,
    Draws,
    assert_fault,
    assert_fresh,
    assert_leaves_unchanged,
    assert_same_leaves,
    edge_rows,
    faults,
    relaid,
    tensors,
)
from tests.reference import autograd64, exact
from tests.reference.autograd64 import Bound
from tests.reference.bridge import TORCH_ELEMENTARY, assert_encodings, assert_same_tensor, to_exact
from tests.reference.scalar import round_f32

EPS = 1e-6
N = 24  # the frozen controller layout
BOUNDS = {
    "x": Bound(98, "a fold over N=24 (2N) and the RMS leg: 10 operations after a fold over K=20 (2K)"),
    "weight": Bound(12, "a fold over T=6: 2T"),
}


def check(x: Tensor, weight: Tensor, dp: Tensor, dr: Tensor, eps: float = EPS) -> None:
    ex, ew = to_exact(x), to_exact(weight)
    want = exact.gemm_rms_fwd(ex, ew, round_f32(Fraction(eps)), TORCH_ELEMENTARY)
    p, r, saved = oracle.fp32_gemm_rms_fwd(x, weight, eps)
    assert_encodings("p", p, want.p)
    assert_encodings("r", r, want.r)
    assert set(saved) == {"s", "norm", "q", "r", "k"}
    assert saved["k"] == x.shape[1]
    for key in ("s", "norm", "q", "r"):
        assert_encodings(f"saved {key}", saved[key], getattr(want, key))
    dx, dw = oracle.fp32_gemm_rms_bwd(dp, dr, x, weight, saved)
    want_dx, want_dw = exact.gemm_rms_bwd(to_exact(dp), to_exact(dr), ex, ew, want)
    assert_encodings("dx", dx, want_dx)
    assert_encodings("dw", dw, want_dw)


def inputs(name: str, tokens: int, k: int, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    draws = Draws(f"gemm_rms {name}")
    return {
        "dp": draws(tokens, N),
        "dr": draws(tokens),
        "x_flat": draws(tokens, k, dtype=dtype),
        "weight": draws(N, k, scale=k**-0.5),
    }


def forward(args: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return oracle.fp32_gemm_rms_fwd(args["x_flat"], args["weight"], EPS)


def backward(args: dict[str, Any], saved: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return oracle.fp32_gemm_rms_bwd(args["dp"], args["dr"], args["x_flat"], args["weight"], saved)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "k"), [(1, 4), (3, 12), (2, 20), (9, 16)])
def test_random(tokens: int, k: int, dtype: torch.dtype) -> None:
    args = inputs(f"{tokens} {k}", tokens, k, dtype)
    check(args["x_flat"], args["weight"], args["dp"], args["dr"])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_edge_rows(dtype: torch.dtype) -> None:
    x = edge_rows("gemm_rms edges", 8, dtype)
    draws = Draws("gemm_rms edge grads")
    check(x, draws(N, 8), draws(x.shape[0], N), draws(x.shape[0]))
    weight = edge_rows("gemm_rms edge weights", 8, FP32).repeat(2, 1)[:N]
    check(x, weight, draws(x.shape[0], N), draws(x.shape[0]))


def test_edge_gradients() -> None:
    dp = edge_rows("gemm_rms edge dp", N, FP32)
    draws = Draws("gemm_rms edge inputs")
    check(draws(dp.shape[0], 8, dtype=BF16), draws(N, 8), dp, dp[:, 0].clone())


@settings(max_examples=30)
@given(tensors(2, 4), tensors(N, 4), tensors(2, N), tensors(2))
def test_any_finite_encodings(x: Tensor, weight: Tensor, dp: Tensor, dr: Tensor) -> None:
    check(x, weight, dp, dr)


@settings(max_examples=30)
@given(tensors(2, 5, dtype=BF16, low=40, high=100), tensors(2, N, low=100, high=140), tensors(2))
def test_any_small_rows(x: Tensor, dp: Tensor, dr: Tensor) -> None:
    """Squares that underflow wholly or partly."""
    check(x, torch.ones(N, 5), dp, dr)


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.3])
def test_eps_is_used(eps: float) -> None:
    args = inputs("eps", 2, 8)
    check(args["x_flat"], args["weight"], args["dp"], args["dr"], eps)
    assert not torch.equal(forward(args)[1], oracle.fp32_gemm_rms_fwd(args["x_flat"], args["weight"], 0.5)[1])


def test_known_values() -> None:
    """Rows of +-3: s = 9K, q = 3 up to sqrt's own error, r = 1 / (3 + eps)."""
    p, r, saved = oracle.fp32_gemm_rms_fwd(torch.tensor([[3.0, -3.0, 3.0, -3.0]]), torch.ones(N, 4), EPS)
    assert p.tolist() == [[0.0] * N]
    assert saved["s"].tolist() == [36.0]
    assert abs(saved["q"].item() - 3.0) <= 2.0**-22
    assert abs(r.item() - 1 / (3 + 1e-6)) <= 2.0**-24


def test_zero_row_has_a_zero_rms_leg_and_its_own_gemm_leg() -> None:
    x, weight, dp = torch.zeros(1, 4), torch.zeros(N, 4), torch.zeros(1, N)
    weight[5], dp[0, 5] = torch.tensor([1.0, 2.0, 3.0, 4.0]), 2.0
    _, r, saved = oracle.fp32_gemm_rms_fwd(x, weight, EPS)
    assert r.item() == pytest.approx(1e6, rel=1e-6)
    dx, dw = oracle.fp32_gemm_rms_bwd(dp, torch.tensor([5.0]), x, weight, saved)
    assert dx.tolist() == [[2.0, 4.0, 6.0, 8.0]]
    assert dw.tolist() == [[0.0] * 4] * N


def test_row_whose_squares_underflow_divides_by_one() -> None:
    """q is 0 and X is not: the guarded leg is dr * (-(r*r) * X)."""
    x, weight = torch.full((1, 4), 1e-30), torch.zeros(N, 4)
    _, r, saved = oracle.fp32_gemm_rms_fwd(x, weight, EPS)
    assert saved["q"].item() == 0.0
    dx, _ = oracle.fp32_gemm_rms_bwd(torch.zeros(1, N), torch.tensor([3.0]), x, weight, saved)
    assert_same_tensor("dx", dx, 3.0 * (-(r * r) * x))
    assert (dx < 0).all()


def test_rows_do_not_depend_on_the_batch() -> None:
    args = inputs("batch", 33, 8)
    p, r, saved = forward(args)
    dx = backward(args, saved)[0]
    for t in (0, 1, 31, 32):
        row = {k: v if k == "weight" else v[t : t + 1] for k, v in args.items()}
        alone_p, alone_r, alone_saved = forward(row)
        alone = [alone_p, alone_r, backward(row, alone_saved)[0]]
        assert_same_leaves(f"row {t}", [p[t : t + 1], r[t : t + 1], dx[t : t + 1]], alone)


def test_nan_row_moves_no_other_row() -> None:
    args = inputs("nan", 4, 8)
    bad = {k: v.clone() for k, v in args.items()}
    for key in ("dp", "dr", "x_flat"):
        bad[key][1] = float("nan")
    others = [0, 2, 3]
    good, spoiled = [], []
    for collected, values in ((good, args), (spoiled, bad)):
        p, r, saved = forward(values)
        collected += [p, r, backward(values, saved)[0]]
    assert all(t[1].isnan().all() for t in spoiled)
    assert_same_leaves("rows", [t[others] for t in spoiled], [t[others] for t in good])


def test_no_rows() -> None:
    args = inputs("empty", 0, 8)
    p, r, saved = forward(args)
    dx, dw = backward(args, saved)
    assert (p.shape, r.shape, dx.shape) == ((0, 24), (0,), (0, 8))
    assert_same_tensor("dw", dw, torch.zeros(24, 8))
    assert_fresh([p, r], args)
    assert_fresh([dx, dw], [args, saved])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_storage_inputs_and_saved_are_kept(dtype: torch.dtype, tokens: int) -> None:
    args = inputs("storage", tokens, 1, dtype)
    p, r, saved = forward(args)
    assert_fresh([p, r], args)
    assert_fresh(backward(args, saved), [args, saved])
    assert_leaves_unchanged(lambda: forward(args), args)
    assert_leaves_unchanged(lambda: backward(args, saved), [args, saved])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str) -> None:
    args = inputs("layout", 3, 8)
    moved = relaid(args, layout)
    *outputs, saved = forward(args)
    *others, other_saved = forward(moved)
    assert_same_leaves("fwd", others, outputs)
    assert_same_leaves("saved", other_saved, saved)
    assert_same_leaves("grads", backward(moved, other_saved), backward(args, saved))


def test_gradients_are_those_of_the_mathematics() -> None:
    args = inputs("autograd", 6, 20, FP32)
    leaves = {"x": args["x_flat"], "weight": args["weight"]}
    want = autograd64.gradients(autograd64.gemm_rms, leaves, [args["dp"], args["dr"]])
    saved = forward(args)[2]
    dx, dw = backward(args, saved)
    BOUNDS["x"].check("x", dx, want["x"])
    BOUNDS["weight"].check("weight", dw, want["weight"])
    no_rms_leg = backward({**args, "dr": torch.zeros(6)}, saved)[0]
    wrong_sign = backward({**args, "dr": -args["dr"]}, saved)[0]
    low_weight = backward({**args, "weight": args["weight"].to(BF16).to(FP32)}, saved)[0]
    low_dp = backward({**args, "dp": args["dp"].to(BF16).to(FP32)}, saved)[1]
    mutants = [("x", no_rms_leg), ("x", wrong_sign), ("x", low_weight), ("weight", low_dp)]
    for name, mutant in mutants:
        with pytest.raises(AssertionError, match="relative error"):
            BOUNDS[name].check(name, mutant, want[name])


BACKWARD_ARGS = inputs("arguments", 2, 8)
FORWARD_ARGS = {**{k: BACKWARD_ARGS[k] for k in ("x_flat", "weight")}, "eps": EPS}


@pytest.mark.parametrize(("field", "fault"), faults({"x_flat": (), "weight": ("bf16", "tokens")}))
def test_forward_refuses(field: str, fault: str) -> None:
    also = ("x_flat", "weight") if fault in ("width", "device") else ()
    assert_fault(oracle.fp32_gemm_rms_fwd, FORWARD_ARGS, field, fault, also)


FURTHER = {"dp": ("bf16", "tokens"), "dr": ("bf16",), "x_flat": ("tokens",), "weight": ("bf16", "tokens")}


@pytest.mark.parametrize(("field", "fault"), faults(FURTHER))
def test_backward_refuses(field: str, fault: str) -> None:
    saved = forward(BACKWARD_ARGS)[2]
    also = BACKWARD_ARGS if fault in ("width", "tokens", "device") else ()
    assert_fault(oracle.fp32_gemm_rms_bwd, {**BACKWARD_ARGS, "saved": saved}, field, fault, also)
