"""Every operator case and every block case of the acceptance command: the reference's bytes at every level."""

from __future__ import annotations

import pytest
import torch

from rl_engine.mhc import block
from rl_engine.mhc.acceptance.cases import CaseSpec, geometry_specs, seeded_specs
from rl_engine.mhc.acceptance.operator_cases import OPERATOR_CASES, OperatorCase
from rl_engine.mhc.fixture_inputs import WIDE_CASES, draw_grads
from tests.backends.support import (
    PROFILES,
    assert_same,
    at_level,
    composed,
    composites,
    levels,
    native_block_runs,
    provider,
    reference_composites,
    reference_ops,
)

BLOCK_SPECS = [*geometry_specs("fixture", 16), *seeded_specs(4, "fixture", 16)]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("case", OPERATOR_CASES, ids=lambda case: case.name)
def test_each_operator_case_has_the_reference_bytes_at_every_level(case: OperatorCase, profile: str) -> None:
    inputs = case.inputs(128, profile)
    want = case.run(reference_ops(profile), inputs)
    for level in levels():
        with at_level(level):
            assert_same(case.run(provider(profile), inputs), want, f"{case.name} {level}")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("spec", BLOCK_SPECS, ids=lambda spec: spec.name)
def test_each_block_case_has_the_reference_bytes_on_every_path(spec: CaseSpec, profile: str) -> None:
    case = spec.make(profile)
    assert case.grads is not None
    want = composed(None, case.batch, case.grads)
    for level in levels():
        for path, run in native_block_runs(profile).items():
            with at_level(level):
                assert_same(run(case.batch, case.grads), want, f"{spec.name} {level} {path}")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("spec", BLOCK_SPECS, ids=lambda spec: spec.name)
def test_the_composites_alone_have_the_reference_bytes(spec: CaseSpec, profile: str) -> None:
    case = spec.make(profile)
    assert case.grads is not None
    want = reference_composites(case.batch, case.grads)
    for level in levels():
        with at_level(level):
            assert_same(composites(provider(profile), case.batch, case.grads), want, f"{spec.name} {level}")


@pytest.mark.parametrize("profile", PROFILES)
def test_the_width_of_the_largest_model_has_the_reference_bytes(profile: str) -> None:
    (name, case), *_ = WIDE_CASES.items()
    batch = case.batch(name, profile)
    grads = draw_grads(name, batch)
    want = composed(None, batch, grads)
    for level in levels():
        for path, run in native_block_runs(profile).items():
            with at_level(level):
                assert_same(run(batch, grads), want, f"{name} {level} {path}")


@pytest.mark.parametrize("profile", PROFILES)
def test_a_backward_may_start_from_what_the_canonical_composition_saved(profile: str) -> None:
    case = geometry_specs("fixture", 16)[1].make(profile)
    assert case.grads is not None
    want = composed(None, case.batch, case.grads)
    r_new, saved = block.mhc_block_forward(case.batch)
    got = provider(profile).mhc_block_backward(case.batch, saved, case.grads)
    assert_same({**block.forward_boundaries(saved, r_new), **got}, want, "reference forward, native backward")


def test_under_mixer_frozen_the_controller_gradients_are_none() -> None:
    case = next(spec for spec in BLOCK_SPECS if spec.name == "mixer_frozen").make(PROFILES[0])
    assert case.grads is not None
    for run in native_block_runs(PROFILES[0]).values():
        found = run(case.batch, case.grads)
        assert [name for name, t in found.items() if t is None] == [
            *("d_controller_weight", "d_alpha_pre", "d_alpha_post", "d_alpha_res", "d_bias")
        ]


def test_without_tokens_the_parameter_gradients_are_zeros() -> None:
    case = next(spec for spec in BLOCK_SPECS if spec.name == "no_tokens").make(PROFILES[0])
    assert case.grads is not None
    for run in native_block_runs(PROFILES[0]).values():
        found = run(case.batch, case.grads)
        for name in ("d_gamma", "d_controller_weight", "d_alpha_pre", "d_bias"):
            tensor = found[name]
            assert tensor is not None
            assert torch.equal(tensor, torch.zeros_like(tensor)) and tensor.numel() > 0
