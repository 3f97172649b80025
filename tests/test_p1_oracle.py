"""The oracle as a whole: its names, its modes, its traces, and what may not move a byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.mhc import fixtures, oracle
from rl_engine.mhc.contract import GradBoundary, NormParams, ResidualBatch
from rl_engine.mhc.operators import reference_operators
from rl_engine.mhc.operators.reference import reference_calls
from rl_engine.mhc.provider import ReferenceProvider
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES, MHCTrace, first_divergence
from tests.operators.block_inputs import (
    CONTROLLER_KEYS,
    GRAD_KEYS,
    block_leaves,
    grad_leaves,
    make_block,
    with_leaves,
)
from tests.operators.support import BF16, FP32, Draws, assert_same_leaves, leaves
from tests.reference.bridge import assert_same_tensor, encodings

REPOSITORY = Path(__file__).resolve().parents[1]
PROFILE = "oracle-fp32-mhc-v1"
OPERATORS = (
    "hc_split_sinkhorn",
    "fp32_gemm_rms",
    "mhc_post",
    "h_aggregate",
    "mhc_pre",
    "rmsnorm_residual",
    "fixed_k_gemm",
)
SECTION_3 = {f"{name}_{way}" for name in OPERATORS for way in ("fwd", "bwd")}
SECTION_3 |= {"mhc_pre_rmsnorm_fused_fwd", "mhc_block_forward", "mhc_block_backward"}
SECTION_3 |= {"SUPPORTED_FUSION", "SUPPORTED_TRAINABILITY"}
ROW_KEYS = ("d_r_old", "dy_sublayer", "d_hidden", "d_c", "d_post")


def run(batch: ResidualBatch, grads: GradBoundary, ops: Any = None) -> list[Any]:
    """Everything that a forward and a backward return."""
    r_new, saved = oracle.mhc_block_forward(batch, ops=ops)
    return [r_new, saved, oracle.mhc_block_backward(batch, saved, grads, ops=ops)]


def traced(batch: ResidualBatch, grads: GradBoundary) -> MHCTrace:
    trace = MHCTrace(PROFILE)
    _, saved = oracle.mhc_block_forward(batch, trace)
    oracle.mhc_block_backward(batch, saved, grads, trace)
    return trace


# --- names, modes, profiles ---


def test_the_oracle_names_all_of_its_specification() -> None:
    assert set(oracle.__all__) >= SECTION_3
    assert all(hasattr(oracle, name) for name in oracle.__all__)
    assert {name for name in vars(oracle) if name.endswith(("_fwd", "_bwd"))} <= SECTION_3
    assert (oracle.name, oracle.numeric_profile) == ("oracle", PROFILE)


def test_the_supported_modes() -> None:
    assert oracle.SUPPORTED_FUSION == ("unfused", "fused-pre-norm")
    assert oracle.SUPPORTED_TRAINABILITY == ("full", "mixer-frozen")
    declared = oracle.capabilities()
    assert declared["fusion_modes"] == ["unfused", "fused-pre-norm"]
    assert declared["trainability"] == ["full", "mixer-frozen"]
    assert declared["placements"] == ["replicated"]
    declared["placements"].append("tp-sharded")
    assert oracle.capabilities()["placements"] == ["replicated"]


@pytest.mark.parametrize("profile", ["", "oracle", "oracle-fp32-mhc-v2", "ORACLE-FP32-MHC-V1"])
def test_an_unknown_profile_lists_the_known_ones(profile: str) -> None:
    batch, _ = make_block("profile", 1, 2)
    contract = dataclasses.replace(batch.contract, numeric_profile=profile)
    unknown = dataclasses.replace(batch, contract=contract, weight_fingerprint="")
    calls: list[Callable[[], Any]] = [
        contract.validate,
        lambda: reference_operators(profile),
        lambda: ReferenceProvider(profile),
        lambda: oracle.mhc_block_forward(unknown),
        lambda: oracle.hc_split_sinkhorn_fwd(torch.zeros(1, 24), contract),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"numeric_profile: got '{profile}', want one of: .*{PROFILE}"):
            call()


@pytest.mark.parametrize("field", ["hidden", "sinkhorn_iters", "mhc_eps", "hc_mult"])
def test_a_contract_with_another_frozen_value_runs_nothing(field: str) -> None:
    batch, _ = make_block("frozen", 1, 2)
    contract = dataclasses.replace(batch.contract, **{field: 0})
    started: list[str] = []
    with reference_calls(started.append), pytest.raises(ValueError, match=f"contract.{field}"):
        oracle.mhc_block_forward(dataclasses.replace(batch, contract=contract))
    assert started == []


def test_gamma_of_another_dtype_than_the_contract_says_is_refused() -> None:
    """A composite that is called by itself must not run what the contract's fingerprint does not describe."""
    batch, _ = make_block("gamma", 2, 3)
    wide = dataclasses.replace(batch, norm=NormParams(batch.norm.gamma.to(FP32)), weight_fingerprint="")
    for entry in (oracle.mhc_block_forward, oracle.mhc_pre_rmsnorm_fused_fwd):
        with pytest.raises(TypeError, match="gamma"):
            entry(wide)


# --- traces ---


@pytest.mark.parametrize("name", fixtures.BLOCK_CASES)
def test_a_trace_has_every_boundary_in_order(name: str) -> None:
    batch = fixtures.make_batch(name)
    trace = traced(batch, fixtures.make_grads(name, batch))
    assert [record.name for record in trace.records] == [*FORWARD_BOUNDARIES, *BACKWARD_BOUNDARIES]
    stored = {"pre.hidden", "norm.normalized", "norm.residual", "post.r_new"}
    assert {record.name for record in trace.records if record.dtype == "bfloat16"} == stored
    assert {record.dtype for record in trace.records if record.name not in stored} == {"float32"}
    shapes = {record.name: record.shape for record in trace.records}
    tokens = batch.tokens
    assert shapes["controller.r"] == (tokens,) and shapes["split.c"] == (tokens, 4, 4)
    assert shapes["bwd.d_stream3"] == (tokens, 128) and shapes["bwd.d_gamma"] == (128,)


def test_the_notes() -> None:
    batch, grads = make_block("notes", 2, 3, fusion_mode="fused-pre-norm", trainability="mixer-frozen")
    trace = traced(batch, grads)
    assert trace.notes == {
        "reduction_tree": "serial-ascending-left-fold; (a0+a1)+(a2+a3)",
        "fma": "forbidden",
        "rsqrt": "torch-library",
        "downcast_points": ["pre.hidden", "norm.normalized", "post.r_new"],
        "fusion_mode": "fused-pre-norm",
        "trainability": "mixer-frozen",
        "weight_fingerprint": batch.weight_fingerprint,
    }
    unsealed = dataclasses.replace(batch, weight_fingerprint="")
    assert traced(unsealed, grads).notes == trace.notes


def test_the_stream_gradients_are_rows_of_d_r_old() -> None:
    batch, grads = make_block("streams", 3, 4)
    hashes = traced(batch, grads).hashes()
    d_r_old = run(batch, grads)[2]["d_r_old"]
    alone = MHCTrace(PROFILE)
    for i in range(4):
        alone.record(f"bwd.d_stream{i}", d_r_old[:, i, :])
    assert alone.hashes() == {name: hashes[name] for name in alone.hashes()}


def test_a_trace_moves_no_byte_and_says_where_runs_part() -> None:
    batch, grads = make_block("parting", 3, 4)
    r_new, saved, got = run(batch, grads)
    trace = MHCTrace(PROFILE)
    traced_r_new, traced_saved = oracle.mhc_block_forward(batch, trace)
    traced_got = oracle.mhc_block_backward(batch, traced_saved, grads, trace)
    assert_same_leaves("outputs", [traced_r_new, traced_saved, traced_got], [r_new, saved, got])
    assert first_divergence(trace, traced(batch, grads)) is None
    moved = {"weight": "controller.p", "r_old": "controller.p", "alpha_pre": "controller.h", "bias": "controller.h"}
    for leaf, boundary in {**moved, "gamma": "norm.normalized", "y": "post.r_new"}.items():
        other = with_leaves(batch, **{leaf: block_leaves(batch)[leaf] * 2})
        assert first_divergence(trace, traced(other, grads)) == boundary
    for index, boundary in enumerate(("bwd.dy_sublayer", "bwd.d_hidden", "bwd.d_hidden")):
        changed = [t * 2 if i == index else t for i, t in enumerate(grad_leaves(grads))]
        assert first_divergence(trace, traced(batch, GradBoundary(*changed))) == boundary


def test_a_trace_of_another_profile_is_refused() -> None:
    batch, grads = make_block("foreign trace", 1, 2)
    trace = MHCTrace("another")
    with pytest.raises(ValueError, match=f"numeric_profile: got 'another', want '{PROFILE}'"):
        oracle.mhc_block_forward(batch, trace)
    assert trace.records == [] and trace.notes == {}
    _, saved = oracle.mhc_block_forward(batch)
    with pytest.raises(ValueError, match=f"numeric_profile: got 'another', want '{PROFILE}'"):
        oracle.mhc_block_backward(batch, saved, grads, trace)
    assert trace.records == []


# --- modes ---


@pytest.mark.parametrize("name", ["packed_t16", "mixer_frozen"])
def test_fused_equals_unfused(name: str) -> None:
    batch = fixtures.make_batch(name)
    grads = fixtures.make_grads(name, batch)
    contract = batch.contract.with_mode("fusion_mode", "fused-pre-norm")
    fused = dataclasses.replace(batch, contract=contract).sealed()
    assert first_divergence(traced(batch, grads), traced(fused, grads)) is None
    (r_new, saved, got), (want_r_new, want_saved, want) = run(fused, grads), run(batch, grads)
    assert set(saved) == set(want_saved)
    in_order = [[values[key] for key in sorted(values)] for values in (saved, want_saved)]
    assert_same_leaves("outputs", [r_new, got, in_order[0]], [want_r_new, want, in_order[1]])


@pytest.mark.parametrize("fusion_mode", ["unfused", "fused-pre-norm"])
def test_mixer_frozen_withholds_five_gradients(fusion_mode: str) -> None:
    free, grads = make_block("frozen mixer", 3, 4, fusion_mode=fusion_mode)
    frozen, _ = make_block("frozen mixer", 3, 4, fusion_mode=fusion_mode, trainability="mixer-frozen")
    want, got = run(free, grads)[2], run(frozen, grads)[2]
    assert set(got) == set(GRAD_KEYS)
    assert {key for key, value in got.items() if value is None} == set(CONTROLLER_KEYS)
    assert len(CONTROLLER_KEYS) == 5 and all(value is not None for value in want.values())
    for key in set(GRAD_KEYS) - set(CONTROLLER_KEYS):
        assert_same_tensor(key, got[key], want[key])
    assert (got["d_gamma"] != 0).any()


# --- zero rows ---


def test_a_zero_row_of_the_projection() -> None:
    draws = Draws("oracle zero rows")
    x, weight, dp, dr = draws(4, 20), draws(24, 20), draws(4, 24), draws(4)
    zeroed = x.clone()
    zeroed[2] = 0
    want_p, want_r, want_saved = oracle.fp32_gemm_rms_fwd(x, weight, 1e-6)
    p, r, saved = oracle.fp32_gemm_rms_fwd(zeroed, weight, 1e-6)
    assert r[2].item() == torch.tensor(1.0).div(torch.tensor(1e-6)).item()
    rest = [0, 1, 3]
    assert_same_leaves("forward", [p[rest], r[rest]], [want_p[rest], want_r[rest]])
    dx, _ = oracle.fp32_gemm_rms_bwd(dp, dr, zeroed, weight, saved)
    want_dx, _ = oracle.fp32_gemm_rms_bwd(dp, dr, x, weight, want_saved)
    assert_same_tensor("other rows", dx[rest], want_dx[rest])
    assert dx.isfinite().all()
    assert_same_tensor("gemm leg", dx[2:3], oracle.fixed_k_gemm_bwd(dp, zeroed, weight)[0][2:3])


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30])
def test_a_zero_row_of_a_block(value: float) -> None:
    batch, grads = make_block("zero row", 4, 5)
    zeroed = batch.r_old.clone()
    zeroed[1] = value
    bare = with_leaves(batch, r_old=zeroed)
    r_new, saved, got = run(bare, grads)
    want_r_new, _, want = run(batch, grads)
    rest = [0, 2, 3]
    assert all(t.isfinite().all() for t in (r_new, *got.values()))
    assert_same_tensor("r_new", r_new[rest], want_r_new[rest])
    for key in ROW_KEYS:
        assert_same_tensor(key, got[key][rest], want[key][rest])
    alone = oracle.mhc_pre_bwd(got["d_hidden"], got["d_post"], got["d_c"], bare, saved)
    assert all(t.isfinite().all() for t in leaves(alone))


# --- no rows ---


@pytest.mark.parametrize("trainability", ["full", "mixer-frozen"])
@pytest.mark.parametrize("fusion_mode", ["unfused", "fused-pre-norm"])
def test_no_rows(fusion_mode: str, trainability: str) -> None:
    batch, grads = make_block("no rows", 0, 5, fusion_mode=fusion_mode, trainability=trainability)
    trace = traced(batch, grads)
    assert [record.name for record in trace.records] == [*FORWARD_BOUNDARIES, *BACKWARD_BOUNDARIES]
    r_new, _, got = run(batch, grads)
    assert (tuple(r_new.shape), r_new.dtype) == ((0, 4, 5), BF16)
    assert {key: got[key].shape[0] for key in ROW_KEYS} == dict.fromkeys(ROW_KEYS, 0)
    for key in ("d_gamma", *CONTROLLER_KEYS):
        if got[key] is not None:
            assert set(encodings(got[key])) == {0}, key
    assert got["d_gamma"].shape == (5,)


def test_no_rows_in_any_operator() -> None:
    draws = Draws("no rows at all")
    weight, gamma = draws(24, 12), draws(3, dtype=BF16)
    x, rows, streams = torch.empty(0, 12), torch.empty(0, 3, dtype=BF16), torch.empty(0, 4, 3, dtype=BF16)
    four, comb = torch.empty(0, 4), torch.empty(0, 4, 4)
    p, r, gemm = oracle.fp32_gemm_rms_fwd(x, weight, 1e-6)
    dx, dw = oracle.fp32_gemm_rms_bwd(p, r, x, weight, gemm)
    y, residual, norm = oracle.rmsnorm_residual_fwd(rows, gamma, 1e-6)
    d_rows, d_gamma = oracle.rmsnorm_residual_bwd(rows, rows, rows, gamma, norm)
    split = oracle.hc_split_sinkhorn_fwd(torch.empty(0, 24))
    found = {
        "gemm": (p, r, dx),
        "norm": (y, residual, d_rows),
        "split": (*split[:3], oracle.hc_split_sinkhorn_bwd(four, four, comb, split[3])),
        "post": (
            oracle.mhc_post_fwd(streams, rows, comb, four),
            *oracle.mhc_post_bwd(streams, streams, rows, comb, four),
        ),
        "aggregate": (oracle.h_aggregate_fwd(four, streams), *oracle.h_aggregate_bwd(rows, four, streams)),
        "fixed": (oracle.fixed_k_gemm_fwd(x, weight), oracle.fixed_k_gemm_bwd(p, x, weight)[0]),
    }
    assert {t.shape[0] for outputs in found.values() for t in outputs} == {0}
    for name, gradient in {"dw": dw, "dgamma": d_gamma, "fixed dw": oracle.fixed_k_gemm_bwd(p, x, weight)[1]}.items():
        assert set(encodings(gradient)) == {0}, name
