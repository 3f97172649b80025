"""rmsnorm_residual against exact arithmetic."""

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
BOUNDS = {
    "x": Bound(88, "two folds over D=19 (2D each), then 12 operations"),
    "gamma": Bound(52, "a fold over T=5 (2T) of terms that carry a fold over D=19 (2D) and 4 operations"),
}


def check(x: Tensor, gamma: Tensor, dy: Tensor, d_residual: Tensor, eps: float = EPS) -> None:
    ex, eg = to_exact(x), to_exact(gamma)
    want = exact.rmsnorm_fwd(ex, eg, round_f32(Fraction(eps)), TORCH_ELEMENTARY)
    y, residual, saved = oracle.rmsnorm_residual_fwd(x, gamma, eps)
    assert_encodings("y", y, want.y, BF16)
    assert_same_tensor("residual", residual, x)
    assert set(saved) == {"r", "x32", "d"}
    assert saved["d"] == x.shape[1]
    assert_encodings("saved r", saved["r"], want.r)
    assert_encodings("saved x32", saved["x32"], ex)
    dx, dgamma = oracle.rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved)
    want_dx, want_dgamma = exact.rmsnorm_bwd(to_exact(dy), to_exact(d_residual), ex, eg, want.r)
    assert_encodings("dx", dx, want_dx)
    assert_encodings("dgamma", dgamma, want_dgamma)


def inputs(
    name: str, tokens: int, width: int, gamma_dtype: torch.dtype = BF16, grad_dtype: torch.dtype = BF16
) -> dict[str, Tensor]:
    draws = Draws(f"rmsnorm {name}")
    return {
        "dy": draws(tokens, width, dtype=grad_dtype),
        "d_residual": draws(tokens, width, dtype=grad_dtype, scale=0.25),
        "x": draws(tokens, width, dtype=BF16),
        "gamma": (1 + draws(width, scale=0.05)).to(gamma_dtype),
    }


def forward(args: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return oracle.rmsnorm_residual_fwd(args["x"], args["gamma"], EPS)


def backward(args: dict[str, Any], saved: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return oracle.rmsnorm_residual_bwd(args["dy"], args["d_residual"], args["x"], args["gamma"], saved)


def run_check(args: dict[str, Tensor]) -> None:
    check(args["x"], args["gamma"], args["dy"], args["d_residual"])


@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
@pytest.mark.parametrize("gamma_dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 5), (3, 4), (17, 7)])
def test_random(tokens: int, width: int, gamma_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    run_check(inputs(f"{tokens} {width}", tokens, width, gamma_dtype, grad_dtype))


@pytest.mark.parametrize("gamma_dtype", [FP32, BF16])
def test_edge_rows(gamma_dtype: torch.dtype) -> None:
    x = edge_rows("rmsnorm edges", 6, BF16)
    draws = Draws("rmsnorm edge grads")
    gamma = draws(6, dtype=gamma_dtype)
    check(x, gamma, draws(x.shape[0], 6), draws(x.shape[0], 6))
    check(draws(x.shape[0], 6, dtype=BF16), gamma, x, x.flip(0))
    for row in edge_rows("rmsnorm edge gammas", 6, gamma_dtype):
        check(x[:3], row, draws(3, 6), draws(3, 6))


@settings(max_examples=30)
@given(tensors(2, 3, dtype=BF16), tensors(3), tensors(2, 3), tensors(2, 3))
def test_any_finite_encodings(x: Tensor, gamma: Tensor, dy: Tensor, d_residual: Tensor) -> None:
    check(x, gamma, dy, d_residual)


@settings(max_examples=30)
@given(tensors(2, 5, dtype=BF16, low=110, high=140), tensors(5, dtype=BF16, low=120, high=130))
def test_any_usual_encodings(x: Tensor, gamma: Tensor) -> None:
    check(x, gamma, x.flip(0), x.flip(1))


@settings(max_examples=40)
@given(tensors(2, 5, dtype=BF16, low=110, high=140), tensors(5, low=110, high=140))
def test_gamma_scales_by_a_power_of_two(x: Tensor, gamma: Tensor) -> None:
    y = oracle.rmsnorm_residual_fwd(x, gamma, EPS)[0]
    assert_same_tensor("4y", oracle.rmsnorm_residual_fwd(x, 4 * gamma, EPS)[0], 4 * y)


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.3])
def test_eps_is_used(eps: float) -> None:
    args = inputs("eps", 2, 5)
    check(args["x"], args["gamma"], args["dy"], args["d_residual"], eps)
    other = oracle.rmsnorm_residual_fwd(args["x"], args["gamma"], 0.5)[2]["r"]
    assert not torch.equal(forward(args)[2]["r"], other)


def test_known_values() -> None:
    """A zero row: r = rsqrt(eps), y = 0, and dX = r * (dy * gamma) + d_residual."""
    x, gamma = torch.tensor([[0.0, -0.0]], dtype=BF16), torch.tensor([2.0, 3.0])
    y, residual, saved = oracle.rmsnorm_residual_fwd(x, gamma, EPS)
    assert torch.signbit(y).tolist() == torch.signbit(residual).tolist() == [[False, True]]
    assert saved["r"].item() == pytest.approx(1000.0, rel=1e-6)
    r = saved["r"].item()
    dx, dgamma = oracle.rmsnorm_residual_bwd(torch.ones(1, 2), torch.full((1, 2), 0.5), x, gamma, saved)
    assert dx.tolist() == [[torch.tensor(2 * r + 0.5).item(), torch.tensor(3 * r + 0.5).item()]]
    assert dgamma.tolist() == [0.0, 0.0]


def test_gamma_multiplies_before_the_only_rounding() -> None:
    """For these inputs (x*r) rounded to BF16 before gamma gives other bytes: the order is observable and pinned."""
    args = inputs("cast order", 8, 64, FP32)
    y, _, saved = forward(args)
    cast_before = ((args["x"].to(FP32) * saved["r"][:, None]).to(BF16).to(FP32) * args["gamma"]).to(BF16)
    cast_after = ((args["x"].to(FP32) * saved["r"][:, None]) * args["gamma"]).to(BF16)
    assert not torch.equal(cast_before, cast_after)
    assert_same_tensor("y", y, cast_after)


def test_rows_do_not_depend_on_the_batch() -> None:
    args = inputs("batch", 33, 7)
    y, residual, saved = forward(args)
    dx = backward(args, saved)[0]
    for t in (0, 1, 31, 32):
        row = {k: v if k == "gamma" else v[t : t + 1] for k, v in args.items()}
        alone_y, alone_residual, alone_saved = forward(row)
        alone = [alone_y, alone_residual, backward(row, alone_saved)[0]]
        assert_same_leaves(f"row {t}", [y[t : t + 1], residual[t : t + 1], dx[t : t + 1]], alone)


def test_nan_row_moves_no_other_row() -> None:
    args = inputs("nan", 4, 5)
    bad = {k: v.clone() for k, v in args.items()}
    for key in ("dy", "d_residual", "x"):
        bad[key][1] = float("nan")
    others = [0, 2, 3]
    good, spoiled = [], []
    for collected, values in ((good, args), (spoiled, bad)):
        y, residual, saved = forward(values)
        collected += [y, residual, backward(values, saved)[0]]
    assert all(t[1].isnan().all() for t in spoiled)
    assert_same_leaves("rows", [t[others] for t in spoiled], [t[others] for t in good])


def test_no_rows() -> None:
    args = inputs("empty", 0, 5)
    y, residual, saved = forward(args)
    dx, dgamma = backward(args, saved)
    assert (y.shape, residual.shape, dx.shape) == ((0, 5), (0, 5), (0, 5))
    assert (y.dtype, residual.dtype, dx.dtype) == (BF16, BF16, FP32)
    assert_same_tensor("dgamma", dgamma, torch.zeros(5))
    assert_fresh([y, residual], args)
    assert_fresh([dx, dgamma], [args, saved])


@pytest.mark.parametrize("gamma_dtype", [FP32, BF16])
def test_storage_inputs_and_saved_are_kept(gamma_dtype: torch.dtype) -> None:
    args = inputs("storage", 2, 1, gamma_dtype, FP32)
    y, residual, saved = forward(args)
    assert_fresh([y, residual], args)
    assert_fresh(backward(args, saved), [args, saved])
    assert_leaves_unchanged(lambda: forward(args), args)
    assert_leaves_unchanged(lambda: backward(args, saved), [args, saved])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str) -> None:
    args = inputs("layout", 3, 6)
    moved = relaid(args, layout)
    *outputs, saved = forward(args)
    *others, other_saved = forward(moved)
    assert_same_leaves("fwd", others, outputs)
    assert_same_leaves("saved", other_saved, saved)
    assert_same_leaves("grads", backward(moved, other_saved), backward(args, saved))


def test_gradients_are_those_of_the_mathematics() -> None:
    args = inputs("autograd", 5, 19, FP32, FP32)

    def both(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return autograd64.rmsnorm(x, gamma), x

    leaves = {"x": args["x"], "gamma": args["gamma"]}
    want = autograd64.gradients(both, leaves, [args["dy"], args["d_residual"]])
    saved = forward(args)[2]
    dx, dgamma = backward(args, saved)
    BOUNDS["x"].check("x", dx, want["x"])
    BOUNDS["gamma"].check("gamma", dgamma, want["gamma"])
    no_residual = backward({**args, "d_residual": torch.zeros(5, 19)}, saved)[0]
    no_correction = saved["r"][:, None] * (args["dy"] * args["gamma"]) + args["d_residual"]
    low_gradient = backward({**args, "dy": args["dy"].to(BF16)}, saved)
    mutants = [("x", no_residual), ("x", no_correction), ("x", low_gradient[0]), ("gamma", low_gradient[1])]
    for name, mutant in mutants:
        with pytest.raises(AssertionError, match="relative error"):
            BOUNDS[name].check(name, mutant, want[name])


BACKWARD_ARGS = inputs("arguments", 2, 5)
FORWARD_ARGS = {"x": BACKWARD_ARGS["x"], "gamma": BACKWARD_ARGS["gamma"], "eps": EPS}
FURTHER = {"dy": ("tokens",), "d_residual": ("tokens",), "x": ("fp32", "tokens"), "gamma": ()}


@pytest.mark.parametrize(("field", "fault"), faults({"x": ("fp32",), "gamma": ()}))
def test_forward_refuses(field: str, fault: str) -> None:
    also = ("x", "gamma") if fault in ("width", "device") else ()
    assert_fault(oracle.rmsnorm_residual_fwd, FORWARD_ARGS, field, fault, also)


@pytest.mark.parametrize(("field", "fault"), faults(FURTHER))
def test_backward_refuses(field: str, fault: str) -> None:
    saved = forward(BACKWARD_ARGS)[2]
    also = BACKWARD_ARGS if fault in ("width", "tokens", "device") else ()
    assert_fault(oracle.rmsnorm_residual_bwd, {**BACKWARD_ARGS, "saved": saved}, field, fault, also)
