"""h_aggregate against exact arithmetic."""

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
from tests.reference.bridge import assert_encodings, assert_same_tensor, from_bits, to_exact

BOUNDS = {
    "r_old": Bound(1, "one product"),
    "pre": Bound(38, "D=19 products folded in order: 2D"),
}


def check(pre: Tensor, r_old: Tensor, dh: Tensor) -> None:
    epre, er, edh = to_exact(pre), to_exact(r_old), to_exact(dh)
    hidden = [exact.aggregate_fwd_row(p, r) for p, r in zip(epre, er, strict=True)]
    assert_encodings("hidden", oracle.h_aggregate_fwd(pre, r_old), hidden, BF16)
    dr, dpre = oracle.h_aggregate_bwd(dh, pre, r_old)
    grads = [exact.aggregate_bwd_row(d, p, r) for d, p, r in zip(edh, epre, er, strict=True)]
    assert_encodings("dr", dr, [g[0] for g in grads])
    assert_encodings("dpre", dpre, [g[1] for g in grads])


@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 5), (3, 4), (17, 3)])
def test_random(tokens: int, width: int, grad_dtype: torch.dtype) -> None:
    draws = Draws(f"aggregate {tokens} {width} {grad_dtype}")
    check(draws(tokens, 4), draws(tokens, 4, width, dtype=BF16), draws(tokens, width, dtype=grad_dtype))


def test_edge_rows() -> None:
    draws = Draws("aggregate edges")
    rows = edge_rows("aggregate edges", 12, BF16).reshape(-1, 4, 3)
    count = rows.shape[0]
    check(draws(count, 4), rows, draws(count, 3))
    check(edge_rows("aggregate edge scales", 4, FP32), rows, edge_rows("aggregate edge grads", 3, FP32))


@settings(max_examples=40)
@given(tensors(2, 4), tensors(2, 4, 2, dtype=BF16), tensors(2, 2))
def test_any_finite_encodings(pre: Tensor, r_old: Tensor, dh: Tensor) -> None:
    check(pre, r_old, dh)


@settings(max_examples=40)
@given(tensors(1, 4, low=100, high=150), tensors(1, 4, 3, dtype=BF16, low=100, high=150))
def test_swaps_that_the_tree_allows_keep_the_bytes(pre: Tensor, r_old: Tensor) -> None:
    hidden = oracle.h_aggregate_fwd(pre, r_old)
    for order in ([1, 0, 2, 3], [0, 1, 3, 2], [2, 3, 0, 1]):
        assert_same_tensor(str(order), oracle.h_aggregate_fwd(pre[:, order], r_old[:, order]), hidden)


def test_streams_add_as_a_tree() -> None:
    r_old = torch.ones(1, 4, 1, dtype=BF16)
    big = 2.0**24
    # 2**24 + (1 - 2**24); a serial fold loses both ones.
    assert oracle.h_aggregate_fwd(torch.tensor([[big, 1.0, 1.0, -big]]), r_old).item() == 1.0
    # 2**24 + (1 - 2**24); pairing 0 with 2 and 1 with 3 gives 2.
    assert oracle.h_aggregate_fwd(torch.tensor([[big, 1.0, -big, 1.0]]), r_old).item() == 1.0


def test_exact_ties_round_to_even() -> None:
    """1 + 2**-8 and 1 + 2**-7 + 2**-8 lie halfway between two BF16 values."""
    pre = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    r_old = torch.zeros(1, 4, 4, dtype=BF16)
    r_old[0, 0] = torch.tensor([1.0, 1.0 + 2.0**-7, -1.0, -1.0 - 2.0**-7])
    r_old[0, 1] = torch.tensor([2.0**-8, 2.0**-8, -(2.0**-8), -(2.0**-8)])
    want = from_bits([0x3F80, 0x3F82, 0xBF80, 0xBF82], BF16)
    assert_same_tensor("hidden", oracle.h_aggregate_fwd(pre, r_old)[0], want)


def test_nan_row_moves_no_other_row() -> None:
    draws = Draws("aggregate nan")
    args = [draws(4, 3), draws(4, 4), draws(4, 4, 3, dtype=BF16)]
    bad = [t.clone() for t in args]
    for t in bad:
        t[1] = float("nan")
    others = [0, 2, 3]
    good = [oracle.h_aggregate_fwd(*args[1:]), *oracle.h_aggregate_bwd(*args)]
    spoiled = [oracle.h_aggregate_fwd(*bad[1:]), *oracle.h_aggregate_bwd(*bad)]
    assert all(t[1].isnan().all() for t in spoiled)
    assert_same_leaves("rows", [t[others] for t in spoiled], [t[others] for t in good])


def test_no_rows() -> None:
    pre, r_old, dh = torch.empty(0, 4), torch.empty(0, 4, 5, dtype=BF16), torch.empty(0, 5)
    hidden = oracle.h_aggregate_fwd(pre, r_old)
    dr, dpre = oracle.h_aggregate_bwd(dh, pre, r_old)
    assert (hidden.shape, dr.shape, dpre.shape) == ((0, 5), (0, 4, 5), (0, 4))
    assert (hidden.dtype, dr.dtype, dpre.dtype) == (BF16, FP32, FP32)
    assert_fresh(hidden, [pre, r_old])
    assert_fresh([dr, dpre], [pre, r_old, dh])


def test_storage_and_inputs_are_kept() -> None:
    draws = Draws("aggregate storage")
    dh, pre, r_old = draws(2, 1), torch.ones(2, 4), draws(2, 4, 1, dtype=BF16)
    assert_fresh(oracle.h_aggregate_fwd(pre, r_old), [pre, r_old])
    assert_fresh(oracle.h_aggregate_bwd(dh, pre, r_old), [dh, pre, r_old])
    assert_leaves_unchanged(lambda: oracle.h_aggregate_bwd(dh, pre, r_old), [dh, pre, r_old])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str) -> None:
    draws = Draws("aggregate layout")
    args = {"dh": draws(3, 6), "pre": draws(3, 4), "r_old": draws(3, 4, 6, dtype=BF16)}
    moved = relaid(args, layout)
    hidden = oracle.h_aggregate_fwd(args["pre"], args["r_old"])
    assert_same_tensor("hidden", oracle.h_aggregate_fwd(moved["pre"], moved["r_old"]), hidden)
    assert_same_leaves("grads", oracle.h_aggregate_bwd(*moved.values()), oracle.h_aggregate_bwd(*args.values()))


def test_gradients_are_those_of_the_mathematics() -> None:
    draws = Draws("aggregate autograd")
    pre, r_old, dh = draws(5, 4), draws(5, 4, 19, dtype=BF16), draws(5, 19)
    want = autograd64.gradients(autograd64.aggregate, {"pre": pre, "r_old": r_old}, [dh])
    dr, dpre = oracle.h_aggregate_bwd(dh, pre, r_old)
    BOUNDS["r_old"].check("r_old", dr, want["r_old"])
    BOUNDS["pre"].check("pre", dpre, want["pre"])
    mutant_dr, mutant_dpre = oracle.h_aggregate_bwd(dh.to(BF16), pre, r_old)
    with pytest.raises(AssertionError, match="relative error"):
        BOUNDS["r_old"].check("r_old", mutant_dr, want["r_old"])
    with pytest.raises(AssertionError, match="relative error"):
        BOUNDS["pre"].check("pre", mutant_dpre, want["pre"])


FORWARD_ARGS = {"pre": torch.ones(2, 4), "r_old": torch.ones(2, 4, 3, dtype=BF16)}
BACKWARD_ARGS = {"dh": torch.ones(2, 3), **FORWARD_ARGS}
FURTHER = {"pre": ("bf16", "tokens"), "r_old": ("fp32", "tokens")}


@pytest.mark.parametrize(("field", "fault"), faults({**FURTHER, "r_old": ("fp32", "tokens")}))
def test_forward_refuses(field: str, fault: str) -> None:
    if (field, fault) == ("r_old", "width"):  # any width is a valid D
        assert oracle.h_aggregate_fwd(torch.ones(2, 4), torch.ones(2, 4, 4, dtype=BF16)).shape == (2, 4)
        return
    also = FORWARD_ARGS if fault in ("tokens", "device") else ()
    assert_fault(oracle.h_aggregate_fwd, FORWARD_ARGS, field, fault, also)


@pytest.mark.parametrize(("field", "fault"), faults({"dh": ("tokens",), **FURTHER}))
def test_backward_refuses(field: str, fault: str) -> None:
    also = BACKWARD_ARGS if fault in ("width", "tokens", "device") else ()
    assert_fault(oracle.h_aggregate_bwd, BACKWARD_ARGS, field, fault, also)


@pytest.mark.parametrize("streams", [3, 5])
def test_four_streams_only(streams: int) -> None:
    with pytest.raises(ValueError, match="r_old"):
        oracle.h_aggregate_fwd(torch.ones(2, 4), torch.ones(2, streams, 3, dtype=BF16))
