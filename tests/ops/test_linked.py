"""Two linked halves are the block of the contract: the gradient of ``r_old`` is one FP32 sum, rounded once."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from rl_engine.mhc import ops
from rl_engine.mhc.bits import same_bytes
from tests.ops.expected import differences
from tests.ops.linked import block_of, expected_block, run_block, unlinked_block_of
from tests.ops.support import BACKENDS, CONTROLLER, FORMULAS, FUSED, PROFILES, Call, backend, calls


def _case(profile: str, formula: str = FORMULAS[0], tokens: int = 5, hidden: int = 64) -> tuple[Call, torch.Tensor]:
    """A call of the first half, and the gradient that arrives at the second."""
    call = calls(profile, formula, tokens, hidden)["mhc_pre_rmsnorm"]
    return call, call.grads[4]


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("profile", PROFILES)
def test_the_pair_has_the_bytes_of_the_block(profile: str, formula: str, spec: str) -> None:
    call, d_r_new = _case(profile, formula)
    with backend(spec, profile):
        assert differences(run_block(call, d_r_new), expected_block(call, d_r_new)) == []


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_the_pair_at_the_production_width(tokens: int) -> None:
    call, d_r_new = _case(PROFILES[0], tokens=tokens, hidden=4096)
    assert differences(run_block(call, d_r_new), expected_block(call, d_r_new)) == []


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("wanted", [("r_old",), ("gamma",), ("r_old", "gamma"), CONTROLLER, ("bias",)], ids="+".join)
def test_the_pair_for_any_subset(wanted: tuple[str, ...], spec: str) -> None:
    call, d_r_new = _case(PROFILES[0])
    with backend(spec, PROFILES[0]):
        got = run_block(call, d_r_new, wanted)
    assert differences(got, expected_block(call, d_r_new), wanted) == []


def test_without_the_link_the_bytes_are_others() -> None:
    call, d_r_new = _case(PROFILES[0], tokens=16)
    found = differences(run_block(call, d_r_new, form=unlinked_block_of), expected_block(call, d_r_new))
    assert [line.partition(":")[0] for line in found] == ["r_old"]


def test_a_gradient_without_memory_passes_the_link() -> None:
    call, _ = _case(PROFILES[0])
    ones = torch.ones((), dtype=torch.bfloat16).expand(call.grads[4].shape)
    inputs = {name: t.clone().requires_grad_() for name, t in call.inputs.items()}
    r_new = block_of(inputs, call.settings)
    r_new.sum().backward()
    grads = {name: t.grad for name, t in inputs.items()}
    assert differences(((r_new.detach(),), grads), expected_block(call, ones.clone())) == []


@pytest.mark.parametrize("spec", BACKENDS)
def test_blocks_in_a_row(spec: str) -> None:
    """Every layer's gradient arrives at the link of the layer before."""
    profile = PROFILES[0]
    call, d_r_new = _case(profile)
    inputs = {name: t.clone().requires_grad_() for name, t in call.inputs.items()}
    with backend(spec, profile):
        streams = [inputs["r_old"]]
        for _ in range(3):
            streams.append(block_of({**inputs, "r_old": streams[-1]}, call.settings))
        grads = torch.autograd.grad(streams[-1], streams[:-1], d_r_new)
    arriving = d_r_new
    for layer in (2, 1, 0):
        single = {**call.inputs, "r_old": streams[layer].detach()}
        _, want = expected_block(replace(call, inputs=single), arriving)
        assert want["r_old"] is not None
        assert same_bytes(grads[layer], want["r_old"]), f"layer {layer}"
        arriving = want["r_old"]


def test_a_link_has_one_element() -> None:
    call, _ = _case(PROFILES[0])
    for link in (call.outputs()[4], call.op(*call.op_arguments())[4]):
        assert link.shape == call.inputs["r_old"].shape
        assert link.stride() == (0, 0, 0)
        assert link.untyped_storage().nbytes() == 2
        assert not link.any()


def test_a_link_of_another_shape_or_dtype_is_refused() -> None:
    call = calls(PROFILES[0])["mhc_post_linked"]
    link = call.inputs["link"]
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(ValueError, match=r"mhc_post_linked: link: got shape"):
            call.outputs({**call.inputs, "link": link[:2]})
        with mode(), pytest.raises(TypeError, match=r"mhc_post_linked: link: got dtype"):
            call.outputs({**call.inputs, "link": link.float()})


def test_a_link_needs_no_gradient_where_the_first_half_needs_none() -> None:
    call = calls(PROFILES[0])["mhc_pre_rmsnorm"]
    normalized, _, post, c, link = call.outputs()
    assert not link.requires_grad
    y = normalized.detach().requires_grad_()
    r_new = ops.mhc_post_linked(call.inputs["r_old"], y, c, post, link)
    (grad,) = torch.autograd.grad(r_new, y, call.grads[4])
    plain = ops.mhc_post(call.inputs["r_old"], y, c, post)
    (want,) = torch.autograd.grad(plain, y, call.grads[4])
    assert same_bytes(grad, want)


def test_the_optional_methods_run_where_a_provider_has_them() -> None:
    call, d_r_new = _case(PROFILES[0])
    with backend(FUSED, PROFILES[0]) as provider:
        run_block(call, d_r_new)
    assert provider.seen == ["mhc_post_gate_bwd", "mhc_pre_rmsnorm_fused_bwd"]
    with backend("tests.ops.providers:Recording", PROFILES[0]) as provider:
        run_block(call, d_r_new)
    assert provider.seen == ["mhc_post_bwd", "mhc_pre_bwd full", "mhc_post_bwd"]


@pytest.mark.parametrize("guess", [True, False])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_graph_break_between_the_halves(compiler: str, dynamic: bool | None, guess: bool) -> None:
    """The link is then an output of one graph, and the layout of its gradient is the compiler's guess."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    broken = torch.compile(functools.partial(block_of, graph_break=True), backend=compiler, dynamic=dynamic)
    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=guess):
        for tokens in (3, 5, 2):
            call, d_r_new = _case(PROFILES[0], tokens=tokens)
            assert differences(run_block(call, d_r_new, form=broken), expected_block(call, d_r_new)) == []
    assert torch._dynamo.utils.counters["graph_break"]
