"""mhc_pre and the whole block against exact arithmetic, forward and backward."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.mhc import oracle
from rl_engine.mhc.contract import GradBoundary, ResidualBatch
from tests.operators.block_inputs import (
    CONTROLLER_KEYS,
    GRAD_KEYS,
    block_leaves,
    exact_input,
    grad_leaves,
    make_block,
    take,
    with_leaves,
)
from tests.operators.support import (
    BF16,
    FP32,
    LAYOUTS,
    Draws,
    assert_fresh,
    assert_leaves_unchanged,
    assert_same_leaves,
    edge_rows,
)
from tests.reference import exact_block
from tests.reference.bridge import TORCH_ELEMENTARY, assert_encodings, assert_same_tensor, to_exact
from tests.reference.exact_block import Block, BlockGrads

ROW_KEYS = ("d_r_old", "dy_sublayer", "d_hidden", "d_c", "d_post")
PRE_SAVED = {"x_flat", "p", "r", "m", "h", "pre", "post", "c", "gemm", "sinkhorn"}


def run(batch: ResidualBatch, grads: GradBoundary) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    r_new, saved = oracle.mhc_block_forward(batch)
    return r_new, saved, oracle.mhc_block_backward(batch, saved, grads)


def check_forward(r_new: Tensor, saved: dict[str, Any], want: Block) -> None:
    assert set(saved) - {"controller_rms"} == PRE_SAVED | {"hidden", "normalized", "residual", "norm"}
    assert_encodings("r_new", r_new, want.r_new, BF16)
    pre = want.pre
    assert_encodings("x_flat", saved["x_flat"].to(FP32), pre.x_flat)
    for key, value in {"p": pre.gemm.p, "r": pre.gemm.r, "m": pre.m, "h": pre.h}.items():
        assert_encodings(key, saved[key], value)
    for key in ("pre", "post", "c"):
        assert_encodings(key, saved[key], [getattr(split, key) for split in pre.split])
    assert_encodings("hidden", saved["hidden"], pre.hidden, BF16)
    assert_encodings("residual", saved["residual"], pre.hidden, BF16)
    assert_encodings("normalized", saved["normalized"], want.norm.y, BF16)


def check_backward(got: dict[str, Any], want: BlockGrads) -> None:
    assert tuple(sorted(got)) == tuple(sorted(GRAD_KEYS))
    for key in (*ROW_KEYS, "d_gamma"):
        assert_encodings(key, got[key], getattr(want, key))
    check_controller(got, want.controller)


def check_controller(got: dict[str, Any], want: exact_block.ControllerGrads) -> None:
    assert_encodings("d_controller_weight", got["d_controller_weight"], want.weight)
    for key in ("alpha_pre", "alpha_post", "alpha_res"):
        assert_encodings(f"d_{key}", got[f"d_{key}"], [getattr(want, key)])
    assert_encodings("d_bias", got["d_bias"], want.bias)


def check(batch: ResidualBatch, grads: GradBoundary) -> None:
    numbers = exact_input(batch)
    want = exact_block.block_fwd(numbers, TORCH_ELEMENTARY)
    r_new, saved, got = run(batch, grads)
    check_forward(r_new, saved, want)
    check_backward(got, exact_block.block_bwd(*map(to_exact, grad_leaves(grads)), numbers, want))


@pytest.mark.parametrize("gamma_dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 5), (2, 3), (3, 4), (3, 5)])
def test_random(tokens: int, width: int, gamma_dtype: torch.dtype) -> None:
    check(*make_block(f"random {tokens} {width}", tokens, width, gamma_dtype=gamma_dtype))


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_other_scales(scale: float) -> None:
    check(*make_block(f"scale {scale}", 2, 4, scale=scale))


def test_edge_rows() -> None:
    r_old = edge_rows("block edges", 12, BF16).reshape(-1, 4, 3)
    batch, grads = make_block("edges", r_old.shape[0], 3)
    check(with_leaves(batch, r_old=r_old), grads)


def test_edge_sublayer_and_gradients() -> None:
    rows = edge_rows("block edge gradients", 12, BF16)
    batch, _ = make_block("edge gradients", rows.shape[0], 3)
    narrow = rows[:, :3].contiguous()
    grads = GradBoundary(rows.reshape(-1, 4, 3), narrow.flip(0), narrow.roll(3, 0))
    check(with_leaves(batch, y=narrow.roll(1, 0)), grads)


def test_edge_parameters() -> None:
    batch, grads = make_block("edge parameters", 2, 3)
    weight = edge_rows("block edge weights", 12, FP32).repeat(2, 1)[:24]
    check(with_leaves(batch, weight=weight), grads)
    check(with_leaves(batch, bias=torch.tensor([80.0, -80.0]).repeat(12), alpha_pre=torch.tensor([-0.0])), grads)
    check(with_leaves(batch, alpha_res=torch.tensor([1e20]), gamma=torch.tensor([0.0, -0.0, 1e30]).to(BF16)), grads)


@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 2), (3, 4)])
def test_pre_alone(tokens: int, width: int, grad_dtype: torch.dtype) -> None:
    batch, _ = make_block(f"pre {tokens}", tokens, width)
    draws = Draws(f"block pre grads {tokens}")
    dhidden, dpost, dc = draws(tokens, width, dtype=grad_dtype), draws(tokens, 4), draws(tokens, 4, 4)
    numbers = exact_input(batch)
    want = exact_block.pre_fwd(numbers, TORCH_ELEMENTARY)
    hidden, pre, post, c, saved = oracle.mhc_pre_fwd(batch)
    assert set(saved) == PRE_SAVED
    assert_encodings("hidden", hidden, want.hidden, BF16)
    for name, tensor in {"pre": pre, "post": post, "c": c}.items():
        assert_encodings(name, tensor, [getattr(split, name) for split in want.split])
    got = oracle.mhc_pre_bwd(dhidden, dpost, dc, batch, saved)
    assert set(got) == {"d_r_old", *CONTROLLER_KEYS}
    d_r_old, controller = exact_block.pre_bwd(*map(to_exact, (dhidden, dpost, dc)), numbers, want)
    assert_encodings("d_r_old", got["d_r_old"], d_r_old)
    check_controller(got, controller)


def test_fused_is_the_unfused_composition() -> None:
    batch, grads = make_block("fused", 3, 4)
    fused, _ = make_block("fused", 3, 4, fusion_mode="fused-pre-norm")
    check(fused, grads)
    r_new, saved, got = run(batch, grads)
    fused_r_new, fused_saved, fused_got = run(fused, grads)
    assert_same_tensor("r_new", fused_r_new, r_new)
    assert set(fused_saved) == set(saved)
    assert_same_leaves("grads", fused_got, got)
    hidden, normalized, residual, post, c, part = oracle.mhc_pre_rmsnorm_fused_fwd(batch)
    assert set(part) == PRE_SAVED | {"hidden", "norm"}
    keys = ("hidden", "normalized", "residual", "post", "c")
    for key, tensor in zip(keys, (hidden, normalized, residual, post, c), strict=True):
        assert_same_tensor(key, tensor, saved[key])
    assert_fresh([hidden, normalized, residual], block_leaves(batch))


def test_mixer_frozen_withholds_the_controller_gradients_only() -> None:
    batch, grads = make_block("frozen", 3, 4)
    frozen, _ = make_block("frozen", 3, 4, trainability="mixer-frozen")
    _, _, got = run(batch, grads)
    _, saved, frozen_got = run(frozen, grads)
    assert set(frozen_got) == set(GRAD_KEYS)
    assert [frozen_got[key] for key in CONTROLLER_KEYS] == [None] * 5
    for key in (*ROW_KEYS, "d_gamma"):
        assert_same_tensor(key, frozen_got[key], got[key])
    alone = oracle.mhc_pre_bwd(frozen_got["d_hidden"], frozen_got["d_post"], frozen_got["d_c"], frozen, saved)
    assert [alone[key] for key in CONTROLLER_KEYS] == [None] * 5


def recording_ops(called: list[str]) -> SimpleNamespace:
    """The oracle behind a provider that notes which operators it was asked for."""

    def noted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(oracle, name)(*args, **kwargs)

        return call

    names = [n for n in dir(oracle) if n.endswith(("_fwd", "_bwd"))]
    ops = SimpleNamespace(**{n: noted(n) for n in names}, name="recording", capabilities=oracle.capabilities)
    ops.numeric_profile = oracle.numeric_profile
    ops.mhc_pre_fwd = lambda batch: noted("mhc_pre_fwd")(batch, ops)
    ops.mhc_pre_bwd = lambda *args: noted("mhc_pre_bwd")(*args, ops)
    return ops


def test_composites_call_their_parts_through_ops() -> None:
    batch, grads = make_block("ops", 2, 3)
    called: list[str] = []
    ops = recording_ops(called)
    r_new, saved = oracle.mhc_block_forward(batch, ops=ops)
    assert called[0] == "mhc_pre_fwd"
    parts = ("fp32_gemm_rms", "hc_split_sinkhorn", "h_aggregate", "rmsnorm_residual", "mhc_post")
    assert set(called) == {"mhc_pre_fwd", *(f"{part}_fwd" for part in parts)}
    called.clear()
    got = oracle.mhc_block_backward(batch, saved, grads, ops=ops)
    assert called[:3] == ["mhc_post_bwd", "rmsnorm_residual_bwd", "mhc_pre_bwd"]
    assert set(called) == {"mhc_pre_bwd", *(f"{part}_bwd" for part in parts)}
    want_r_new, _, want = run(batch, grads)
    assert_same_tensor("r_new", r_new, want_r_new)
    assert_same_leaves("grads", got, want)


def test_the_oracle_module_is_a_set_of_operators() -> None:
    batch, grads = make_block("module", 2, 3)
    want_r_new, _, want = run(batch, grads)
    r_new, saved = oracle.mhc_block_forward(batch, ops=oracle)
    assert_same_tensor("r_new", r_new, want_r_new)
    assert_same_leaves("grads", oracle.mhc_block_backward(batch, saved, grads, ops=oracle), want)


def test_rows_do_not_depend_on_the_batch() -> None:
    batch, grads = make_block("batch", 9, 5)
    r_new, _, got = run(batch, grads)
    for rows in ([0], [8], [4, 2, 7], list(range(8, -1, -1))):
        part_r_new, _, part = run(*take(batch, grads, rows))
        assert_same_tensor(f"r_new {rows}", part_r_new, r_new[rows])
        for key in ROW_KEYS:
            assert_same_tensor(f"{key} {rows}", part[key], got[key][rows])


def test_one_row_geometry_keeps_the_bytes() -> None:
    batch, grads = make_block("one row", 1, 5)
    one_row = dataclasses.replace(batch, row_geometry="one-row")
    r_new, _, got = run(batch, grads)
    other_r_new, _, other = run(one_row, grads)
    assert_same_tensor("r_new", other_r_new, r_new)
    assert_same_leaves("grads", other, got)


@pytest.mark.parametrize("spoiled", ["r_old", "y", "gradients"])
def test_nan_row_moves_no_other_row(spoiled: str) -> None:
    batch, grads = make_block("nan", 4, 3)
    bad, bad_grads = batch, grads
    if spoiled == "gradients":
        bad_grads = GradBoundary(*(t.clone() for t in grad_leaves(grads)))
        for t in grad_leaves(bad_grads):
            t[1] = float("nan")
    else:
        changed = block_leaves(batch)[spoiled].clone()
        changed[1] = float("nan")
        bad = with_leaves(batch, **{spoiled: changed})
    others = [0, 2, 3]
    r_new, saved, got = run(batch, grads)
    bad_r_new, bad_saved, bad_got = run(bad, bad_grads)
    good = [r_new, saved["hidden"], saved["normalized"], saved["residual"], *(got[k] for k in ROW_KEYS)]
    spoilt = [bad_r_new, *(bad_saved[k] for k in ("hidden", "normalized", "residual"))]
    spoilt += [bad_got[k] for k in ROW_KEYS]
    assert any(t[1].isnan().any() for t in spoilt)
    assert_same_leaves("rows", [t[others] for t in spoilt], [t[others] for t in good])


def test_no_rows() -> None:
    batch, grads = make_block("empty", 0, 5)
    r_new, saved, got = run(batch, grads)
    assert (r_new.shape, r_new.dtype) == ((0, 4, 5), BF16)
    for key in ("hidden", "normalized", "residual"):
        assert (saved[key].shape, saved[key].dtype) == ((0, 5), BF16)
    shapes = {"d_r_old": (0, 4, 5), "dy_sublayer": (0, 5), "d_hidden": (0, 5), "d_c": (0, 4, 4), "d_post": (0, 4)}
    assert {key: tuple(got[key].shape) for key in ROW_KEYS} == shapes
    parameters = {"d_gamma": (5,), "d_controller_weight": (24, 20), "d_bias": (24,)}
    parameters |= {"d_alpha_pre": (1,), "d_alpha_post": (1,), "d_alpha_res": (1,)}
    for key, shape in parameters.items():
        assert_same_tensor(key, got[key], torch.zeros(shape))
    assert_fresh([r_new, *got.values()], [block_leaves(batch), grad_leaves(grads)])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("fusion_mode", ["unfused", "fused-pre-norm"])
def test_storage_inputs_and_saved_are_kept(fusion_mode: str, tokens: int) -> None:
    batch, grads = make_block("storage", tokens, 1, fusion_mode=fusion_mode)
    inputs = [block_leaves(batch), grad_leaves(grads)]
    r_new, saved, got = run(batch, grads)
    assert_fresh(r_new, inputs)
    assert_fresh([saved[key] for key in ("hidden", "normalized", "residual")], inputs)
    assert_fresh(got, [inputs, saved])
    assert_leaves_unchanged(lambda: oracle.mhc_block_forward(batch), inputs)
    assert_leaves_unchanged(lambda: oracle.mhc_block_backward(batch, saved, grads), [inputs, saved])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str) -> None:
    batch, grads = make_block("layout", 3, 4)
    move = LAYOUTS[layout]
    moved = with_leaves(batch, **{name: move(t) for name, t in block_leaves(batch).items()})
    r_new, saved, got = run(batch, grads)
    moved_r_new, moved_saved, moved_got = run(moved, GradBoundary(*map(move, grad_leaves(grads))))
    assert_same_tensor("r_new", moved_r_new, r_new)
    assert_same_leaves("saved", moved_saved, saved)
    assert_same_leaves("grads", moved_got, got)


def test_expanded_rows_are_read_as_their_copy() -> None:
    batch, grads = make_block("expanded", 1, 4)
    token_id = torch.arange(3)
    wide = dataclasses.replace(
        batch,
        r_old=batch.r_old.expand(3, 4, 4),
        y_sublayer=batch.y_sublayer.expand(3, 4),
        token_id=token_id,
    )
    wide_grads = GradBoundary(*(t.expand(3, *t.shape[1:]) for t in grad_leaves(grads)))
    copied = dataclasses.replace(wide, r_old=wide.r_old.clone(), y_sublayer=wide.y_sublayer.clone())
    copied_grads = GradBoundary(*(t.contiguous() for t in grad_leaves(wide_grads)))
    r_new, _, got = run(copied, copied_grads)
    wide_r_new, _, wide_got = run(wide, wide_grads)
    assert_same_tensor("r_new", wide_r_new, r_new)
    assert_same_leaves("grads", wide_got, got)
