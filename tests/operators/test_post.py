"""mhc_post against exact arithmetic."""

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
    "r_old": Bound(3, "a product and two additions of the tree"),
    "y": Bound(3, "likewise"),
    "c": Bound(38, "D=19 products folded in order: 2D"),
    "post_scale": Bound(38, "likewise"),
}


def check(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, g: Tensor) -> None:
    rows = list(zip(*map(to_exact, (r_old, y, c, post)), strict=True))
    want = [exact.post_fwd_row(*row) for row in rows]
    assert_encodings("r_new", oracle.mhc_post_fwd(r_old, y, c, post), want, BF16)
    grads = [exact.post_bwd_row(eg, *row) for eg, row in zip(to_exact(g), rows, strict=True)]
    dr_old, dy, dc, dpost = oracle.mhc_post_bwd(g, r_old, y, c, post)
    assert_encodings("dr_old", dr_old, [w.dr_old for w in grads])
    assert_encodings("dy", dy, [w.dy for w in grads])
    assert_encodings("dc", dc, [w.dc for w in grads])
    assert_encodings("dpost", dpost, [w.dpost for w in grads])


def inputs(name: str, tokens: int, width: int, grad_dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    draws = Draws(name)
    return {
        "dr_new": draws(tokens, 4, width, dtype=grad_dtype),
        "r_old": draws(tokens, 4, width, dtype=BF16),
        "y": draws(tokens, width, dtype=BF16),
        "c": draws(tokens, 4, 4),
        "post": draws(tokens, 4),
    }


def forward(args: dict[str, Tensor]) -> Tensor:
    return oracle.mhc_post_fwd(args["r_old"], args["y"], args["c"], args["post"])


def backward(args: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return oracle.mhc_post_bwd(args["dr_new"], args["r_old"], args["y"], args["c"], args["post"])


@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 5), (3, 4), (17, 3)])
def test_random(tokens: int, width: int, grad_dtype: torch.dtype) -> None:
    args = inputs(f"post {tokens} {width}", tokens, width, grad_dtype)
    check(args["r_old"], args["y"], args["c"], args["post"], args["dr_new"])


def test_edge_rows() -> None:
    draws = Draws("post edges")
    streams = edge_rows("post edges", 12, BF16).reshape(-1, 4, 3)
    count = streams.shape[0]
    y = edge_rows("post edge y", 3, BF16)
    check(streams, draws(count, 3, dtype=BF16), draws(count, 4, 4), draws(count, 4), draws(count, 4, 3))
    check(draws(count, 4, 3, dtype=BF16), y, draws(count, 4, 4), draws(count, 4), streams)
    c = edge_rows("post edge c", 16, FP32).reshape(-1, 4, 4)
    check(streams.flip(0), y, c, edge_rows("post edge scales", 4, FP32), streams)


@settings(max_examples=40)
@given(tensors(1, 4, 2, dtype=BF16), tensors(1, 2, dtype=BF16), tensors(1, 4, 4), tensors(1, 4), tensors(1, 4, 2))
def test_any_finite_encodings(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, g: Tensor) -> None:
    check(r_old, y, c, post, g)


@settings(max_examples=40)
@given(
    tensors(1, 4, 3, dtype=BF16, low=110, high=140),
    tensors(1, 4, 4, low=110, high=140),
    tensors(1, 4, low=110, high=140),
)
def test_swaps_that_the_tree_allows_keep_the_bytes(r_old: Tensor, c: Tensor, post: Tensor) -> None:
    y = r_old[:, 0].clone()
    r_new = oracle.mhc_post_fwd(r_old, y, c, post)
    for order in ([1, 0, 2, 3], [0, 1, 3, 2], [2, 3, 0, 1]):
        swapped = oracle.mhc_post_fwd(r_old[:, order], y, c[:, order], post)
        assert_same_tensor(f"input streams {order}", swapped, r_new)
        moved = oracle.mhc_post_fwd(r_old, y, c[:, :, order], post[:, order])
        assert_same_tensor(f"output streams {order}", moved, r_new[:, order])


def test_c_maps_its_row_stream_to_its_column_stream() -> None:
    r_old = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]], dtype=BF16)
    c = torch.zeros(1, 4, 4)
    c[0, 0, 1], c[0, 3, 2] = 1.0, 10.0
    r_new = oracle.mhc_post_fwd(r_old, torch.zeros(1, 1, dtype=BF16), c, torch.zeros(1, 4))
    assert r_new.flatten().tolist() == [0.0, 1.0, 40.0, 0.0]
    dr_old, _, dc, _ = oracle.mhc_post_bwd(r_old, r_old, torch.zeros(1, 1, dtype=BF16), c, torch.zeros(1, 4))
    assert dr_old.flatten().tolist() == [2.0, 0.0, 0.0, 30.0]
    assert dc[0].tolist() == [[float(i * j) for j in range(1, 5)] for i in range(1, 5)]


def test_exact_ties_round_to_even() -> None:
    """1 + 2**-8 and 1 + 2**-7 + 2**-8 lie halfway between two BF16 values; truncation would keep the second down."""
    r_old = torch.zeros(1, 4, 4, dtype=BF16)
    r_old[0, 0] = torch.tensor([1.0, 1.0 + 2.0**-7, -1.0, -1.0 - 2.0**-7])
    y = torch.tensor([[2.0**-8, 2.0**-8, -(2.0**-8), -(2.0**-8)]], dtype=BF16)
    r_new = oracle.mhc_post_fwd(r_old, y, torch.eye(4)[None], torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert_same_tensor("ties", r_new[0, 0], from_bits([0x3F80, 0x3F82, 0xBF80, 0xBF82], BF16))


def test_one_rounding_to_bf16() -> None:
    """The FP32 sum 1 + 2**-8 + 2**-20 is above the tie; rounding the mixed streams first would lose that."""
    r_old = torch.zeros(1, 4, 1, dtype=BF16)
    r_old[0, 0], r_old[0, 1] = 1.0, 2.0**-20
    y = torch.tensor([[2.0**-8]], dtype=BF16)
    c = torch.zeros(1, 4, 4)
    c[0, 0, 0] = c[0, 1, 0] = 1.0
    r_new = oracle.mhc_post_fwd(r_old, y, c, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert r_new[0, 0].item() == 1.0 + 2.0**-7


def test_overflow_to_infinity_happens_at_the_store() -> None:
    largest = torch.full((1, 4, 1), 3.3895313892515355e38, dtype=BF16)
    half_step = torch.tensor([[2.0**119]], dtype=BF16)
    r_new = oracle.mhc_post_fwd(largest, half_step, torch.eye(4)[None], torch.tensor([[1.0, 0.5, -0.5, 0.0]]))
    inf, top = float("inf"), largest[0, 0, 0].item()
    assert r_new.flatten().tolist() == [inf, top, top, top]


def test_nan_row_moves_no_other_row() -> None:
    args = inputs("post nan", 4, 3)
    bad = {k: v.clone() for k, v in args.items()}
    for t in bad.values():
        t[1] = float("nan")
    others = [0, 2, 3]
    good, spoiled = [forward(args), *backward(args)], [forward(bad), *backward(bad)]
    assert all(t[1].isnan().all() for t in spoiled)
    assert_same_leaves("rows", [t[others] for t in spoiled], [t[others] for t in good])


def test_no_rows() -> None:
    args = inputs("post empty", 0, 5)
    r_new, grads = forward(args), backward(args)
    assert (r_new.shape, r_new.dtype) == ((0, 4, 5), BF16)
    assert [tuple(g.shape) for g in grads] == [(0, 4, 5), (0, 5), (0, 4, 4), (0, 4)]
    assert {g.dtype for g in grads} == {FP32}
    assert_fresh(r_new, args)
    assert_fresh(grads, args)


@pytest.mark.parametrize("tokens", [1, 2])
def test_storage_and_inputs_are_kept(tokens: int) -> None:
    args = inputs("post storage", tokens, 1, FP32)
    assert_fresh(forward(args), args)
    assert_fresh(backward(args), args)
    assert_leaves_unchanged(lambda: backward(args), args)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str) -> None:
    args = inputs("post layout", 3, 6)
    moved = relaid(args, layout)
    assert_same_tensor("r_new", forward(moved), forward(args))
    assert_same_leaves("grads", backward(moved), backward(args))


def test_expanded_inputs_are_read_as_their_copy() -> None:
    args = inputs("post expanded", 1, 6)
    wide = {k: v.expand(5, *v.shape[1:]) for k, v in args.items()}
    copied = {k: v.contiguous() for k, v in wide.items()}
    assert_same_tensor("r_new", forward(wide), forward(copied))
    assert_same_leaves("grads", backward(wide), backward(copied))


def test_gradients_are_those_of_the_mathematics() -> None:
    args = inputs("post autograd", 5, 19, FP32)
    names = {"r_old": args["r_old"], "y": args["y"], "c": args["c"], "post_scale": args["post"]}
    want = autograd64.gradients(autograd64.post, names, [args["dr_new"]])
    for name, got in zip(names, backward(args), strict=True):
        BOUNDS[name].check(name, got, want[name])
    comb_transposed = backward({**args, "c": args["c"].transpose(1, 2).contiguous()})[0]
    streams_reversed = backward({**args, "dr_new": args["dr_new"].flip(1)})[1]
    low_gradients = backward({**args, "dr_new": args["dr_new"].to(BF16)})
    mutants = [("r_old", comb_transposed), ("y", streams_reversed), ("c", low_gradients[2])]
    for name, mutant in [*mutants, ("c", want["c"].transpose(1, 2)), ("post_scale", low_gradients[3])]:
        with pytest.raises(AssertionError, match="relative error"):
            BOUNDS[name].check(name, mutant, want[name])


BACKWARD_ARGS = inputs("post arguments", 2, 3)
FORWARD_ARGS = {k: v for k, v in BACKWARD_ARGS.items() if k != "dr_new"}
FURTHER = {"r_old": ("fp32", "tokens"), "y": ("fp32", "tokens"), "c": ("bf16", "tokens"), "post": ("bf16", "tokens")}


@pytest.mark.parametrize(("field", "fault"), faults(FURTHER))
def test_forward_refuses(field: str, fault: str) -> None:
    also = FORWARD_ARGS if field == "r_old" and fault in ("width", "tokens", "device") else ()
    assert_fault(oracle.mhc_post_fwd, FORWARD_ARGS, field, fault, also)


@pytest.mark.parametrize(("field", "fault"), faults({"dr_new": ("tokens",), **FURTHER}))
def test_backward_refuses(field: str, fault: str) -> None:
    also = BACKWARD_ARGS if field in ("dr_new", "r_old") and fault in ("width", "tokens", "device") else ()
    assert_fault(oracle.mhc_post_bwd, BACKWARD_ARGS, field, fault, also)


@pytest.mark.parametrize("streams", [3, 5])
def test_four_streams_only(streams: int) -> None:
    args = {**FORWARD_ARGS, "r_old": torch.ones(2, streams, 3, dtype=BF16)}
    with pytest.raises(ValueError, match="r_old"):
        oracle.mhc_post_fwd(*args.values())
