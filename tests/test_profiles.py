"""Numeric profiles: what one is, how one becomes known, and what is refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.mhc import elementary, profiles
from rl_engine.mhc.contract import ORACLE_PROFILE, PORTABLE_PROFILE, LayerContract
from rl_engine.mhc.elementary import bind_recipe, for_profile
from rl_engine.mhc.profiles import NumericProfile, Tolerance, get_profile, known_profiles, register_profile
from tests.profile_registry import install, restored_registry

BUILT_IN = (ORACLE_PROFILE, PORTABLE_PROFILE)
NEAR = NumericProfile("near-v1", elementary="torch-library", tolerance={"*": Tolerance(ulp=2)}, base=ORACLE_PROFILE)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with restored_registry():
        yield


# --- the types ---


def test_the_built_in_ones() -> None:
    assert known_profiles() == BUILT_IN
    for name, recipe in zip(BUILT_IN, ("torch-library", "correctly-rounded"), strict=True):
        profile = get_profile(name)
        assert (profile.id, profile.elementary, profile.reference) == (name, recipe, name)
        assert (profile.strict, profile.base, profile.operators, dict(profile.tolerance)) == (True, None, "", {})
        assert profile.allowed("post.r_new") is None
        assert (profile.long_reduction_order, profile.stream_tree) == ("serial-ascending-left-fold", "(a0+a1)+(a2+a3)")
        assert (profile.fma, profile.downcast_points) == ("forbidden", ("pre.hidden", "norm.normalized", "post.r_new"))


def test_a_profile_is_frozen_and_hashable() -> None:
    twin = dataclasses.replace(NEAR)
    assert twin == NEAR and hash(twin) == hash(NEAR) and len({twin, NEAR, get_profile(ORACLE_PROFILE)}) == 2
    other = dataclasses.replace(NEAR, tolerance={"*": Tolerance(ulp=3)})
    assert other != NEAR
    for field in dataclasses.fields(NumericProfile):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(NEAR, field.name, "other")
    with pytest.raises(TypeError):
        NEAR.tolerance["*"] = Tolerance(ulp=9)  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        NEAR.tolerance["*"].ulp = 9  # type: ignore[misc]


def test_a_tolerance_is_copied_and_looked_up_by_boundary() -> None:
    given = {"*": Tolerance(ulp=1), "pre.hidden": Tolerance(rtol=0.5)}
    profile = NumericProfile("p", elementary="torch-library", tolerance=given, base=PORTABLE_PROFILE)
    given["pre.hidden"] = Tolerance(ulp=99)
    assert profile.allowed("pre.hidden") == Tolerance(rtol=0.5)
    assert profile.allowed("bwd.d_c") == Tolerance(ulp=1)
    assert (profile.strict, profile.reference) == (False, PORTABLE_PROFILE)
    narrow = dataclasses.replace(profile, tolerance={"pre.hidden": Tolerance(atol=1.0)})
    assert narrow.allowed("bwd.d_c") is None


@pytest.mark.parametrize("numbers", [{"ulp": 1}, {"rtol": 1e-3}, {"atol": 1e-30}, {"ulp": 3, "rtol": 0.0, "atol": 0.5}])
def test_a_tolerance(numbers: dict[str, Any]) -> None:
    tolerance = Tolerance(**numbers)
    assert {"ulp": 0, "rtol": 0.0, "atol": 0.0} | numbers == dataclasses.asdict(tolerance)
    assert hash(tolerance) == hash(Tolerance(**numbers))


BAD_NUMBERS = [{}, {"ulp": 0}, {"ulp": -1}, {"rtol": -1e-9, "ulp": 1}, {"atol": -0.5}]
BAD_NUMBERS += [{field: value} for field in ("rtol", "atol") for value in (float("inf"), float("nan"), -float("inf"))]


@pytest.mark.parametrize("numbers", BAD_NUMBERS, ids=str)
def test_a_tolerance_that_is_none_is_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tolerance: got .*want finite numbers of at least 0, not all 0"):
        Tolerance(**numbers)


# --- registering ---


def test_the_same_again_is_harmless() -> None:
    register_profile(NEAR)
    register_profile(NEAR)
    register_profile(dataclasses.replace(NEAR))
    assert get_profile("near-v1") is NEAR
    assert known_profiles() == ("near-v1", *BUILT_IN)
    for name in BUILT_IN:
        register_profile(get_profile(name))


OTHER_FIELDS = {
    "elementary": "correctly-rounded",
    "stream_tree": "left",
    "long_reduction_order": "descending",
    "fma": "allowed",
    "downcast_points": (),
    "tolerance": {"*": Tolerance(ulp=3)},
    "base": PORTABLE_PROFILE,
    "operators": "a.module:Class",
}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_other_fields_under_a_taken_id_are_refused(field: str) -> None:
    register_profile(NEAR)
    for known in (NEAR, get_profile(ORACLE_PROFILE)):
        changed = dataclasses.replace(known, **{field: OTHER_FIELDS[field]})
        with pytest.raises(ValueError, match=f"'{known.id}' is registered already, with other fields"):
            register_profile(changed)
        assert get_profile(known.id) is known


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "recipe": ({"elementary": "nope"}, "elementary: got 'nope', want one of: torch-library, correctly-rounded"),
    "no base": ({"tolerance": {"*": Tolerance(ulp=1)}}, "'p' has a tolerance, want a base"),
    "base unknown": ({"base": "nope", "tolerance": {"*": Tolerance(ulp=1)}}, "base: got 'nope', want a registered"),
    "base loose": ({"base": "near-v1", "tolerance": {"*": Tolerance(ulp=1)}}, "base: got 'near-v1'.*strict"),
    "itself": ({"base": "p", "tolerance": {"*": Tolerance(ulp=1)}}, "base: got 'p'"),
    "unknown base of a strict one": ({"base": "nope"}, "base: got 'nope'"),
    "another tree": ({"stream_tree": "left"}, "'p' has an arithmetic of its own, want operators"),
    "another fold": ({"long_reduction_order": "split-k"}, "'p' has an arithmetic of its own, want operators"),
    "fma": ({"fma": "allowed"}, "'p' has an arithmetic of its own, want operators"),
    "another store": ({"downcast_points": ("pre.hidden",)}, "'p' has an arithmetic of its own, want operators"),
    "empty id": ({"id": ""}, "id: got '', want a printable name"),
    "two lines": ({"id": "a\nb"}, r"id: got 'a\\nb', want a printable name"),
    "an escape": ({"id": "a\x1b[31m"}, "id: got .*, want a printable name"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_judged_is_refused(fault: str) -> None:
    register_profile(NEAR)
    fields, message = REFUSED[fault]
    before = dict(profiles._REGISTRY), dict(elementary._recipe_of_profile)
    with pytest.raises(ValueError, match=f"^profile: .*{message}"):
        register_profile(NumericProfile(**{"id": "p", "elementary": "torch-library"} | fields))
    assert (profiles._REGISTRY, elementary._recipe_of_profile) == before


@pytest.mark.parametrize("wrong", [None, "near-v1", {"id": "p"}, NumericProfile, Tolerance(ulp=1)], ids=str)
def test_what_is_no_profile_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="want a NumericProfile"):
        register_profile(wrong)


@pytest.mark.parametrize("wrong", [3, None, {"ulp": 1}, 1e-3], ids=str)
def test_a_tolerance_of_another_type_is_refused(wrong: Any) -> None:
    """It would otherwise end a run of the judge at the first element that differs."""
    with pytest.raises((TypeError, ValueError), match="tolerance"):
        register_profile(dataclasses.replace(NEAR, tolerance={"*": wrong}))
    assert "near-v1" not in known_profiles()


@pytest.mark.parametrize("name", ["", "oracle", "oracle-fp32-mhc-v2", "PORTABLE-FP32-MHC-V1", "portable-fp32-mhc-v1 "])
def test_an_unknown_id_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        get_profile(name)
    assert str(caught.value) == f"numeric_profile: got {name!r}, want one of: {', '.join(BUILT_IN)}"
    register_profile(NEAR)
    with pytest.raises(ValueError, match=r"want one of: near-v1, oracle-fp32-mhc-v1, portable-fp32-mhc-v1$"):
        get_profile(name)


# --- what a registered profile changes ---


def test_a_contract_takes_it_and_moves() -> None:
    contract = LayerContract(hidden=128, numeric_profile="near-v1")
    with pytest.raises(ValueError, match="numeric_profile: got 'near-v1'"):
        contract.validate()
    register_profile(NEAR)
    contract.validate()
    fingerprints = {LayerContract(hidden=128, numeric_profile=name).fingerprint() for name in known_profiles()}
    assert len(fingerprints) == 3


def test_every_known_profile_has_its_functions() -> None:
    register_profile(NEAR)
    register_profile(NumericProfile("strict-v1", elementary="correctly-rounded"))
    x = torch.tensor([0.25, 4.0])
    for name in known_profiles():
        recipe = for_profile(name)
        assert recipe.name == get_profile(name).elementary
        assert recipe.exp(x).tolist() == pytest.approx([1.2840254, 54.59815])
        assert recipe.sigmoid(x).tolist() == pytest.approx([0.5621765, 0.98201376])
        assert (recipe.sqrt(x).tolist(), recipe.rsqrt(x).tolist()) == ([0.5, 2.0], [2.0, 0.5])
        assert recipe.div(x, x.flip(0)).tolist() == [0.0625, 16.0]
    assert for_profile("strict-v1") is for_profile(PORTABLE_PROFILE)


def test_a_recipe_is_bound_once() -> None:
    bind_recipe("p", "torch-library")
    bind_recipe("p", "torch-library")
    with pytest.raises(ValueError, match="elementary: 'p' has 'torch-library', got 'correctly-rounded'"):
        bind_recipe("p", "correctly-rounded")
    with pytest.raises(ValueError, match="elementary: got 'nope', want one of: torch-library, correctly-rounded"):
        bind_recipe("q", "nope")
    with pytest.raises(ValueError, match="want one of: oracle-fp32-mhc-v1, p, portable-fp32-mhc-v1"):
        for_profile("q")


# --- entry points ---

MODULE = """
from rl_engine.mhc.profiles import NumericProfile, Tolerance
NEAR = NumericProfile("offered-v1", "torch-library", tolerance={"*": Tolerance(ulp=1)}, base="oracle-fp32-mhc-v1")
RENAMED = NumericProfile("another-id", "torch-library")
INVALID = NumericProfile("invalid-v1", "no-such-recipe")
NUMBER = 3
"""
BROKEN = {
    "no-module-v1": "no_such_module_here:NEAR",
    "no-name-v1": "offering:ABSENT",
    "number-v1": "offering:NUMBER",
    "renamed-v1": "offering:RENAMED",
    "invalid-v1": "offering:INVALID",
    "raises-v1": "raising:NEAR",
}


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "offering", MODULE, {"offered-v1": "offering:NEAR"} | BROKEN)
    (tmp_path / "raising.py").write_text("raise RuntimeError('one line\\nand another')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_installed_package_offers_one(offered: None) -> None:
    assert known_profiles() == tuple(sorted((*BUILT_IN, "offered-v1", *BROKEN)))
    get_profile(ORACLE_PROFILE)
    LayerContract(hidden=128).validate()
    assert "offering" not in sys.modules
    LayerContract(hidden=128, numeric_profile="offered-v1").validate()
    assert get_profile("offered-v1") is sys.modules["offering"].NEAR
    assert get_profile("offered-v1").reference == ORACLE_PROFILE
    assert for_profile("offered-v1").name == "torch-library"


def test_an_unknown_id_loads_none_of_them(offered: None) -> None:
    with pytest.raises(ValueError, match=r"got 'misspelt', want one of: .*offered-v1, oracle-.*, raises-v1"):
        get_profile("misspelt")
    assert "offering" not in sys.modules and "raising" not in sys.modules


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_one_clear_error(offered: None, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        get_profile(name)
    message = str(caught.value)
    assert name in message and "\n" not in message
    assert not message.startswith(f"numeric_profile: got '{name}', want one of"), (
        "the id is offered, and is no misprint"
    )
    assert name not in profiles._REGISTRY
    get_profile("offered-v1")


def test_two_packages_that_disagree_are_told(offered: None, tmp_path: Path) -> None:
    other = MODULE.replace("ulp=1", "ulp=5")
    install(tmp_path, "second", other, {"offered-v1": "second:NEAR"})
    with pytest.raises(ValueError, match="'offered-v1' is registered already, with other fields"):
        get_profile("offered-v1")


def test_a_built_in_one_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULE.replace("offered-v1", PORTABLE_PROFILE)
    install(tmp_path, "impostor", module, {PORTABLE_PROFILE: "impostor:NEAR"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_profiles() == BUILT_IN
    assert get_profile(PORTABLE_PROFILE).strict and "impostor" not in sys.modules
