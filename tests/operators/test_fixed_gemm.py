"""fixed_k_gemm against exact arithmetic."""

from __future__ import annotations

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
from tests.reference.bridge import assert_encodings, assert_same_tensor, to_exact

BOUNDS = {
    "x": Bound(14, "N=7 products folded in order: 2N"),
    "w": Bound(12, "M=6 products folded in order: 2M"),
}


def check(x: Tensor, w: Tensor, dy: Tensor) -> None:
    ex, ew, edy = to_exact(x), to_exact(w), to_exact(dy)
    assert_encodings("y", oracle.fixed_k_gemm_fwd(x, w), exact.fixed_gemm_fwd(ex, ew))
    dx, dw = oracle.fixed_k_gemm_bwd(dy, x, w)
    want_dx, want_dw = exact.fixed_gemm_bwd(edy, ex, ew)
    assert_encodings("dx", dx, want_dx)
    assert_encodings("dw", dw, want_dw)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 3, 5), (4, 2, 9), (17, 3, 4), (3, 24, 16)])
def test_random(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    draws = Draws(f"fixed_gemm {m} {n} {k} {dtype}")
    check(draws(m, k, dtype=dtype), draws(n, k, dtype=dtype), draws(m, n, dtype=dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_edge_rows(dtype: torch.dtype) -> None:
    x = edge_rows("fixed_gemm edges", 5, dtype)
    draws = Draws("fixed_gemm edge weights")
    check(x, draws(3, 5, dtype=dtype), draws(x.shape[0], 3))
    check(draws(3, 5, dtype=dtype), x, draws(3, x.shape[0]))


@settings(max_examples=40)
@given(tensors(2, 3), tensors(2, 3), tensors(2, 2))
def test_any_finite_encodings(x: Tensor, w: Tensor, dy: Tensor) -> None:
    check(x, w, dy)


@settings(max_examples=40)
@given(tensors(2, 6, low=110, high=140), tensors(3, 6, low=110, high=140))
def test_scaling_by_a_power_of_two_is_exact(x: Tensor, w: Tensor) -> None:
    assert_same_tensor("2x", oracle.fixed_k_gemm_fwd(2 * x, w), 2 * oracle.fixed_k_gemm_fwd(x, w))


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([2.0**24, 1.0, -(2.0**24)], 0.0),  # the 1 is lost to an even tie
        ([2.0**24, -(2.0**24), 1.0], 1.0),
        ([1.0, 2.0**24, -(2.0**24)], 0.0),
        ([2.0**24, 1.0, 1.0], 2.0**24),  # a tree would give 2**24 + 2
    ],
)
def test_fold_is_ascending_and_serial(row: list[float], want: float) -> None:
    assert oracle.fixed_k_gemm_fwd(torch.tensor([row]), torch.ones(1, 3)).item() == want


def test_product_rounds_before_it_is_added() -> None:
    x = torch.tensor([[-(1 + 2.0**-11), 1 + 2.0**-12]])
    w = torch.tensor([[1.0, 1 + 2.0**-12]])
    assert oracle.fixed_k_gemm_fwd(x, w).item() == 0.0  # one fused multiply-add would leave 2**-24


def test_negative_zero_products_sum_to_positive_zero() -> None:
    y = oracle.fixed_k_gemm_fwd(torch.full((2, 3), -0.0), torch.ones(2, 3))
    assert not torch.signbit(y).any() and (y == 0).all()


def test_rows_do_not_depend_on_the_batch() -> None:
    draws = Draws("fixed_gemm batch")
    x, w = draws(33, 7), draws(3, 7)
    full = oracle.fixed_k_gemm_fwd(x, w)
    for t in (0, 1, 31, 32):
        assert_same_tensor(f"row {t}", full[t : t + 1], oracle.fixed_k_gemm_fwd(x[t : t + 1], w))


def test_nan_row_moves_no_other_row() -> None:
    draws = Draws("fixed_gemm nan")
    x, w, dy = draws(4, 5), draws(3, 5), draws(4, 3)
    bad_x, bad_dy = x.clone(), dy.clone()
    bad_x[1], bad_dy[1] = float("nan"), float("nan")
    others = [0, 2, 3]
    y, bad_y = oracle.fixed_k_gemm_fwd(x, w), oracle.fixed_k_gemm_fwd(bad_x, w)
    assert bad_y[1].isnan().all()
    assert_same_tensor("y", bad_y[others], y[others])
    dx, bad_dx = oracle.fixed_k_gemm_bwd(dy, x, w)[0], oracle.fixed_k_gemm_bwd(bad_dy, bad_x, w)[0]
    assert_same_tensor("dx", bad_dx[others], dx[others])


def test_no_rows() -> None:
    x, w, dy = torch.empty(0, 5), torch.ones(3, 5), torch.empty(0, 3)
    y = oracle.fixed_k_gemm_fwd(x, w)
    dx, dw = oracle.fixed_k_gemm_bwd(dy, x, w)
    assert (y.shape, dx.shape) == ((0, 3), (0, 5))
    assert_same_tensor("dw", dw, torch.zeros(3, 5))
    assert_fresh([y], [x, w])
    assert_fresh([dx, dw], [x, w, dy])


def test_storage_and_inputs_are_kept() -> None:
    draws = Draws("fixed_gemm storage")
    x, w, dy = draws(2, 1), draws(1, 1), draws(2, 1)
    assert_fresh(oracle.fixed_k_gemm_fwd(x, w), [x, w])
    assert_fresh(oracle.fixed_k_gemm_bwd(dy, x, w), [x, w, dy])
    assert_leaves_unchanged(lambda: oracle.fixed_k_gemm_bwd(dy, x, w), [x, w, dy])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str) -> None:
    draws = Draws("fixed_gemm layout")
    args = {"dy": draws(4, 3), "x": draws(4, 6), "w": draws(3, 6)}
    moved = relaid(args, layout)
    y = oracle.fixed_k_gemm_fwd(args["x"], args["w"])
    assert_same_tensor("y", oracle.fixed_k_gemm_fwd(moved["x"], moved["w"]), y)
    assert_same_leaves("grads", oracle.fixed_k_gemm_bwd(**moved), oracle.fixed_k_gemm_bwd(**args))


def test_gradients_are_those_of_the_mathematics() -> None:
    draws = Draws("fixed_gemm autograd")
    x, w, dy = draws(6, 11), draws(7, 11), draws(6, 7)
    want = autograd64.gradients(autograd64.fixed_gemm, {"x": x, "w": w}, [dy])
    dx, dw = oracle.fixed_k_gemm_bwd(dy, x, w)
    BOUNDS["x"].check("x", dx, want["x"])
    BOUNDS["w"].check("w", dw, want["w"])
    with pytest.raises(AssertionError, match="relative error"):
        BOUNDS["x"].check("x", oracle.fixed_k_gemm_bwd(dy.to(BF16), x, w)[0], want["x"])
    with pytest.raises(AssertionError, match="relative error"):
        BOUNDS["w"].check("w", oracle.fixed_k_gemm_bwd(dy, x.flip(0), w)[1], want["w"])


FORWARD_ARGS = {"x": torch.ones(2, 5), "w": torch.ones(3, 5)}
BACKWARD_ARGS = {"dy": torch.ones(2, 3), **FORWARD_ARGS}


@pytest.mark.parametrize(("field", "fault"), faults({"x": (), "w": ()}))
def test_forward_refuses(field: str, fault: str) -> None:
    also = FORWARD_ARGS if fault in ("width", "device") else ()
    assert_fault(oracle.fixed_k_gemm_fwd, FORWARD_ARGS, field, fault, also)


@pytest.mark.parametrize(("field", "fault"), faults({"dy": ("tokens",), "x": ("tokens",), "w": ("tokens",)}))
def test_backward_refuses(field: str, fault: str) -> None:
    also = BACKWARD_ARGS if fault in ("width", "tokens", "device") else ()
    assert_fault(oracle.fixed_k_gemm_bwd, BACKWARD_ARGS, field, fault, also)
