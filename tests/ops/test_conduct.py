"""What an operation does besides computing: its surroundings, what it keeps, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.mhc import ops
from rl_engine.mhc.ops.define import unobserved
from tests.ops.expected import differences, expected
from tests.ops.support import BACKENDS, NAMES, PROFILES, backend, calls, run, training

REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to FP16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default FP64": lambda: _default_dtype(torch.float64),
    "default BF16": lambda: _default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("name", NAMES)
def test_surroundings_change_nothing(name: str, surroundings: str, spec: str) -> None:
    call = calls(PROFILES[0])[name]
    want = expected(call)
    with backend(spec, PROFILES[0]):
        with SURROUNDINGS[surroundings]():
            got = run(call)
            with torch.no_grad():
                outputs = call.outputs()
        assert differences(got, want) == []
        assert differences((outputs, {}), (want[0], {})) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused(name: str) -> None:
    call = calls(PROFILES[0])[name]
    inputs = training(call)
    outputs = call.outputs(inputs)
    arriving = [g.clone().requires_grad_() for g in call.grads]
    first = torch.autograd.grad(outputs, list(inputs.values()), arriving, create_graph=True, allow_unused=True)
    total = torch.stack([g.float().sum() for g in first if g is not None and g.requires_grad]).sum()
    with pytest.raises(RuntimeError, match=f"rl_mhc::{name}: second derivatives are not defined"):
        total.backward()


def test_the_first_half_keeps_51_numbers_a_token_besides_its_inputs() -> None:
    call = calls(PROFILES[0], tokens=7)["mhc_pre_rmsnorm"]
    inputs = training(call)
    given = {t.untyped_storage().data_ptr() for t in inputs.values()}
    kept: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in given:
            kept.append(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = call.outputs(inputs)
    assert sum(kept) == 51 * 4 * 7
    assert outputs[0].requires_grad


def test_an_input_that_was_overwritten_is_noticed() -> None:
    call = calls(PROFILES[0])["mhc_pre_rmsnorm"]
    inputs = training(call)
    inputs["r_old"] = inputs["r_old"] * 1
    outputs = call.outputs(inputs)
    inputs["r_old"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outputs, inputs["gamma"], call.grads)


def test_an_output_that_is_an_input_is_refused() -> None:
    call = calls(PROFILES[0])["rmsnorm_residual"]
    with backend("tests.ops.providers:Aliasing", PROFILES[0]), pytest.raises(RuntimeError, match="may not alias"):
        call.outputs()


@pytest.mark.parametrize(
    ("name", "field", "error"),
    [
        ("hc_split_sinkhorn", "h", TypeError),
        ("fp32_gemm_rms", "weight", TypeError),
        ("h_aggregate", "pre", TypeError),
        ("mhc_post", "c", TypeError),
        ("rmsnorm_residual", "gamma", TypeError),
        ("fixed_k_gemm", "w", TypeError),
        ("mhc_pre_rmsnorm", "bias", TypeError),
        ("mhc_pre_rmsnorm", "gamma", TypeError),
        ("mhc_block", "r_old", TypeError),
    ],
)
def test_a_wrong_argument_is_named(name: str, field: str, error: type[Exception]) -> None:
    call = calls(PROFILES[0])[name]
    wrong = {**call.inputs, field: call.inputs[field].double()}
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(error, match=field):
            call.outputs(wrong)


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (3, 5, 64), (1, 3, 4, 64)])
def test_streams_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    call = calls(PROFILES[0])["mhc_pre_rmsnorm"]
    wrong = {**call.inputs, "r_old": torch.zeros(shape, dtype=torch.bfloat16)}
    with torch.no_grad(), pytest.raises(ValueError, match=r"r_old|contract\.hidden"):
        call.outputs(wrong)


@pytest.mark.parametrize("name", ["fp32_gemm_rms", "mhc_pre_rmsnorm", "mhc_block"])
def test_an_unknown_formula_is_refused(name: str) -> None:
    call = calls(PROFILES[0])[name]
    call.settings["controller_rms"] = "rms"
    with pytest.raises((ValueError, NotImplementedError), match="controller_rms"):
        call.outputs()


def test_a_call_is_direct_only_where_nobody_would_see_it() -> None:
    x = torch.zeros(1)
    assert not unobserved(x)
    with torch.no_grad():
        assert unobserved(x, torch.nn.Parameter(x))
        assert not unobserved(x.to("meta"))
        assert not unobserved(torch.nn.Buffer(x), torch.zeros(1).as_subclass(_Subclass))
        with torch.profiler.profile():
            assert not unobserved(x)
        with torch.utils._python_dispatch.TorchDispatchMode():
            assert not unobserved(x)
        assert torch.func.vmap(lambda t: t + unobserved(t))(x).item() == 0


class _Subclass(torch.Tensor):
    pass


def test_meta_tensors_have_the_shapes() -> None:
    for call in calls(PROFILES[0]).values():
        meta = {name: t.to("meta") for name, t in call.inputs.items()}
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                found = call.outputs(meta)
            for got, want in zip(found, call.outputs(), strict=True):
                assert (got.device.type, got.shape, got.dtype) == ("meta", want.shape, want.dtype)
                assert got.stride() == want.stride()


def test_importing_the_package_registers_nothing() -> None:
    code = "import sys, rl_engine.mhc; print([m for m in sys.modules if m.startswith('rl_engine.mhc.ops')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_the_operations_loads_no_backend() -> None:
    code = "import sys, rl_engine.mhc.ops; print([m for m in sys.modules if 'mhc.backends' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_public_operation_is_tested() -> None:
    assert {name for name in ops.__all__ if "backend" not in name} == set(NAMES)
