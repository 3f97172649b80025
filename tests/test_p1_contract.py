"""The layer contract: frozen values, modes, and a fingerprint that no two field lists share."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.mhc import contract as c
from rl_engine.mhc.contract import LayerContract
from tests.operators.block_inputs import make_block
from tests.operators.support import BF16

DEFAULTS = {
    "hidden": 4096,
    "hc_mult": 4,
    "controller_n": 24,
    "sinkhorn_iters": 20,
    "mhc_eps": 1e-6,
    "rmsnorm_eps": 1e-6,
    "layer_index": 0,
    "placement": "replicated",
    "fusion_mode": "unfused",
    "trainability": "full",
    "schema_version": "p1-mhc-layer-v1",
    "numeric_profile": "oracle-fp32-mhc-v1",
    "gamma_dtype": "bfloat16",
    "controller_rms": "inverse-rms-plus-eps",
}
NAN = float("nan")
REFUSED: dict[str, list[Any]] = {
    "hidden": [0, -1, True, 4096.0, "4096", None, NAN],
    "layer_index": [-1, False, 1.0, "0", None],
    "hc_mult": [3, 5, 0, 4.0, "4", None],
    "controller_n": [23, 25, 24.0, None],
    "sinkhorn_iters": [19, 21, 20.0, True, None],
    "mhc_eps": [0.0, 1e-8, 1.1e-6, -1e-6, NAN, 1, "1e-6", None],
    "rmsnorm_eps": [0.0, 1e-5, NAN, True, None],
    "placement": ["", "Replicated", "tp", None, 0, ["replicated"], ("replicated",)],
    "fusion_mode": ["", "fused", None, 1, ["unfused"]],
    "trainability": ["", "frozen", None, True, ["full"]],
    "schema_version": ["", "p1-mhc-layer-v2", None, 1],
    "numeric_profile": ["", "oracle-fp32-mhc-v2", None, 1, ["oracle-fp32-mhc-v1"]],
    "gamma_dtype": ["", "float16", "torch.bfloat16", None, torch.bfloat16, ["bfloat16"]],
    "controller_rms": ["", "rms", None, 0, ["inverse-rms-plus-eps"]],
}
MODES = {
    "placement": ("replicated", "tp-sharded", "cp-token-sharded"),
    "fusion_mode": ("unfused", "fused-pre-norm"),
    "trainability": ("full", "mixer-frozen"),
    "gamma_dtype": ("bfloat16", "float32"),
    "controller_rms": ("inverse-rms-plus-eps", "rsqrt-mean-plus-eps"),
}


def test_the_constants() -> None:
    assert (c.SCHEMA_VERSION, c.ORACLE_PROFILE) == ("p1-mhc-layer-v1", "oracle-fp32-mhc-v1")
    assert (c.PROD_HIDDEN, c.PROD_CONTROLLER_N, c.SINKHORN_ITERS) == (4096, 24, 20)
    assert (c.MHC_EPS, c.RMSNORM_EPS, c.CANONICAL_FUSION_MODE) == (1e-6, 1e-6, "unfused")
    assert (slice(0, 4), slice(4, 8), slice(8, 24)) == (c.PRE_SLICE, c.POST_SLICE, c.COMB_SLICE)
    assert tuple(MODES.values())[:3] == (c.PLACEMENTS, c.FUSION_MODES, c.TRAINABILITY_MODES)
    assert c.ROW_GEOMETRIES == ("one-row", "packed")
    assert c.tensor_bytes(torch.tensor([1.0, -2.0]).to(BF16)) == bytes.fromhex("803f00c0")


def test_the_defaults_are_production() -> None:
    contract = LayerContract()
    assert dataclasses.asdict(contract) == DEFAULTS
    assert contract.flat_k == 16384
    contract.validate()
    contract.assert_production()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_field_refuses(name: str, value: Any) -> None:
    contract = LayerContract(**{name: value})
    with pytest.raises(ValueError, match=f"contract.{name}: got {re.escape(repr(value))}, want "):
        contract.validate()
    with pytest.raises(ValueError, match=name):
        contract.assert_production()


def test_every_field_is_refused_and_moved_somewhere_here() -> None:
    names = {spec.name for spec in dataclasses.fields(LayerContract)}
    assert names == set(REFUSED) == set(DEFAULTS) == set(OTHER) | {"layer_index"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in MODES.items() for value in values])
def test_every_mode_is_valid(name: str, value: str) -> None:
    LayerContract(**{name: value}).validate()


@pytest.mark.parametrize("hidden", [1, 128, 4100, 5120, 7168])
def test_any_positive_width_is_valid_and_only_4096_is_production(hidden: int) -> None:
    contract = LayerContract(hidden=hidden)
    contract.validate()
    assert contract.flat_k == 4 * hidden
    with pytest.raises(ValueError, match=f"contract.hidden: got {hidden}, want 4096"):
        contract.assert_production()


OTHER: dict[str, Any] = {
    "hidden": 4097,
    "hc_mult": 5,
    "controller_n": 25,
    "sinkhorn_iters": 21,
    "mhc_eps": 1e-8,
    "rmsnorm_eps": 1e-8,
    "placement": "tp-sharded",
    "fusion_mode": "fused-pre-norm",
    "trainability": "mixer-frozen",
    "schema_version": "p1-mhc-layer-v2",
    "numeric_profile": "another",
    "gamma_dtype": "float32",
    "controller_rms": "rsqrt-mean-plus-eps",
}


@pytest.mark.parametrize("name", OTHER)
def test_the_fingerprint_moves_with(name: str) -> None:
    moved = LayerContract(**{name: OTHER[name]}).fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", moved)
    assert moved != LayerContract().fingerprint() == LayerContract(**DEFAULTS).fingerprint()


def test_no_two_changes_share_a_fingerprint() -> None:
    contracts = [LayerContract(), *(LayerContract(**{name: value}) for name, value in OTHER.items())]
    swapped = [LayerContract(mhc_eps=1e-8, rmsnorm_eps=1e-5), LayerContract(mhc_eps=1e-5, rmsnorm_eps=1e-8)]
    assert len({contract.fingerprint() for contract in contracts + swapped}) == len(contracts) + 2


def test_the_fingerprint_does_not_move_with_the_layer() -> None:
    assert LayerContract(layer_index=7).fingerprint() == LayerContract().fingerprint()


TEXT = st.one_of(
    st.text(st.sampled_from('a,:[]"\\\0\n= |/'), max_size=6),
    st.text(st.characters(exclude_categories=()), max_size=4),
    st.sampled_from(
        ["4", "true", "null", "nan", "0x1.0p+0", 'full","float'] + [v for vs in MODES.values() for v in vs]
    ),
)
VALUE = st.one_of(TEXT, st.integers(-5, 5), st.booleans(), st.none(), st.floats(allow_nan=False))
FIELDS = st.dictionaries(st.sampled_from(sorted(OTHER)), VALUE, max_size=3)


def exact(contract: LayerContract) -> list[tuple[str, str]]:
    return [(type(v).__name__, repr(v)) for k, v in dataclasses.asdict(contract).items() if k != "layer_index"]


@settings(max_examples=400)
@given(FIELDS, FIELDS)
def test_different_fields_give_different_fingerprints(first: dict[str, Any], second: dict[str, Any]) -> None:
    a, b = LayerContract(**first), LayerContract(**{**first, **second})
    assert (a.fingerprint() == b.fingerprint()) == (exact(a) == exact(b))


@settings(max_examples=200)
@given(TEXT, TEXT, TEXT)
def test_text_cannot_move_across_a_border(a: str, b: str, separator: str) -> None:
    joined = LayerContract(placement=a + separator, fusion_mode=b)
    shifted = LayerContract(placement=a, fusion_mode=separator + b)
    assert (joined.fingerprint() == shifted.fingerprint()) == (exact(joined) == exact(shifted))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\ud83d\ude00", "\U0001f600"),
        ("4", 4),
        (1, True),
        (0.0, -0.0),
        (1, 1.0),
        (None, "None"),
        ("nan", NAN),
        ("\0", ""),
    ],
)
def test_values_that_look_alike_are_told_apart(one: Any, other: Any) -> None:
    assert LayerContract(placement=one).fingerprint() != LayerContract(placement=other).fingerprint()


def test_modes_are_set_on_a_copy() -> None:
    contract = LayerContract()
    assert contract.with_mode("placement", "tp-sharded") == LayerContract(placement="tp-sharded")
    assert contract.placement == "replicated"


def test_the_dict_of_a_contract() -> None:
    contract = LayerContract(hidden=5, layer_index=3, gamma_dtype="float32")
    assert LayerContract.from_dict(contract.to_dict()) == contract
    values = contract.to_dict()
    for odd in ({**values, "more": 1}, {k: v for k, v in values.items() if k != "mhc_eps"}):
        with pytest.raises(ValueError, match=r"more|mhc_eps"):
            LayerContract.from_dict(odd)
    with pytest.raises(ValueError, match="sinkhorn_iters"):
        LayerContract.from_dict({**values, "sinkhorn_iters": 19})


def test_the_types_are_frozen() -> None:
    batch, grads = make_block("frozen types", 1, 2)
    for owner in (batch.contract, batch.controller, batch.norm, batch, grads):
        for spec in dataclasses.fields(owner):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(owner, spec.name, None)
