"""hc_split_sinkhorn against exact arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rl_engine.mhc import oracle
from rl_engine.mhc.contract import LayerContract
from tests.operators.support import (
    BF16,
    FP32,
    LAYOUTS,
    Draws,
    assert_fault,
    assert_fresh,
    assert_leaves_unchanged,
    assert_same_leaves,
    faults,
    relaid,
    tensors,
)
from tests.reference import autograd64, exact
from tests.reference.autograd64 import Bound
from tests.reference.bridge import TORCH_ELEMENTARY, assert_encodings, assert_same_tensor, to_exact

BOUNDS = {
    "dh_pre": Bound(8, "4 operations, and sigmoid within 2 units (as 4 roundings)"),
    "dh_post": Bound(8, "likewise"),
    "dh_comb": Bound(400, "39 steps of 10 roundings and the softmax's 10; no step enlarges an error"),
}


def edge_logits() -> dict[str, Tensor]:
    one_hot = torch.zeros(24)
    one_hot[[8, 13, 18, 23]] = 80.0
    shared = torch.zeros(24)
    shared[[8, 12, 16, 20]] = 80.0
    mixed_signs = torch.tensor([80.0, -80.0]).repeat(12)
    checker = mixed_signs.clone()
    checker[12:16], checker[20:24] = -checker[12:16], -checker[20:24]
    spoiled = Draws("sinkhorn spoiled")(24)
    spoiled[3], spoiled[6], spoiled[14] = float("nan"), float("-inf"), float("inf")
    return {
        "zeros": torch.zeros(24),
        "negative zeros": torch.full((24,), -0.0),
        "all equal": torch.full((24,), 0.75),
        "80": torch.full((24,), 80.0),
        "-80": torch.full((24,), -80.0),
        "columns of 80": mixed_signs,
        "checkerboard of 80": checker,
        "one-hot permutation": one_hot,
        "one-hot in one column": shared,
        "random 80": Draws("sinkhorn 80")(24).sign() * 80,
        "wide": Draws("sinkhorn wide")(24, scale=30.0),
        "subnormal": Draws("sinkhorn subnormal")(24, scale=1e-39),
        "exp underflows": Draws("sinkhorn underflow")(24, scale=200.0),
        "huge": Draws("sinkhorn huge")(24, scale=1e38),
        "nan and inf": spoiled,
    }


EDGES = edge_logits()


def grads_for(name: str, tokens: int) -> list[Tensor]:
    draws = Draws(f"sinkhorn grads {name}")
    return [draws(tokens, 4), draws(tokens, 4), draws(tokens, 4, 4)]


def check_saved(saved: dict[str, Any], want: list[exact.Split]) -> None:
    assert set(saved) == {"sig_pre", "sig_post", "softmax", "steps", "eps"}
    assert_encodings("sig_pre", saved["sig_pre"], [w.sig_pre for w in want])
    assert_encodings("sig_post", saved["sig_post"], [w.sig_post for w in want])
    assert_encodings("softmax", saved["softmax"], [w.softmax for w in want])
    assert saved["eps"] == pytest.approx(1e-6)
    assert [kind for kind, _, _ in saved["steps"]] == ["col"] + ["row", "col"] * 19
    for index, (_, m_in, den) in enumerate(saved["steps"]):
        assert_encodings(f"step {index} M_in", m_in, [w.steps[index].m_in for w in want])
        assert_encodings(f"step {index} den", den.reshape(-1, 4), [w.steps[index].den for w in want])


def check(h: Tensor, dpre: Tensor, dpost: Tensor, dc: Tensor) -> None:
    want = [exact.split_sinkhorn_row(row, TORCH_ELEMENTARY) for row in to_exact(h)]
    pre, post, c, saved = oracle.hc_split_sinkhorn_fwd(h)
    assert_encodings("pre", pre, [w.pre for w in want])
    assert_encodings("post", post, [w.post for w in want])
    assert_encodings("c", c, [w.c for w in want])
    check_saved(saved, want)
    dh = oracle.hc_split_sinkhorn_bwd(dpre, dpost, dc, saved)
    rows = zip(to_exact(dpre), to_exact(dpost), to_exact(dc), want, strict=True)
    assert_encodings("dh", dh, [exact.split_sinkhorn_bwd_row(*row) for row in rows])


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_random(tokens: int, scale: float) -> None:
    name = f"sinkhorn {tokens} {scale}"
    check(Draws(name)(tokens, 24, scale=scale), *grads_for(name, tokens))


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    check(EDGES[name][None], *grads_for(name, 1))


@pytest.mark.parametrize("name", [n for n in EDGES if n != "nan and inf"])
def test_finite_logits_give_finite_results(name: str) -> None:
    pre, post, c, saved = oracle.hc_split_sinkhorn_fwd(EDGES[name][None])
    dh = oracle.hc_split_sinkhorn_bwd(*grads_for(name, 1), saved)
    assert all(t.isfinite().all() for t in (pre, post, c, dh))
    assert (pre > 0).all() and (c > 0).all()


def test_edge_gradients() -> None:
    h = torch.stack([EDGES["wide"], EDGES["all equal"], EDGES["one-hot permutation"]])
    dpre, dpost, dc = grads_for("edge gradients", 3)
    dpre[0], dc[0] = -0.0, 1e-40
    dpost[1, 1], dc[1, 2, 2] = float("nan"), float("inf")
    dc[2] = 1e38
    check(h, dpre, dpost, dc)


@settings(max_examples=12)
@given(tensors(1, 24, low=100, high=133), tensors(1, 4, 4, low=90, high=150))
def test_any_logits(h: Tensor, dc: Tensor) -> None:
    check(h, dc[:, 0].clone(), dc[:, 1].clone(), dc)


@settings(max_examples=40)
@given(tensors(2, 24, low=100, high=133))
def test_swaps_that_the_tree_allows_move_c_with_its_logits(h: Tensor) -> None:
    c = oracle.hc_split_sinkhorn_fwd(h)[2]
    logits = h[:, 8:].reshape(2, 4, 4)
    for order in ([1, 0, 2, 3], [0, 1, 3, 2], [2, 3, 0, 1]):
        by_row = torch.cat([h[:, :8], logits[:, order].flatten(1)], dim=1)
        assert_same_tensor(f"rows {order}", oracle.hc_split_sinkhorn_fwd(by_row)[2], c[:, order])
        by_column = torch.cat([h[:, :8], logits[:, :, order].flatten(1)], dim=1)
        assert_same_tensor(f"columns {order}", oracle.hc_split_sinkhorn_fwd(by_column)[2], c[:, :, order])


@settings(max_examples=25)
@given(tensors(1, 24, low=100, high=131), tensors(1, 4, 4, low=110, high=140))
def test_backward_scales_by_a_power_of_two(h: Tensor, dc: Tensor) -> None:
    saved = oracle.hc_split_sinkhorn_fwd(h)[3]
    once = oracle.hc_split_sinkhorn_bwd(dc[:, 0], dc[:, 1], dc, saved)
    twice = oracle.hc_split_sinkhorn_bwd(2 * dc[:, 0], 2 * dc[:, 1], 2 * dc, saved)
    big = once.abs() > 1e-30  # below, halves of subnormals may round
    assert_same_tensor("2 dh", twice[big], 2 * once[big])


def test_known_values() -> None:
    """Zero logits: sigmoid 1/2; softmax 1/4 and every later matrix near 1/4, doubly stochastic."""
    pre, post, c, saved = oracle.hc_split_sinkhorn_fwd(torch.zeros(1, 24))
    assert pre.flatten().tolist() == [torch.tensor(0.5 + 1e-6).item()] * 4
    assert post.flatten().tolist() == [1.0] * 4
    assert saved["softmax"].flatten().tolist() == [0.25] * 16
    assert torch.unique(c).numel() == 1
    assert abs(c[0, 0, 0].item() - 0.25 / (1 + 1e-6)) < 2e-7


def test_contract_none_means_the_frozen_constants() -> None:
    h = Draws("sinkhorn contract")(3, 24)
    contract = LayerContract(hidden=5)
    assert_same_leaves("fwd", oracle.hc_split_sinkhorn_fwd(h, contract)[:3], oracle.hc_split_sinkhorn_fwd(h)[:3])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40])
def test_sigmoid_is_the_scalar_one_at_every_batch_size(tokens: int) -> None:
    """A vector body and a scalar tail of sigmoid would differ in about 4 % of these values."""
    h = Draws("sinkhorn sigmoid")(40, 24, scale=3.0)[:tokens]
    saved = oracle.hc_split_sinkhorn_fwd(h)[3]
    for key, columns in (("sig_pre", slice(0, 4)), ("sig_post", slice(4, 8))):
        want = [[TORCH_ELEMENTARY.sigmoid(v) for v in row[columns]] for row in to_exact(h)]
        assert_encodings(key, saved[key], want)


def test_rows_do_not_depend_on_the_batch() -> None:
    h = Draws("sinkhorn batch")(33, 24)
    full = oracle.hc_split_sinkhorn_fwd(h)[:3]
    for t in (0, 1, 31, 32):
        alone = oracle.hc_split_sinkhorn_fwd(h[t : t + 1])[:3]
        assert_same_leaves(f"row {t}", [o[t : t + 1] for o in full], alone)


def test_nan_row_moves_no_other_row() -> None:
    h, grads = Draws("sinkhorn nan")(4, 24), grads_for("nan", 4)
    bad_h, bad_grads = h.clone(), [g.clone() for g in grads]
    for t in (bad_h, *bad_grads):
        t[1] = float("nan")
    others = [0, 2, 3]
    *good, saved = oracle.hc_split_sinkhorn_fwd(h)
    *spoiled, bad_saved = oracle.hc_split_sinkhorn_fwd(bad_h)
    good.append(oracle.hc_split_sinkhorn_bwd(*grads, saved))
    spoiled.append(oracle.hc_split_sinkhorn_bwd(*bad_grads, bad_saved))
    assert all(t[1].isnan().all() for t in spoiled)
    assert_same_leaves("rows", [t[others] for t in spoiled], [t[others] for t in good])


def test_no_rows() -> None:
    h = torch.empty(0, 24)
    pre, post, c, saved = oracle.hc_split_sinkhorn_fwd(h)
    assert (pre.shape, post.shape, c.shape) == ((0, 4), (0, 4), (0, 4, 4))
    grads = grads_for("empty", 0)
    dh = oracle.hc_split_sinkhorn_bwd(*grads, saved)
    assert (dh.shape, dh.dtype) == ((0, 24), FP32)
    assert_fresh([pre, post, c], h)
    assert_fresh(dh, [h, grads, saved])


def test_storage_inputs_and_saved_are_kept() -> None:
    h, grads = Draws("sinkhorn storage")(2, 24), grads_for("storage", 2)
    pre, post, c, saved = oracle.hc_split_sinkhorn_fwd(h)
    assert_fresh([pre, post, c], h)
    assert_fresh(oracle.hc_split_sinkhorn_bwd(*grads, saved), [h, grads, saved])
    assert_leaves_unchanged(lambda: oracle.hc_split_sinkhorn_fwd(h), h)
    assert_leaves_unchanged(lambda: oracle.hc_split_sinkhorn_bwd(*grads, saved), [grads, saved])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str) -> None:
    names = ("dpre", "dpost", "dc")
    args = {"h": Draws("sinkhorn layout")(9, 24), **dict(zip(names, grads_for("layout", 9), strict=True))}
    moved = relaid(args, layout)
    *outputs, saved = oracle.hc_split_sinkhorn_fwd(args["h"])
    *others, other_saved = oracle.hc_split_sinkhorn_fwd(moved["h"])
    assert_same_leaves("fwd", others, outputs)
    assert_same_leaves("saved", other_saved, saved)
    dh = oracle.hc_split_sinkhorn_bwd(*(args[n] for n in names), saved)
    assert_same_tensor("dh", oracle.hc_split_sinkhorn_bwd(*(moved[n] for n in names), other_saved), dh)


def test_gradients_are_those_of_the_mathematics() -> None:
    h, grads = Draws("sinkhorn autograd")(6, 24), grads_for("autograd", 6)
    want = autograd64.gradients(autograd64.split_sinkhorn, {"h": h}, grads)["h"]
    saved = oracle.hc_split_sinkhorn_fwd(h)[3]
    parts = {"dh_pre": slice(0, 4), "dh_post": slice(4, 8), "dh_comb": slice(8, 24)}

    def hold(dh: Tensor, name: str) -> None:
        BOUNDS[name].check(name, dh[:, parts[name]], want[:, parts[name]])

    for name in parts:
        hold(oracle.hc_split_sinkhorn_bwd(*grads, saved), name)
    halved = oracle.hc_split_sinkhorn_bwd(grads[0] / 2, grads[1] / 2, grads[2], saved)
    nineteen = oracle.hc_split_sinkhorn_bwd(*grads, {**saved, "steps": saved["steps"][2:]})
    low = oracle.hc_split_sinkhorn_bwd(*grads[:2], grads[2].to(BF16).to(FP32), saved)
    for name, mutant in [("dh_pre", halved), ("dh_post", halved), ("dh_comb", nineteen), ("dh_comb", low)]:
        with pytest.raises(AssertionError, match="relative error"):
            hold(mutant, name)


ARGS = {"h": torch.zeros(2, 24)}
GRAD_ARGS = dict(zip(("dpre", "dpost", "dc"), grads_for("arguments", 2), strict=True))


@pytest.mark.parametrize(("field", "fault"), [p for p in faults({"h": ("bf16",)}) if p.values[1] != "device"])
def test_forward_refuses(field: str, fault: str) -> None:
    assert_fault(oracle.hc_split_sinkhorn_fwd, ARGS, field, fault)


@pytest.mark.parametrize(("field", "fault"), faults({name: ("bf16", "tokens") for name in ("dpre", "dpost", "dc")}))
def test_backward_refuses(field: str, fault: str) -> None:
    saved = oracle.hc_split_sinkhorn_fwd(ARGS["h"])[3]
    also = GRAD_ARGS if field == "dpre" and fault in ("tokens", "device") else ()
    assert_fault(oracle.hc_split_sinkhorn_bwd, {**GRAD_ARGS, "saved": saved}, field, fault, also)
