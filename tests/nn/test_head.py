"""The head: its bytes in every form of the module, its parameters, its refusals. tests/ops has its arithmetic."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_engine.mhc.bits import same_bytes
from rl_engine.mhc.nn import HyperHead, expand_streams
from rl_engine.mhc.ops import mhc_head
from tests.nn.support import FORMULAS, PORTABLE_PROFILE, assert_same, drawn


def head(formula: str = FORMULAS[1]) -> HyperHead:
    module = HyperHead(64, controller_rms=formula, numeric_profile=PORTABLE_PROFILE)
    with torch.no_grad():
        module.weight.copy_(torch.randn(4, 256, generator=torch.Generator().manual_seed(1)) / 16)
        module.bias.copy_(torch.tensor([0.5, -0.25, 0.0, 1.0]))
        module.alpha.fill_(0.75)
    return module


def result(module: HyperHead, streams: Tensor, grad: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> dict:
    module.zero_grad()
    x = streams.detach().clone().requires_grad_()
    out = (module if call is None else call)(x)
    out.backward(grad.reshape(out.shape))
    return {"hidden": out.detach(), "d_streams": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


FORMS: dict[str, Callable[[HyperHead, Tensor], Callable[[Tensor], Tensor]]] = {
    "compiled": lambda m, _: torch.compile(m, fullgraph=True, dynamic=True),
    "exported": lambda m, x: torch.export.export(m, (x,), dynamic_shapes=({0: torch.export.Dim("T", min=2)},)).module(),
    "checkpointed": lambda m, _: lambda x: checkpoint(m, x, use_reentrant=False),
    "functional": lambda m, _: lambda x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("formula", FORMULAS)
def test_another_form_of_the_module_has_the_same_bytes(formula: str, form: str) -> None:
    batch, grad = drawn(7)
    module = head(formula)
    want = result(module, batch.r_old, grad[:, 0])
    call = FORMS[form](module, batch.r_old)
    got = result(module, batch.r_old, grad[:, 0], call)
    if form == "exported":  # the exported program has parameters of its own
        got |= {n: p.grad for n, p in call.named_parameters()}  # type: ignore[attr-defined]
    assert_same(got, want)


@pytest.mark.parametrize("lead", [(), (0,), (1,), (3, 2), (2, 0, 3)])
def test_any_leading_shape_has_the_bytes_of_its_rows(lead: tuple[int, ...]) -> None:
    count = int(torch.tensor(lead).prod()) if lead else 1
    batch, _ = drawn(max(count, 1))
    streams, module = batch.r_old[:count], head()
    got = module(streams.reshape(*lead, 4, 64))
    assert got.shape == (*lead, 64) and got.dtype == torch.bfloat16
    rows = [module(row) for row in streams]
    assert same_bytes(got.reshape(-1, 64), torch.stack(rows) if rows else streams.new_empty(0, 64))


def test_it_is_the_operation_and_strides_do_not_matter() -> None:
    batch, _ = drawn(5)
    module = head()
    names = {"controller_rms": FORMULAS[1], "numeric_profile": PORTABLE_PROFILE}
    want = mhc_head(batch.r_old, module.weight, module.alpha, module.bias, **names)
    strided = torch.empty(5, 4, 128, dtype=torch.bfloat16)[..., ::2].copy_(batch.r_old)
    assert same_bytes(module(strided), want)
    with torch.no_grad():
        assert same_bytes(module(batch.r_old), want)


def test_equal_streams_and_a_closed_gate() -> None:
    """With weight 0 and bias -1e4 each gate is eps alone: of four equal streams comes 4 eps x."""
    module = head()
    with torch.no_grad():
        module.weight.zero_()
        module.bias.fill_(-1e4)
    x = torch.arange(64).bfloat16()[None] - 32
    part = torch.tensor(1e-6) * x.float()
    assert same_bytes(module(expand_streams(x)), ((part + part) + (part + part)).bfloat16())


def test_parameters_stay_fp32_and_a_frozen_one_gets_no_gradient() -> None:
    module = nn.Sequential(head()).bfloat16()
    inner = module[0]
    assert {p.dtype for p in inner.parameters()} == {torch.float32}
    inner.alpha.requires_grad_(False)
    batch, grad = drawn(4)
    module(batch.r_old).backward(grad[:, 0])
    assert inner.alpha.grad is None and inner.weight.grad is not None and inner.bias.grad is not None
    with pytest.raises(RuntimeError, match=r"weight: got dtype torch\.bfloat16, want torch\.float32"):
        inner.load_state_dict({n: t.bfloat16() for n, t in inner.state_dict().items()})
    want = result(inner.requires_grad_(), batch.r_old, grad[:, 0])
    for again in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert_same(result(again, batch.r_old, grad[:, 0]), want)


def test_what_is_wrong_is_named() -> None:
    module = head()
    with pytest.raises(ValueError, match=r"streams: got shape \(3, 64\), want \[..., 4, 64\]"):
        module(torch.zeros(3, 64, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"r_old: got dtype torch\.float32"):
        module(torch.zeros(3, 4, 64))
    with pytest.raises(ValueError, match="hidden: got 0"):
        HyperHead(0)
    with pytest.raises(ValueError, match="controller_rms: got 'rms'"):
        HyperHead(4, controller_rms="rms")
    streams = torch.zeros(3, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"mhc_head: weight: got shape \(24, 256\), want \(4, 256\)"):
        mhc_head(streams, torch.zeros(24, 256), torch.ones(1), torch.zeros(4))
    with pytest.raises(TypeError, match=r"mhc_head: bias: got dtype torch\.float64"):
        mhc_head(streams, torch.zeros(4, 256), torch.ones(1), torch.zeros(4).double())
