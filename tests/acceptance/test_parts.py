"""The parts of the judge: encodings, figures, layouts, samples, observation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.mhc import oracle
from rl_engine.mhc.acceptance.invariance import SAMPLED_ROWS, poisoned_allocations, sampled
from rl_engine.mhc.acceptance.judge import changed, compare, compare_tensor, copied, shared_storage, tensors_in
from rl_engine.mhc.acceptance.layouts import LAYOUTS, expanded, laid_out
from rl_engine.mhc.acceptance.observed import Observed
from rl_engine.mhc.bits import differing, ordinals, same_bytes, tensor_difference
from rl_engine.mhc.block import mhc_block_forward
from rl_engine.mhc.fixtures import make_batch, make_grads
from rl_engine.mhc.provider import ReferenceProvider
from tests.planted.honest import Honest, HonestPost
from tests.planted.identity import FallsBackInAThread

NAN, INF = float("nan"), float("inf")
finite = st.floats(width=32, allow_nan=False)


def fp32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def bits(*encodings: int) -> Tensor:
    return torch.tensor(encodings, dtype=torch.int64).to(torch.int32).view(torch.float32)


# --- equality of encodings ---


def test_a_nan_payload_is_no_difference() -> None:
    quiet, other, negative = bits(0x7FC00000), bits(0x7F800001), bits(-0x400000 + 1)
    assert all(torch.isnan(t).all() for t in (quiet, other, negative))
    assert same_bytes(quiet, other)
    assert same_bytes(quiet, negative)


@pytest.mark.parametrize(("a", "b"), [(NAN, 1.0), (0.0, -0.0), (INF, -INF), (NAN, INF), (1.0, 1.0000001)])
def test_these_differ(a: float, b: float) -> None:
    assert not same_bytes(fp32(a), fp32(b))
    assert differing(fp32(a, 1.0), fp32(b, 1.0)).tolist() == [True, False]


def test_kinds_of_difference() -> None:
    t = fp32(1.0, 2.0)
    kinds = {
        "presence": compare_tensor("x", None, t),
        "dtype": compare_tensor("x", t.double(), t),
        "shape": compare_tensor("x", t[:1], t),
        "bytes": compare_tensor("x", t + 1, t),
    }
    for kind, found in kinds.items():
        assert found is not None
        assert (found.kind, found.boundary) == (kind, "x")
    assert compare_tensor("x", t.clone(), t) is None
    assert compare_tensor("x", None, None) is None
    assert compare_tensor("x", t, None) is not None
    assert [d.boundary for d in compare({"b": t}, {"a": t, "b": t + 1, "c": None})] == ["a", "b"]


# --- ULP distance ---


@given(finite, finite)
def test_ordinals_order_the_numbers(a: float, b: float) -> None:
    first, second = (int(ordinals(fp32(x))) for x in (a, b))
    assert (first < second) == (a < b or (a == b == 0 and str(a) < str(b)))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_neighbours_are_one_apart(value: float) -> None:
    x = fp32(value)
    up = torch.nextafter(x, fp32(INF))
    steps = int(ordinals(up) - ordinals(x))
    assert steps == (2 if value == 0 and str(value)[0] == "-" else 1)


@given(finite, finite)
def test_the_distance_is_symmetric(a: float, b: float) -> None:
    there, back = tensor_difference(fp32(a), fp32(b)), tensor_difference(fp32(b), fp32(a))
    assert (there is None) == (back is None)
    if there is not None and back is not None:
        assert there.max_ulp == back.max_ulp
        assert there.signed_bias_ulp == -back.signed_bias_ulp


# --- figures ---


def test_the_figures_of_a_difference() -> None:
    want = fp32(1.0, 1.0, -1.0, 2.0, 0.5, 3.0).reshape(2, 3)
    got = want.clone()
    flat = got.view(torch.int32).view(-1)
    flat[1] += 1  # +1 ULP
    flat[2] += 3  # away from zero, so -3 on the number line
    flat[5] += 8
    d = tensor_difference(got, want)
    assert d is not None
    assert (d.count, d.total, d.nan_mismatches, d.index) == (3, 6, 0, (0, 1))
    assert (d.candidate_hex, d.reference_hex) == ("0x3f800001", "0x3f800000")
    assert (d.candidate, d.reference) == (1.00000011920928955, 1.0)
    assert (d.max_ulp, d.median_ulp, d.signed_bias_ulp) == (8, 3.0, 2.0)
    assert not d.toward_zero


def test_figures_of_nan_and_of_a_scalar() -> None:
    d = tensor_difference(fp32(NAN, 2.0), fp32(1.0, 2.0))
    assert d is not None
    assert (d.nan_mismatches, d.max_ulp, d.median_ulp, d.signed_bias_ulp) == (1, 0, 0.0, 0.0)
    scalar = tensor_difference(torch.tensor(1.5), torch.tensor(1.0))
    assert scalar is not None
    assert scalar.index == ()
    assert tensor_difference(fp32(), fp32()) is None


def test_truncation_is_told_from_other_differences() -> None:
    want = torch.tensor([1.0, -1.0, 3.0, -5.5] * 8, dtype=torch.bfloat16)
    inward = (want.view(torch.int16) - 1).view(torch.bfloat16)
    mixed = torch.where(torch.arange(32) < 31, inward, (want.view(torch.int16) + 1).view(want.dtype))
    for got, hinted in ((inward, True), (mixed, False)):
        found = compare_tensor("post.r_new", got, want)
        assert found is not None
        assert ("truncation" in found.hint) == hinted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sign_of_a_zero_is_no_truncation(dtype: torch.dtype) -> None:
    found = compare_tensor("norm.residual", torch.zeros(3, dtype=dtype), -torch.zeros(3, dtype=dtype))
    assert found is not None
    assert found.hint == "every difference is the sign of a zero"


def test_one_element_toward_zero_is_no_evidence_of_truncation() -> None:
    """A rounding that went the other way, by chance inward, is what a changed order leaves in a BF16 tensor."""
    want = torch.linspace(1, 2, 1000).to(torch.bfloat16)
    got = want.clone()
    got.view(torch.int16)[500] -= 1
    found = compare_tensor("post.r_new", got, want)
    assert found is not None
    assert "truncation" not in found.hint


# --- layouts and samples ---

PROMISES: dict[str, Callable[[Tensor], bool]] = {
    "padded": lambda t: t.stride(-1) == 1 and (t.dim() == 1 or t.stride(-2) == t.shape[-1] + 5),
    "strided": lambda t: t.stride(-1) == 2,
    "transposed": lambda t: t.stride(0) == 1 and (t.dim() == 1 or not t.is_contiguous()),
    "offset": lambda t: t.is_contiguous() and t.storage_offset() == 1,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_what_it_says(name: str) -> None:
    batch = make_batch("packed_t7_odd")
    grads = make_grads("packed_t7_odd", batch)
    moved = laid_out(batch, grads, LAYOUTS[name])
    originals, tensors = dict(tensors_in([batch, grads])), dict(tensors_in(moved))
    assert tensors.keys() == originals.keys()
    for path, t in tensors.items():
        assert same_bytes(t, originals[path]), path
        if "token_id" not in path and t.numel() > 1:
            assert PROMISES[name](t), (path, t.stride())
    moved[0].validate()


def test_expanded_rows_share_their_memory() -> None:
    batch, grads = expanded(make_batch("packed_t7_odd"), None, 5)
    assert grads is None
    assert (batch.r_old.shape[0], batch.r_old.stride(0), batch.y_sublayer.stride(0)) == (5, 0, 0)
    batch.validate()


@given(st.integers(1, 5000))
def test_the_sample_holds_the_first_and_the_last_row(tokens: int) -> None:
    chosen = sampled(tokens)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(tokens, SAMPLED_ROWS)
    assert chosen[0] == 0
    assert chosen[-1] == tokens - 1


def test_poison_fills_fresh_memory_and_ends() -> None:
    with poisoned_allocations():
        assert torch.isnan(torch.empty(5)).all()
        assert torch.isnan(torch.empty_like(torch.zeros(3, dtype=torch.bfloat16))).all()
    assert not torch.are_deterministic_algorithms_enabled()


# --- storage ---


def test_changed_and_shared_tensors_are_named() -> None:
    x, y = fp32(1.0, 2.0), fp32(3.0)
    snapshot = copied({"x": x, "saved": [y]})
    assert changed(snapshot) == []
    y += 1
    assert changed(snapshot) == ["saved[0]"]
    assert shared_storage({"view": x[1:], "copy": x.clone(), "gone": None}, {"x": x}) == [
        "view (shares the storage of x)"
    ]
    empty = torch.empty(0)
    assert len(shared_storage({"empty": empty.view(0, 4)}, {"x": empty})) == 1


# --- observation ---


def test_an_observed_provider_is_read_off_what_ran() -> None:
    observed = Observed(HonestPost())
    batch = make_batch("one_row")
    mhc_block_forward(batch, ops=observed)
    assert observed.called["mhc_pre_fwd"] == observed.called["mhc_post_fwd"] == 1
    backends = observed.operator_backends()
    assert backends["mhc_post_fwd"] == "honest-post"
    assert {ran for op, ran in backends.items() if op != "mhc_post_fwd"} == {"reference"}
    assert "mhc_post_bwd" not in backends
    assert observed.fallbacks == {}
    assert observed.actual_backend() == "honest-post+reference"


def test_a_composite_is_not_blamed_for_its_parts() -> None:
    observed = Observed(ReferenceProvider())
    mhc_block_forward(make_batch("fused_pre_norm"), ops=observed)
    assert set(observed.reference_inside) == {
        "fp32_gemm_rms_fwd",
        "hc_split_sinkhorn_fwd",
        "h_aggregate_fwd",
        "rmsnorm_residual_fwd",
        "mhc_post_fwd",
    }


def test_a_fallback_on_another_thread_is_heard() -> None:
    observed = Observed(FallsBackInAThread())
    mhc_block_forward(make_batch("one_row"), ops=observed)
    assert observed.fallbacks == {"mhc_post_fwd": ["mhc_post_fwd"]}


def test_the_oracle_beside_a_candidate_is_not_heard() -> None:
    observed = Observed(Honest())
    batch = make_batch("one_row")
    mhc_block_forward(batch, ops=observed)
    thread = threading.Thread(target=lambda: mhc_block_forward(batch, ops=oracle))
    thread.start()
    thread.join()
    assert observed.reference_inside == {}


def test_an_exception_is_placed_at_its_operator() -> None:
    class Broken(HonestPost):
        def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
            raise KeyError("r_new")

    with pytest.raises(KeyError) as caught:
        mhc_block_forward(make_batch("one_row"), ops=Observed(Broken()))
    assert vars(caught.value)["mhc_operator"] == "mhc_post_fwd"


def test_an_observed_provider_has_operators_alone() -> None:
    with pytest.raises(AttributeError, match="weights"):
        _ = Observed(ReferenceProvider()).weights
