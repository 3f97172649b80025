"""Outputs and gradients of every operation have the oracle's bytes, whatever computes, arrives or is asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.operators.support import LAYOUTS, assert_fresh
from tests.ops.expected import differences, expected
from tests.ops.support import BACKENDS, CONTROLLER, FORMULAS, NAMES, PROFILES, Call, backend, calls, run, training

PLAIN = [name for name in NAMES if name != "mhc_post_linked"]


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_the_oracles(name: str, profile: str, formula: str, spec: str) -> None:
    call = calls(profile, formula)[name]
    with backend(spec, profile):
        got = run(call)
    assert differences(got, expected(call)) == []


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NAMES)
def test_at_the_production_width(name: str, profile: str) -> None:
    call = calls(profile, FORMULAS[1], tokens=3, hidden=4096)[name]
    assert differences(run(call), expected(call)) == []


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_few_tokens(name: str, tokens: int, spec: str) -> None:
    call = calls(PROFILES[0], tokens=tokens)[name]
    with backend(spec, PROFILES[0]):
        got = run(call)
    assert differences(got, expected(call)) == []


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("fusion_mode", ["unfused", "fused-pre-norm"])
def test_the_block_in_both_fusion_modes_with_an_fp32_gamma(fusion_mode: str, spec: str) -> None:
    call = calls(PROFILES[0])["mhc_block"]
    inputs = {**call.inputs, "gamma": call.inputs["gamma"].float() * 1.1}
    call = replace(call, inputs=inputs, settings={**call.settings, "fusion_mode": fusion_mode})
    with backend(spec, PROFILES[0]):
        got = run(call)
    assert differences(got, expected(call)) == []


def test_an_fp32_operand_has_an_fp32_gradient() -> None:
    for name in ("fp32_gemm_rms", "fixed_k_gemm"):
        call = calls(PROFILES[0])[name]
        first = next(iter(call.inputs))
        call = replace(call, inputs={**call.inputs, first: call.inputs[first].float() * 1.1})
        assert differences(run(call), expected(call)) == []


# --- what arrives ---


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_does_not_arrive_is_zeros(name: str, spec: str) -> None:
    call = calls(PROFILES[0])[name]
    with backend(spec, PROFILES[0]):
        for output in range(len(call.grads)):
            got = run(call, only=(output,))
            assert differences(got, expected(call, only=(output,))) == [], f"output {output} alone"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_layouts_change_nothing(name: str, layout: str) -> None:
    call = calls(PROFILES[0])[name]
    move = LAYOUTS[layout]
    kept = {"link"}  # a link has the one layout that it comes in
    moved = {key: t if key in kept else move(t) for key, t in call.inputs.items()}
    leaves = {key: t.detach().requires_grad_() for key, t in moved.items()}
    for spec in BACKENDS:
        with backend(spec, PROFILES[0]):
            outputs = call.outputs(leaves)
            grads = torch.autograd.grad(
                outputs, list(leaves.values()), [move(g) for g in call.grads], allow_unused=True
            )
        assert differences((outputs, dict(zip(leaves, grads, strict=True))), expected(call)) == []
        for index, t in enumerate(outputs):
            assert t.is_contiguous() != (name == "mhc_pre_rmsnorm" and index == 4)
        assert_fresh(outputs, leaves)
        given = [g for key, g in zip(leaves, grads, strict=True) if g is not None and key != "link"]
        assert all(g.is_contiguous() for g in given)


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_without_memory(name: str) -> None:
    call = calls(PROFILES[0])[name]
    ones = tuple(torch.ones((), dtype=g.dtype).expand(g.shape) for g in call.grads)
    call = replace(call, grads=ones)
    inputs = training(call)
    torch.stack([t.sum().float() for t in call.outputs(inputs)]).sum().backward()
    found = {key: t.grad for key, t in inputs.items()}
    outputs = call.outputs()
    assert differences((outputs, found), expected(replace(call, grads=tuple(o.clone() for o in ones)))) == []


# --- what is asked for ---


def _subsets(call: Call) -> list[tuple[str, ...]]:
    names = tuple(call.inputs)
    if len(names) <= 4:
        return [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]
    return [(n,) for n in names] + [tuple(m for m in names if m != n) for n in names]


@pytest.mark.parametrize("name", NAMES)
def test_any_subset_of_gradients(name: str) -> None:
    call = calls(PROFILES[0])[name]
    want = expected(call)
    for subset in _subsets(call):
        if name == "mhc_post_linked" and subset == ("r_old",):
            continue  # the output has a gradient, and none of it is r_old's
        assert differences(run(call, subset), want, subset) == [], subset


@pytest.mark.parametrize("trained", [(), ("bias",)])
@pytest.mark.parametrize("name", ["mhc_pre_rmsnorm", "mhc_block"])
def test_a_frozen_controller_is_mixer_frozen(name: str, trained: tuple[str, ...]) -> None:
    call = calls(PROFILES[0])[name]
    wanted = tuple(n for n in call.inputs if n not in CONTROLLER or n in trained)
    with backend("tests.ops.providers:Recording", PROFILES[0]) as provider:
        got = run(call, wanted)
    assert differences(got, expected(call), wanted) == []
    assert [s for s in provider.seen if "pre_bwd" in s] == [f"mhc_pre_bwd {'full' if trained else 'mixer-frozen'}"]


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_the_bytes_are_the_same(name: str) -> None:
    call = calls(PROFILES[0])[name]
    want, _ = expected(call)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            outputs = call.outputs()
        assert differences((outputs, {}), (want, {})) == []
        assert not any(t.requires_grad for t in outputs)
        assert_fresh(outputs, call.inputs)


# --- planted defects ---


@pytest.mark.parametrize(
    ("defect", "name", "where"),
    [
        ("WrongGate", "mhc_post", {"c"}),
        ("WrongGate", "mhc_post_linked", {"c"}),
        ("WrongAggregate", "h_aggregate", {"r_old"}),
        ("WrongForward", "hc_split_sinkhorn", {"output 1"}),
    ],
)
def test_a_planted_defect_is_seen(defect: str, name: str, where: set[str]) -> None:
    call = calls(PROFILES[0])[name]
    with backend(f"tests.ops.providers:{defect}", PROFILES[0]):
        found = differences(run(call), expected(call))
    assert {line.partition(":")[0] for line in found} == where
