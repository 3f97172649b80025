"""HyperConnection gives the contract's bytes in every form in which torch runs a module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_engine.mhc.bits import same_bytes
from rl_engine.mhc.nn import HyperConnection, expand_streams
from tests.nn.support import FORMULAS, PROFILES, assert_same, contract_says, drawn, module_of, result


class Broken(nn.Module):
    """The identity, at which a compiler has to break the graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 17])
def test_forward_and_every_gradient_are_the_contracts(tokens: int, profile: str, formula: str) -> None:
    batch, grad = drawn(tokens, 64, profile, formula)
    assert_same(result(module_of(batch), batch.r_old, grad), contract_says(batch, grad))


def test_the_comparison_sees_another_formula() -> None:
    batch, grad = drawn(5)
    other, _ = drawn(5, formula=FORMULAS[1])
    with pytest.raises(AssertionError):
        assert_same(result(module_of(batch), batch.r_old, grad), contract_says(other, grad))


@pytest.mark.parametrize("lead", [(), (1,), (6,), (2, 3), (3, 1, 2), (0,), (2, 0)])
def test_any_leading_shape_has_the_bytes_of_its_rows(lead: tuple[int, ...]) -> None:
    tokens = int(torch.tensor(lead, dtype=torch.int64).prod()) if lead else 1
    batch, grad = drawn(tokens)
    module = module_of(batch)
    shaped = result(module, batch.r_old.reshape(*lead, 4, 64), grad)
    assert shaped["r_new"].shape == (*lead, 4, 64)
    assert_same(shaped, contract_says(batch, grad))


def test_strided_streams_and_a_strided_gradient_have_the_bytes_of_their_copies() -> None:
    batch, grad = drawn(6)
    module = module_of(batch)
    wide = torch.zeros(6, 4, 128, dtype=torch.bfloat16)[..., ::2]
    streams = wide.copy_(batch.r_old).requires_grad_()
    out = module(streams)
    arriving = torch.empty(64, 4, 6, dtype=torch.bfloat16).permute(2, 1, 0).copy_(grad)
    out.backward(arriving)
    want = contract_says(batch, grad)
    assert same_bytes(out.detach(), want["r_new"]) and streams.grad is not None
    assert same_bytes(streams.grad.contiguous(), want["d_r_old"])


FORMS: dict[str, Callable[[HyperConnection], Callable[[Tensor], Tensor]]] = {
    "compiled": lambda m: torch.compile(m, fullgraph=True),
    "checkpointed": lambda m: lambda x: checkpoint(m, x, use_reentrant=False),
    "checkpointed, reentrant": lambda m: lambda x: checkpoint(m, x, use_reentrant=True),
    "functional": lambda m: lambda x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
    "exported": lambda m: torch.export.export(m, (torch.zeros(5, 4, 64, dtype=torch.bfloat16),)).module(),
    "under autocast": lambda m: lambda x: torch.autocast("cpu", torch.bfloat16)(m)(x),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("profile", PROFILES)
def test_another_form_of_the_module_has_the_same_bytes(profile: str, form: str) -> None:
    torch._dynamo.reset()
    batch, grad = drawn(5, 64, profile)
    module = module_of(batch)
    if form == "exported":
        # An exported program has parameters of its own.
        exported = FORMS[form](module)
        assert isinstance(exported, nn.Module)
        assert_same(result(exported, batch.r_old, grad), contract_says(batch, grad))
        return
    assert_same(result(module, batch.r_old, grad, FORMS[form](module)), contract_says(batch, grad))


def test_a_graph_break_in_the_sublayer_moves_no_byte() -> None:
    torch._dynamo.reset()
    batch, grad = drawn(5)
    module = module_of(batch, Broken())
    assert_same(result(module, batch.r_old, grad, torch.compile(module)), contract_says(batch, grad))


def test_a_compiled_module_is_not_compiled_again_for_another_number_of_tokens() -> None:
    torch._dynamo.reset()
    batch, _ = drawn(3)
    module = module_of(batch)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    counts = []
    for tokens in (3, 5, 17, 9):
        batch, grad = drawn(tokens)
        module.load_state_dict(module_of(batch).state_dict())
        assert_same(result(module, batch.r_old, grad, compiled), contract_says(batch, grad))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == [counts[0]] * 4


def test_a_packed_batch_and_one_row_at_a_time_have_the_same_bytes() -> None:
    batch, _ = drawn(17)
    module = module_of(batch)
    with torch.no_grad():
        whole = module(batch.r_old)
        rows = torch.cat([module(batch.r_old[t : t + 1]) for t in range(17)])
    assert same_bytes(whole, rows)


@pytest.mark.parametrize("frozen", ["controller", "norm", "both"])
def test_gradients_that_nobody_asks_for_are_none_and_move_no_other(frozen: str) -> None:
    batch, grad = drawn(5)
    module = module_of(batch)
    if frozen in ("controller", "both"):
        module.controller.requires_grad_(False)
    if frozen in ("norm", "both"):
        module.norm.requires_grad_(False)
    want = contract_says(batch, grad)
    left = {n for n, p in module.named_parameters() if p.requires_grad} | {"r_new", "d_r_old"}
    assert_same(result(module, batch.r_old, grad), {n: t for n, t in want.items() if n in left})


def test_parameters_get_their_gradients_where_the_streams_need_none() -> None:
    batch, grad = drawn(5)
    module = module_of(batch)
    module(batch.r_old).backward(grad)
    want = contract_says(batch, grad)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and same_bytes(parameter.grad, want[name])


def test_inputs_parameters_and_the_arriving_gradient_are_not_written() -> None:
    batch, grad = drawn(5)
    module = module_of(batch)
    before = copy.deepcopy((batch.r_old, grad, dict(module.state_dict())))
    streams = batch.r_old.clone().requires_grad_()
    out = module(streams)
    kept = out.detach().clone()
    out.backward(grad)
    assert same_bytes(out.detach(), kept) and same_bytes(streams.detach(), before[0]) and same_bytes(grad, before[1])
    assert all(same_bytes(t, before[2][name]) for name, t in module.state_dict().items())


def test_what_is_kept_between_forward_and_backward_is_what_the_document_says() -> None:
    """The streams, the sublayer's output and 71 FP32 values a token, beside the parameters."""
    batch, _ = drawn(17)
    module = module_of(batch)
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    streams = batch.r_old.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(streams)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found = sum(size for address, size in kept.items() if address not in parameters)
    assert found == 17 * (2 * 4 * 64 + 2 * 64 + 4 * 71)


def test_copies_pickles_and_a_saved_state_have_the_same_bytes() -> None:
    batch, grad = drawn(5)
    module, want = module_of(batch), contract_says(batch, grad)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    fresh = HyperConnection(nn.Identity(), 64, numeric_profile=batch.contract.numeric_profile)
    fresh.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False), fresh):
        assert_same(result(twin, batch.r_old, grad), want)


@pytest.mark.parametrize("profile", PROFILES)
def test_expanded_streams_are_copies_with_the_stream_tree_as_gradient(profile: str) -> None:
    batch, grad = drawn(6, 64, profile)
    x = batch.y_sublayer.reshape(2, 3, 64).clone().requires_grad_()
    streams = expand_streams(x, numeric_profile=profile)
    assert streams.shape == (2, 3, 4, 64) and streams.is_contiguous()
    assert all(same_bytes(streams[..., i, :].detach().contiguous(), x.detach()) for i in range(4))
    streams.backward(grad.reshape(2, 3, 4, 64))
    g = grad.float()
    assert x.grad is not None
    assert same_bytes(x.grad.reshape(6, 64), ((g[:, 0] + g[:, 1]) + (g[:, 2] + g[:, 3])).bfloat16())


def test_what_is_wrong_is_named() -> None:
    batch, _ = drawn(2)
    module = module_of(batch)
    with pytest.raises(ValueError, match=r"streams: got shape \(2, 3, 64\), want \[\.\.\., 4, 64\]"):
        module(torch.zeros(2, 3, 64, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="r_old"):
        module(torch.zeros(2, 4, 64))
    with pytest.raises(TypeError, match=r"sublayer's output: got dtype torch\.float32"):
        module_of(batch, Widening())(batch.r_old)
    with pytest.raises(ValueError, match=r"sublayer's output: got shape \(1, 64\), want \(2, 64\)"):
        module_of(batch, OneRow())(batch.r_old)
    with pytest.raises(ValueError, match="controller_rms"):
        HyperConnection(nn.Identity(), 64, controller_rms="other")
    with pytest.raises(NotImplementedError, match="fail-closed"):
        HyperConnection(nn.Identity(), 64, numeric_profile="other")(batch.r_old)


class Widening(nn.Module):
    """A sublayer that returns FP32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class OneRow(nn.Module):
    """A sublayer that returns one row."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:1]
