"""``torch.compile(fullgraph=True)``: the bytes of eager mode, and one graph for every number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.expected import differences
from tests.ops.linked import block_of, expected_block, run_block
from tests.ops.support import FORMULAS, NAMES, PROFILES, calls, gradients_of, run, training

TOKENS = (3, 5, 2, 9)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_bytes_are_those_of_eager_mode(name: str, profile: str, formula: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    by_tokens = {tokens: calls(profile, formula, tokens)[name] for tokens in TOKENS}
    first = by_tokens[TOKENS[0]]

    def function(*tensors: torch.Tensor) -> Any:
        return first.function(*tensors, **first.settings)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for call in by_tokens.values():
        inputs = training(call)
        found = compiled(*inputs.values())
        outputs = found if isinstance(found, tuple) else (found,)
        got = outputs, gradients_of(inputs, outputs, call.grads)
        assert differences(got, run(call)) == []
        with torch.no_grad():
            found = compiled(*call.inputs.values())
        assert differences((found if isinstance(found, tuple) else (found,), {}), (call.outputs(), {})) == []
    # One graph with gradients, and one without.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("profile", PROFILES)
def test_a_block_compiled_by_inductor(profile: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block_of, fullgraph=True, dynamic=True)
    for tokens in TOKENS:
        call = calls(profile, FORMULAS[1], tokens)["mhc_pre_rmsnorm"]
        d_r_new = call.grads[4]
        assert differences(run_block(call, d_r_new, form=compiled), expected_block(call, d_r_new)) == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_link_takes_no_memory_in_a_graph() -> None:
    """No graph holds a tensor of the shape of the streams for it."""
    torch._dynamo.reset()
    call = calls(PROFILES[0])["mhc_pre_rmsnorm"]
    compiled = torch.compile(call.function, fullgraph=True, dynamic=True)
    link = compiled(*training(call).values(), **call.settings)[4]
    assert link.stride() == (0, 0, 0)
    assert link.untyped_storage().nbytes() == 2
