"""Parameters keep the dtype of the contract, whatever is done to the module around them."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rl_engine.mhc.bits import same_bytes
from rl_engine.mhc.nn import HyperConnection, MHCController, RMSNorm
from rl_engine.mhc.ops import rmsnorm_residual
from tests.nn.support import drawn, module_of

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "to": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("gamma", [torch.bfloat16, torch.float32])
def test_a_cast_of_a_module_around_them_moves_no_byte(cast: str, gamma: torch.dtype) -> None:
    inner = HyperConnection(nn.Linear(64, 64), 64, gamma_dtype=gamma)
    outer = nn.Sequential(inner)
    before = {n: p.detach().clone() for n, p in inner.named_parameters() if not n.startswith("sublayer")}
    CASTS[cast](outer)
    after = dict(inner.named_parameters())
    assert all(same_bytes(after[n].detach(), t) and after[n].dtype == t.dtype for n, t in before.items())
    wanted = {"float": torch.float32, "double": torch.float64}.get(cast, torch.float16 if "half" in cast else None)
    if wanted is not None:
        assert after["sublayer.weight"].dtype == wanted


def test_gradients_go_with_them() -> None:
    batch, grad = drawn(3)
    module = module_of(batch)
    module(batch.r_old).backward(grad)
    module.bfloat16()
    weight = module.controller.weight
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_a_move_to_another_device_moves_them() -> None:
    module = MHCController(16).to("meta", torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.float32)}


def test_a_state_dict_of_another_dtype_is_refused_by_name() -> None:
    module = HyperConnection(nn.Identity(), 64)
    state = {name: t.bfloat16() for name, t in module.state_dict().items()}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"controller\.weight: got dtype torch\.bfloat16, want torch\.float32"):
            module.load_state_dict(state, assign=assign)
    state = {**module.state_dict(), "norm.weight": torch.ones(64)}
    with pytest.raises(RuntimeError, match=r"norm\.weight: got dtype torch\.float32, want torch\.bfloat16"):
        module.load_state_dict(state)


def test_a_state_dict_goes_through_a_file_unchanged() -> None:
    module, other = MHCController(32), MHCController(32)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(same_bytes(a.detach(), b.detach()) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_parameters_that_something_else_has_cast_are_refused() -> None:
    batch, _ = drawn(2)
    module = module_of(batch)
    module.controller.weight = nn.Parameter(module.controller.weight.detach().bfloat16())
    with pytest.raises(TypeError, match=r"controller\.weight"):
        module(batch.r_old)


def test_contract_parameters_go_in_and_out_byte_for_byte() -> None:
    batch, _ = drawn(2)
    module = MHCController.from_params(batch.controller)
    out = module.to_params()
    for field in dataclasses.fields(out):
        given, got = getattr(batch.controller, field.name), getattr(out, field.name)
        assert same_bytes(got, given) and got.data_ptr() != given.data_ptr()
    with pytest.raises(TypeError, match=r"controller\.bias: got dtype torch\.float64"):
        MHCController.from_params(dataclasses.replace(batch.controller, bias=batch.controller.bias.double()))
    with pytest.raises(ValueError, match=r"controller\.alpha_res: got shape \(2,\), want \(1,\)"):
        MHCController.from_params(dataclasses.replace(batch.controller, alpha_res=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"controller\.weight: got shape \(24, 6\)"):
        MHCController.from_params(dataclasses.replace(batch.controller, weight=torch.zeros(24, 6)))


@pytest.mark.parametrize("hidden", [0, -1, 1.5, True, "64"])
def test_a_width_that_is_none_is_refused(hidden: object) -> None:
    for module in (MHCController, RMSNorm):
        with pytest.raises(ValueError, match="hidden"):
            module(hidden)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_is_the_operator_over_any_leading_shape(dtype: torch.dtype) -> None:
    batch, _ = drawn(6)
    norm = RMSNorm(64, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(batch.norm.gamma)
    want = rmsnorm_residual(batch.y_sublayer, norm.weight)[0]
    assert same_bytes(norm(batch.y_sublayer.reshape(2, 3, 64)).detach(), want.detach().reshape(2, 3, 64))
    assert norm(batch.y_sublayer[:0]).shape == (0, 64)
    with pytest.raises(ValueError, match=r"x: got shape \(6, 63\)"):
        norm(batch.y_sublayer[:, :63])
    with pytest.raises(TypeError, match="dtype"):
        RMSNorm(64, dtype=torch.float16)
    assert same_bytes(copy.deepcopy(norm)(batch.y_sublayer).detach(), want.detach())
