"""What a provider claims, what provenance says, and how a provider is found by name."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from rl_engine.mhc import cli, oracle
from rl_engine.mhc.operators.interface import COMPOSITE_OPERATORS, LEAF_OPERATORS, OPERATORS
from rl_engine.mhc.provider import (
    ReferenceProvider,
    StubProvider,
    claimed_operators,
    combined_backend,
    resolve_provider,
)

PROFILE = "oracle-fp32-mhc-v1"


def subclass(*operators: str, **attributes: Any) -> ReferenceProvider:
    """A ReferenceProvider that overrides these operators by calling on."""

    def override(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(ReferenceProvider, name)(self, *args, **kwargs)

    body = {"name": "kernels", **{name: override(name) for name in operators}, **attributes}
    made: ReferenceProvider = type("Kernels", (ReferenceProvider,), body)()
    return made


def backends(candidate: ReferenceProvider) -> dict[str, str]:
    found: dict[str, str] = candidate.provenance()["operators"]
    return found


def test_the_reference_claims_nothing() -> None:
    stated = ReferenceProvider().provenance()
    assert claimed_operators(ReferenceProvider()) == frozenset()
    assert {
        key: stated[key] for key in ("requested_backend", "actual_backend", "numeric_profile", "torch_version")
    } == {
        "requested_backend": "reference",
        "actual_backend": "reference",
        "numeric_profile": PROFILE,
        "torch_version": torch.__version__,
    }
    assert set(backends(ReferenceProvider()).values()) == {"reference"}
    assert type(stated["torch_version"]) is str


def test_a_subclass_that_overrides_nothing_is_the_reference() -> None:
    candidate = subclass()
    assert claimed_operators(candidate) == frozenset()
    assert candidate.provenance()["requested_backend"] == "kernels"
    assert candidate.provenance()["actual_backend"] == "reference"
    assert candidate.capabilities()["backend"] == "kernels"


@pytest.mark.parametrize("operator", LEAF_OPERATORS)
def test_one_operator_of_its_own(operator: str) -> None:
    candidate = subclass(operator)
    assert claimed_operators(candidate) == {operator}
    assert {name for name, backend in backends(candidate).items() if backend == "kernels"} == {operator}
    assert candidate.provenance()["actual_backend"] == "kernels+reference"


def test_all_operators_of_its_own() -> None:
    candidate = subclass(*OPERATORS)
    assert claimed_operators(candidate) == set(OPERATORS)
    assert candidate.provenance()["actual_backend"] == "kernels"
    assert set(backends(candidate).values()) == {"kernels"}


@pytest.mark.parametrize("operator", COMPOSITE_OPERATORS)
def test_a_composite_of_its_own_is_named_too(operator: str) -> None:
    """A fused kernel replaces a composite and leaves every part the reference's: it is what runs all the same."""
    candidate = subclass(operator)
    assert claimed_operators(candidate) == {operator}
    assert "kernels" in candidate.provenance()["actual_backend"].split("+")


def test_an_override_further_down_or_on_the_instance_counts() -> None:
    class Middle(ReferenceProvider):
        name = "middle"

        def mhc_post_fwd(self, r_old: Any, y: Any, c: Any, post: Any) -> Any:
            return super().mhc_post_fwd(r_old, y, c, post)

    class Leaf(Middle):
        name = "leaf"

    assert claimed_operators(Leaf()) == {"mhc_post_fwd"}
    patched = ReferenceProvider()
    patched.fixed_k_gemm_fwd = lambda x, w: x  # type: ignore[method-assign]
    assert claimed_operators(patched) == {"fixed_k_gemm_fwd"}
    assert claimed_operators(ReferenceProvider()) == frozenset()


def test_own_operators_are_never_called_the_reference() -> None:
    """A subclass that forgets to name itself must not have its kernels filed under the reference's name."""

    class Nameless(ReferenceProvider):
        def mhc_post_fwd(self, r_old: Any, y: Any, c: Any, post: Any) -> Any:
            return super().mhc_post_fwd(r_old, y, c, post)

    candidate = Nameless()
    assert claimed_operators(candidate) == {"mhc_post_fwd"}
    assert backends(candidate)["mhc_post_fwd"] != "reference"
    assert candidate.provenance()["actual_backend"] != "reference"


@pytest.mark.parametrize(
    ("declared", "want"),
    [
        (["mhc_post_fwd"], {"mhc_post_fwd"}),
        (("mhc_post_fwd", "mhc_post_bwd"), {"mhc_post_fwd", "mhc_post_bwd"}),
        ([], set()),
        ("mhc_post_fwd", set()),
        (None, set()),
        ([3, "h_aggregate_fwd"], set()),
    ],
)
def test_operators_may_be_listed(declared: Any, want: set[str]) -> None:
    listing = {**oracle.capabilities(), "operators": declared}
    candidate = subclass("fixed_k_gemm_fwd", capabilities=lambda self: listing)
    assert claimed_operators(candidate) == want
    assert {name for name, backend in backends(candidate).items() if backend == "kernels"} == want


def test_another_declaration_without_a_list_leaves_it_to_the_class() -> None:
    candidate = subclass("fixed_k_gemm_fwd", capabilities=lambda self: oracle.capabilities())
    assert claimed_operators(candidate) == {"fixed_k_gemm_fwd"}
    assert claimed_operators(StubProvider()) == set(OPERATORS)


def test_claims_of_any_set_of_operators() -> None:
    """A set of operators need not be a class with a declaration on it."""
    parts = {name: getattr(oracle, name) for name in OPERATORS}
    loose = types.SimpleNamespace(**parts, name="loose", numeric_profile=PROFILE, capabilities=oracle.capabilities)
    assert claimed_operators(loose) == set(OPERATORS)


def test_one_name_for_several_backends() -> None:
    assert combined_backend(["reference", "b", "a", "b"]) == "a+b+reference"
    assert combined_backend([]) == "none"
    assert combined_backend(["zeta", "reference"]) == "zeta+reference"


# --- by name ---


class Good(ReferenceProvider):
    name = "good"


class NeedsAnArgument(ReferenceProvider):
    def __init__(self, path: str) -> None:
        super().__init__()


class Breaks(ReferenceProvider):
    def __init__(self) -> None:
        raise RuntimeError("first line\nsecond line")


class SaysNothing(ReferenceProvider):
    def __init__(self) -> None:
        raise ZeroDivisionError


class Lacking:
    name = "lacking"
    numeric_profile = PROFILE

    def capabilities(self) -> dict[str, Any]:
        return oracle.capabilities()


class Leaves(ReferenceProvider):
    """Ends the program, successfully, where it is made."""

    def __init__(self) -> None:
        raise SystemExit(0)


class LeavesWhenAsked(ReferenceProvider):
    """Ends the program where it is asked what it serves."""

    name = "leaves"

    def capabilities(self) -> dict[str, Any]:
        raise SystemExit(0)


class LeavesAtWork(ReferenceProvider):
    """Ends the program in an operator."""

    name = "leaves"

    def mhc_post_fwd(self, r_old: Any, y: Any, c: Any, post: Any) -> Any:
        raise SystemExit(0)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """These classes under an importable name."""
    made = types.ModuleType("provider_samples")
    for cls in (Good, NeedsAnArgument, Breaks, SaysNothing, Lacking, Leaves, LeavesWhenAsked, LeavesAtWork):
        setattr(made, cls.__name__, cls)
    made.value = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "provider_samples", made)
    return "provider_samples"


def test_aliases_and_paths(module: str) -> None:
    assert type(resolve_provider("reference")) is ReferenceProvider
    assert type(resolve_provider("stub")) is StubProvider
    assert type(resolve_provider("rl_engine.mhc.provider:StubProvider")) is StubProvider
    assert type(resolve_provider(f"{module}:Good")) is Good
    assert resolve_provider("reference") is not resolve_provider("reference")


@pytest.mark.parametrize("spec", ["", "referenc", "Reference", "a.b", ":", "a:", ":B", "reference ", "a\nb"])
def test_a_spec_of_another_form_lists_the_forms(spec: str) -> None:
    with pytest.raises(ValueError, match=r"want one of native, reference, stub, or module.path:ClassName") as caught:
        resolve_provider(spec)
    assert repr(spec) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module_anywhere:X", "ModuleNotFoundError"),
        ("rl_engine.mhc.nowhere:X", "ModuleNotFoundError"),
        ("..relative:X", "TypeError"),
        ("provider_samples:Missing", "AttributeError"),
        ("provider_samples:Good:More", "AttributeError"),
        ("provider_samples:value", "TypeError"),
        ("provider_samples:NeedsAnArgument", "TypeError"),
        ("provider_samples:Breaks", "RuntimeError: first line second line"),
        ("provider_samples:SaysNothing", "ZeroDivisionError: no message"),
        ("provider_samples:Leaves", "SystemExit"),
    ],
)
def test_what_cannot_be_made_says_why_in_one_line(target: str, reason: str, module: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        resolve_provider(target)
    assert "\n" not in str(caught.value) and target in str(caught.value)


def test_what_lacks_a_part_is_refused(module: str) -> None:
    with pytest.raises(ValueError, match="lacks: provenance, hc_split_sinkhorn_fwd") as caught:
        resolve_provider(f"{module}:Lacking")
    assert all(name in str(caught.value) for name in OPERATORS)


@pytest.mark.parametrize("name", ["Leaves", "LeavesWhenAsked", "LeavesAtWork"])
def test_a_candidate_cannot_pass_by_leaving(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 is the verdict's alone."""
    arguments = ["check_p1.py", "--provider", f"{module}:{name}", "--cases", "one_row", "--repeat", "1", "--quiet"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert cli.check_p1_main() != 0
