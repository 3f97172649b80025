"""The record of a run's boundaries, and the first one at which two runs part."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_engine.mhc.trace import (
    BACKWARD_BOUNDARIES,
    FORWARD_BOUNDARIES,
    BoundaryRecord,
    MHCTrace,
    first_divergence,
)
from tests.operators.support import BF16

PROFILE = "oracle-fp32-mhc-v1"
NAMES = ("p", "r", "h", "pre")


def trace_of(*names: str) -> MHCTrace:
    trace = MHCTrace(PROFILE)
    for name in names:
        trace.record(name, torch.full((2,), float(len(name))))
    return trace


def test_the_boundaries_in_order() -> None:
    assert " ".join(FORWARD_BOUNDARIES) == (
        "controller.p controller.r controller.h split.pre split.post split.c "
        "pre.hidden norm.normalized norm.residual post.r_new"
    )
    assert " ".join(BACKWARD_BOUNDARIES) == (
        "bwd.dy_sublayer bwd.d_c bwd.d_post bwd.d_hidden bwd.d_gamma bwd.d_r_old "
        "bwd.d_stream0 bwd.d_stream1 bwd.d_stream2 bwd.d_stream3"
    )


def test_a_record() -> None:
    trace = MHCTrace(PROFILE)
    trace.record("a", torch.tensor([[1.0], [-2.0]]).to(BF16).t())
    trace.record("b", torch.tensor(7))
    first, second = trace.records
    assert first == BoundaryRecord("a", "bfloat16", (1, 2), hashlib.sha256(bytes.fromhex("803f00c0")).hexdigest())
    assert (second.dtype, second.shape) == ("int64", ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.name = "c"  # type: ignore[misc]
    assert list(trace.hashes().items()) == [("a", first.sha256), ("b", second.sha256)]


def test_a_record_does_not_follow_its_tensor() -> None:
    tensor, trace = torch.zeros(3), MHCTrace(PROFILE)
    trace.record("a", tensor)
    before = trace.hashes()
    tensor += 1
    assert trace.hashes() == before


def test_a_trace_as_json() -> None:
    trace = trace_of("a", "bb")
    trace.note("fma", "forbidden")
    trace.note("points", ["x"])
    found = json.loads(json.dumps(trace.to_dict()))
    assert set(found) == {"numeric_profile", "records", "notes"}
    assert found["numeric_profile"] == PROFILE == MHCTrace().numeric_profile
    assert found["notes"] == {"fma": "forbidden", "points": ["x"]}
    assert [set(record) for record in found["records"]] == [{"name", "dtype", "shape", "sha256"}] * 2
    assert found["records"][1] == {**dataclasses.asdict(trace.records[1]), "shape": [2]}


def test_equal_traces_do_not_part() -> None:
    assert first_divergence(trace_of(*NAMES), trace_of(*NAMES)) is None
    assert first_divergence(MHCTrace(), MHCTrace()) is None
    assert first_divergence([], []) is None


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"dtype": "bfloat16"}, {"shape": (1, 2)}, {"name": "other"}])
def test_any_changed_field_is_a_divergence(change: dict[str, object], index: int) -> None:
    records = trace_of(*NAMES).records
    changed = list(records)
    changed[index] = dataclasses.replace(records[index], **change)  # type: ignore[arg-type]
    changed[-1] = dataclasses.replace(changed[-1], sha256="f" * 64)
    assert first_divergence(records, changed) == NAMES[index]
    assert first_divergence(changed, records) == changed[index].name


def test_same_bytes_of_another_type_or_shape_part() -> None:
    one, narrow, folded = MHCTrace(), MHCTrace(), MHCTrace()
    one.record("a", torch.zeros(4))
    narrow.record("a", torch.zeros(8).to(BF16))
    folded.record("a", torch.zeros(2, 2))
    assert one.hashes() == narrow.hashes() == folded.hashes()
    assert first_divergence(one, narrow) == first_divergence(one, folded) == "a"


def test_one_trace_is_longer() -> None:
    for stop in range(4):
        assert first_divergence(trace_of(*NAMES), trace_of(*NAMES[:stop])) == NAMES[stop]
        assert first_divergence(trace_of(*NAMES[:stop]), trace_of(*NAMES)) == NAMES[stop]


@given(st.permutations(NAMES))
def test_another_order_is_a_divergence(order: list[str]) -> None:
    moved = [name for name, other in zip(NAMES, order, strict=True) if name != other]
    assert first_divergence(trace_of(*NAMES), trace_of(*order)) == (moved[0] if moved else None)


def test_a_repeated_record_counts() -> None:
    assert first_divergence(trace_of("p", "p"), trace_of("p")) == "p"
    assert first_divergence(trace_of("p", "p", "r"), trace_of("p", "r")) == "p"


def test_records_alone_are_enough_once() -> None:
    a, b = trace_of(*NAMES), trace_of(*NAMES[:2])
    assert first_divergence(iter(a.records), (record for record in b.records)) == "h"
    assert first_divergence(a, tuple(a.records)) is None
