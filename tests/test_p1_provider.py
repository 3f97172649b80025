"""Providers: the protocol, the gate that refuses what is not declared, the stub, and what provenance says."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_engine.mhc import block, oracle, provider
from rl_engine.mhc.contract import CONTROLLER_RMS, LayerContract, ResidualBatch
from rl_engine.mhc.operators.interface import COMPOSITE_OPERATORS, LEAF_OPERATORS, OPERATORS
from rl_engine.mhc.operators.reference import reference_calls
from rl_engine.mhc.provider import (
    MHCProvider,
    ReferenceProvider,
    StubProvider,
    check_capability,
    resolve_provider,
    unimplemented_operators,
)
from tests.operators.block_inputs import make_block
from tests.reference.bridge import assert_same_tensor

PROFILE = "oracle-fp32-mhc-v1"
LISTS = ("geometry", "devices", "fusion_modes", "trainability", "placements")
TASKS = {
    "hc_split_sinkhorn": "P1-1 (#14)",
    "fp32_gemm_rms": "P1-2 (#15)",
    "fixed_k_gemm": "P1-2 (#15)",
    "mhc_post": "P1-3 (#16)",
    "mhc_pre": "P1-4 (#17)",
    "h_aggregate": "P1-4 (#17)",
    "mhc_pre_rmsnorm_fused": "P1-4 (#17)",
    "rmsnorm_residual": "P1-5 (#18)",
}
FUNCTIONS = (*OPERATORS, "mhc_block_forward", "mhc_block_backward")


def oracle_set(**changes: Any) -> types.SimpleNamespace:
    """The oracle's functions as a set of operators that is no ReferenceProvider, with parts replaced."""
    parts = {name: getattr(oracle, name) for name in OPERATORS}
    facts = {"name": "other", "numeric_profile": PROFILE, "capabilities": oracle.capabilities}
    return types.SimpleNamespace(**{**parts, **facts, **changes})


def declaring(declared: Any = None, **changes: Any) -> types.SimpleNamespace:
    """A provider that declares this, or the reference's modes with some keys changed; ``...`` removes a key."""
    if declared is None:
        declared = {key: value for key, value in {**oracle.capabilities(), **changes}.items() if value is not ...}
    return oracle_set(capabilities=lambda: declared)


def refused(candidate: Any, contract: LayerContract, batch: ResidualBatch | None = None) -> str:
    with pytest.raises(NotImplementedError, match="fail-closed") as caught:
        check_capability(candidate, contract, batch)
    return str(caught.value)


# --- the protocol ---


def test_both_providers_satisfy_the_protocol() -> None:
    for made in (ReferenceProvider(), StubProvider(), resolve_provider("reference"), resolve_provider("stub")):
        assert isinstance(made, MHCProvider)
    assert not isinstance(object(), MHCProvider)
    assert not isinstance(types.SimpleNamespace(name="x", numeric_profile=PROFILE), MHCProvider)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_one_signature(name: str) -> None:
    """The same parameters, kinds and defaults in the oracle, the protocol, the reference and the stub."""
    owners: list[Any] = [oracle, StubProvider()]
    if name in OPERATORS:
        owners.append(ReferenceProvider())
    found = [inspect.signature(getattr(owner, name)) for owner in owners]
    shapes = [[(p.name, p.kind, p.default) for p in signature.parameters.values()] for signature in found]
    if name in OPERATORS:
        declared = list(inspect.signature(getattr(MHCProvider, name)).parameters.values())
        assert declared[0].name == "self"
        shapes.append([(p.name, p.kind, p.default) for p in declared[1:]])
    assert all(shape == shapes[0] for shape in shapes), shapes


def test_the_operators_are_those_of_the_specification() -> None:
    assert {name.rpartition("_")[0] for name in OPERATORS} == set(TASKS)
    assert set(COMPOSITE_OPERATORS) == {"mhc_pre_fwd", "mhc_pre_bwd", "mhc_pre_rmsnorm_fused_fwd"}
    assert set(LEAF_OPERATORS) | set(COMPOSITE_OPERATORS) == set(OPERATORS)
    assert len(OPERATORS) == 15


# --- the gate ---


@pytest.mark.parametrize("key", ["backend", *LISTS])
@pytest.mark.parametrize("with_batch", [True, False])
def test_a_missing_or_empty_declaration_is_refused(key: str, with_batch: bool) -> None:
    batch = make_block("gate", 2, 3)[0]
    empty: list[Any] = [..., None, [], (), set(), {}, "", 0, False]
    for value in empty:
        message = refused(declaring(**{key: value}), batch.contract, batch if with_batch else None)
        assert key in message and "other" in message


@pytest.mark.parametrize("key", LISTS)
@pytest.mark.parametrize("with_batch", [True, False])
def test_a_declaration_of_another_kind_is_refused(key: str, with_batch: bool) -> None:
    """A string holds every substring of itself, and a dict is no list: neither declares a mode."""
    batch = make_block("gate", 2, 3)[0]
    names = oracle.capabilities()[key]
    wrong: list[Any] = [names[0], ",".join(names), dict.fromkeys(names, True), 1, True, object(), [1, 2], [None]]
    for value in wrong:
        assert key in refused(declaring(**{key: value}), batch.contract, batch if with_batch else None)


@pytest.mark.parametrize("value", [["reference"], {"name": "x"}, 3, True, object()])
def test_a_backend_that_is_no_name_is_refused(value: Any) -> None:
    assert "backend" in refused(declaring(backend=value), LayerContract())


@pytest.mark.parametrize("declared", [[], "everything", 3, ["unfused"], {}])
def test_what_is_no_declaration_is_refused(declared: Any) -> None:
    refused(declaring(declared), LayerContract())


def test_a_provider_that_declares_nothing_is_refused() -> None:
    batch, grads = make_block("silent", 2, 3)
    _, saved = oracle.mhc_block_forward(batch)
    silent = oracle_set()
    del silent.capabilities
    for candidate in (silent, oracle_set(capabilities=None), oracle_set(capabilities=oracle.capabilities())):
        assert "capabilities" in refused(candidate, batch.contract)
        calls: list[Callable[[], Any]] = [
            lambda c=candidate: oracle.mhc_block_forward(batch, ops=c),  # type: ignore[misc]
            lambda c=candidate: oracle.mhc_block_backward(batch, saved, grads, ops=c),  # type: ignore[misc]
            lambda c=candidate: oracle.mhc_pre_fwd(batch, c),  # type: ignore[misc]
            lambda c=candidate: oracle.mhc_pre_rmsnorm_fused_fwd(batch, c),  # type: ignore[misc]
        ]
        started: list[str] = []
        for call in calls:
            with reference_calls(started.append), pytest.raises(NotImplementedError, match="fail-closed"):
                call()
        assert started == []


MODES = [
    ("fusion_modes", "fusion_mode", "fused-pre-norm", ["unfused"]),
    ("fusion_modes", "fusion_mode", "unfused", ["fused-pre-norm"]),
    ("trainability", "trainability", "mixer-frozen", ["full"]),
    ("trainability", "trainability", "full", ["mixer-frozen"]),
    ("placements", "placement", "tp-sharded", ["replicated", "cp-token-sharded"]),
    ("placements", "placement", "cp-token-sharded", ["replicated"]),
]


@pytest.mark.parametrize(("key", "field", "mode", "declared"), MODES)
def test_an_undeclared_mode_is_refused(key: str, field: str, mode: str, declared: list[str]) -> None:
    contract = LayerContract(**{field: mode})
    message = refused(declaring(**{key: declared}), contract)
    assert key in message and mode in message and declared[0] in message
    check_capability(declaring(**{key: [*declared, mode]}), contract)
    check_capability(declaring(**{key: frozenset([mode])}), contract)
    near = [mode.upper(), mode + " ", mode[:-1]]
    refused(declaring(**{key: near}), contract)


@pytest.mark.parametrize("placement", ["tp-sharded", "cp-token-sharded"])
def test_the_reference_is_replicated_only(placement: str) -> None:
    contract = LayerContract(placement=placement)
    assert placement in refused(ReferenceProvider(), contract)
    batch, _ = make_block("placed", 2, 3, placement=placement)
    for ops in (None, oracle, ReferenceProvider()):
        with pytest.raises(NotImplementedError, match=r"placements.*fail-closed"):
            oracle.mhc_block_forward(batch, ops=ops)


def test_an_undeclared_device_or_geometry_is_refused() -> None:
    batch, _ = make_block("device", 1, 3)
    one_row = dataclasses.replace(batch, row_geometry="one-row")
    only_gpu, only_packed = declaring(devices=["cuda"]), declaring(geometry=["packed"])
    assert "devices" in refused(only_gpu, batch.contract, batch)
    assert "one-row" in refused(only_packed, batch.contract, one_row)
    check_capability(only_packed, batch.contract, batch)
    meta = dataclasses.replace(batch, weight_fingerprint="").to("meta")
    for candidate in (ReferenceProvider(), declaring()):
        assert "meta" in refused(candidate, batch.contract, meta)
    with pytest.raises(NotImplementedError, match=r"devices.*meta.*fail-closed"):
        oracle.mhc_block_forward(meta)


@pytest.mark.parametrize("profile", ["another", "", None, ..., 1])
def test_another_profile_is_refused(profile: Any) -> None:
    candidate = oracle_set(numeric_profile=profile)
    if profile is ...:
        del candidate.numeric_profile
    message = refused(candidate, LayerContract())
    assert "numeric_profile" in message and PROFILE in message


def test_the_block_refuses_a_provider_of_another_profile() -> None:
    """Its bytes would be filed under the contract's profile."""
    batch, _ = make_block("profile", 2, 3)
    for entry in (oracle.mhc_block_forward, oracle.mhc_pre_fwd, oracle.mhc_pre_rmsnorm_fused_fwd):
        with pytest.raises(NotImplementedError, match=r"numeric_profile.*fail-closed"):
            entry(batch, ops=oracle_set(numeric_profile="another"))


@pytest.mark.parametrize("widths", [[], (), {}, [4096.5], ["4096"], "4096", 4096, True, object(), [128, 7168]])
def test_a_width_that_is_not_declared_is_refused(widths: Any) -> None:
    assert "hidden" in refused(declaring(hidden=widths), LayerContract())


@pytest.mark.parametrize("widths", [[4096], (128, 4096), {4096}, range(1, 8193), None])
def test_a_declared_width_passes(widths: Any) -> None:
    check_capability(declaring(hidden=widths), LayerContract())


def test_the_reference_serves_what_it_declares() -> None:
    declared = ReferenceProvider().capabilities()
    assert set(declared) == {"backend", "controller_rms", *LISTS}
    assert declared["placements"] == ["replicated"]
    assert declared["controller_rms"] == list(CONTROLLER_RMS)
    for fusion in declared["fusion_modes"]:
        for trainability in declared["trainability"]:
            batch, grads = make_block("served", 1, 3, fusion_mode=fusion, trainability=trainability)
            check_capability(ReferenceProvider(), batch.contract, batch)
            _, saved = oracle.mhc_block_forward(batch, ops=ReferenceProvider())
            assert oracle.mhc_block_backward(batch, saved, grads, ops=ReferenceProvider())["d_gamma"] is not None


# --- the stub ---


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stub_raises_and_names_the_task(name: str) -> None:
    task = TASKS.get(name.rpartition("_")[0], "P1-4 (#17)")
    started: list[str] = []
    with reference_calls(started.append):
        for arguments in ((), (1, 2, 3), (torch.zeros(1),) * 5):
            with pytest.raises(NotImplementedError) as caught:
                getattr(StubProvider(), name)(*arguments)
            assert task in str(caught.value) and name in str(caught.value)
    assert started == []


def test_the_stub_executes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, grads = make_block("stub", 2, 3)
    _, saved = oracle.mhc_block_forward(batch)
    ran: list[str] = []
    for name in LEAF_OPERATORS:
        monkeypatch.setattr(provider.ReferenceOperators, name, lambda *_, n=name, **__: ran.append(n))
    for name in (*COMPOSITE_OPERATORS, "mhc_block_forward", "mhc_block_backward"):
        monkeypatch.setattr(block, name, lambda *_, n=name, **__: ran.append(n))
    stub = StubProvider()
    calls: list[Callable[[], Any]] = [
        lambda: stub.mhc_pre_fwd(batch),
        lambda: stub.mhc_pre_bwd(grads.d_normalized, saved["post"], saved["c"], batch, saved, ops=ReferenceProvider()),
        lambda: stub.mhc_pre_rmsnorm_fused_fwd(batch, ops=ReferenceProvider()),
        lambda: stub.mhc_block_forward(batch),
        lambda: oracle.mhc_block_forward(batch, ops=stub),
        lambda: oracle.mhc_block_backward(batch, saved, grads, ops=stub),
        lambda: oracle.mhc_pre_fwd(batch, stub),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="fail-closed"):
            call()
    assert ran == []


def test_the_stub_declares_no_mode() -> None:
    declared = StubProvider().capabilities()
    assert set(declared) == {"backend", *LISTS}
    assert all(declared[key] == [] for key in LISTS)
    for mode in ({}, {"fusion_mode": "fused-pre-norm"}, {"trainability": "mixer-frozen"}):
        refused(StubProvider(), LayerContract(**mode))
    assert StubProvider().provenance()["actual_backend"] == "none"
    assert unimplemented_operators(StubProvider()) == OPERATORS
    assert unimplemented_operators(ReferenceProvider()) == ()


def test_a_task_starts_from_the_stub() -> None:
    class Started(StubProvider):
        name = "started"

        def mhc_post_fwd(self, r_old: Any, y: Any, c: Any, post: Any) -> Any:
            return r_old

    assert set(OPERATORS) - set(unimplemented_operators(Started())) == {"mhc_post_fwd"}
    assert isinstance(Started(), MHCProvider)
    with pytest.raises(NotImplementedError, match="P1-3"):
        Started().mhc_post_bwd()


def test_composites_of_the_reference_call_its_parts_or_those_of_ops() -> None:
    batch, _ = make_block("parts", 2, 3)
    called: list[str] = []

    class Recording(ReferenceProvider):
        name = "recording"

        def h_aggregate_fwd(self, pre: Any, r_old: Any) -> Any:
            called.append("own")
            return super().h_aggregate_fwd(pre, r_old)

    want = oracle.mhc_pre_fwd(batch)[0]
    for run, times in (
        (lambda: Recording().mhc_pre_fwd(batch), 1),
        (lambda: Recording().mhc_pre_fwd(batch, ReferenceProvider()), 0),
        (lambda: ReferenceProvider().mhc_pre_fwd(batch, Recording()), 1),
        (lambda: ReferenceProvider().mhc_pre_fwd(batch, oracle), 0),
        (lambda: Recording().mhc_pre_rmsnorm_fused_fwd(batch), 1),
    ):
        called.clear()
        assert_same_tensor("hidden", run()[0], want)
        assert len(called) == times
