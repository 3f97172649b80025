"""``torch.library.opcheck`` on every operation: schema, autograd registration, fakes, AOT with a dynamic T."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.support import FORMULAS, NAMES, PROFILES, Call, calls, training


def _arguments(call: Call, wanted: tuple[str, ...] | None = None) -> tuple[Any, ...]:
    settings = call.op_arguments()[len(call.inputs) :]
    return (*training(call, wanted).values(), *settings)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_keeps_its_promises(name: str, profile: str, formula: str) -> None:
    call = calls(profile, formula)[name]
    torch.library.opcheck(call.op, _arguments(call))


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_of_no_gradient_keeps_its_promises(name: str) -> None:
    call = calls(PROFILES[0])[name]
    torch.library.opcheck(call.op, _arguments(call, wanted=()))


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_keeps_its_promises_for_few_tokens(name: str, tokens: int) -> None:
    call = calls(PROFILES[1], tokens=tokens)[name]
    torch.library.opcheck(call.op, _arguments(call))


class _Arguments(torch.utils._python_dispatch.TorchDispatchMode):
    """The arguments of every backward operation that runs within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rl_mhc" and func._opname.endswith("_bwd"):
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NAMES)
def test_a_backward_operation_keeps_its_promises(name: str, profile: str, frozen: bool) -> None:
    call = calls(profile)[name]
    wanted = tuple(call.inputs)[:1] if frozen and name != "mhc_post_linked" else None
    inputs = training(call, wanted)
    outputs = call.outputs(inputs)
    with _Arguments() as mode:
        torch.autograd.backward(outputs, call.grads)
    ((op, args),) = mode.seen
    assert op._opname == f"{name}_bwd"
    detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    torch.library.opcheck(op, detached)
