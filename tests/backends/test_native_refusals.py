"""What the native backend cannot serve it refuses, by an error that names the field, before it reads a byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rl_engine.mhc.backends.native.operators import NativeOperators
from rl_engine.mhc.contract import GradBoundary
from rl_engine.mhc.operators.interface import LEAF_OPERATORS, TENSOR_ARGUMENTS
from rl_engine.mhc.profiles import NumericProfile, Tolerance, register_profile
from rl_engine.mhc.trace import MHCTrace
from tests.backends.support import PROFILES, drawn, provider
from tests.profile_registry import restored_registry

SIZES = {"T": 5, "D": 12, "K": 48, "M": 5, "N": 7}
ARGUMENTS = [(operator, name) for operator in LEAF_OPERATORS for name in TENSOR_ARGUMENTS[operator]]


def arguments(operator: str, device: str = "cpu") -> dict[str, Any]:
    """Zeros for every tensor argument, and what else the operator takes."""
    named: dict[str, Any] = {
        name: torch.zeros([SIZES.get(d, d) for d in spec.dims], dtype=spec.dtypes[0], device=device)  # type: ignore[arg-type]
        for name, spec in TENSOR_ARGUMENTS[operator].items()
    }
    if operator in ("fp32_gemm_rms_fwd", "rmsnorm_residual_fwd"):
        named["eps"] = 1e-6
    t = SIZES["T"]
    saved = {
        "hc_split_sinkhorn_bwd": {k: torch.zeros(t, 4) for k in ("sig_pre", "sig_post")}
        | {"softmax": torch.ones(t, 4, 4)},
        "fp32_gemm_rms_bwd": {"r": torch.zeros(t), "q": torch.zeros(t)},
        "rmsnorm_residual_bwd": {"r": torch.zeros(t)},
    }
    return named | ({"saved": saved[operator]} if operator in saved else {})


@pytest.mark.parametrize("operator", LEAF_OPERATORS)
def test_the_arguments_that_the_refusals_start_from_are_served(operator: str) -> None:
    getattr(provider(PROFILES[0]), operator)(**arguments(operator))


@pytest.mark.parametrize(("operator", "name"), ARGUMENTS)
def test_another_dtype_is_a_type_error_that_names_the_field(operator: str, name: str) -> None:
    given = arguments(operator)
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(TypeError, match=f"^{operator}: {name}: got dtype"):
            getattr(provider(PROFILES[0]), operator)(**given | {name: given[name].to(dtype)})
    with pytest.raises(TypeError, match=f"^{operator}: {name}: got list"):
        getattr(provider(PROFILES[0]), operator)(**given | {name: [1.0]})


@pytest.mark.parametrize(("operator", "name"), ARGUMENTS)
def test_another_rank_or_size_is_a_value_error(operator: str, name: str) -> None:
    given = arguments(operator)
    with pytest.raises(ValueError, match=f"^{operator}: {name}: got shape"):
        getattr(provider(PROFILES[0]), operator)(**given | {name: given[name][None]})
    grown = torch.cat((given[name], given[name]))
    alone = [("fp32_gemm_rms_fwd", "x_flat"), ("rmsnorm_residual_fwd", "x")]  # no other argument has T rows
    if operator != "fixed_k_gemm_fwd" and len(TENSOR_ARGUMENTS[operator]) > 1 and (operator, name) not in alone:
        with pytest.raises(ValueError, match=f"^{operator}: \\w+: got shape"):
            getattr(provider(PROFILES[0]), operator)(**given | {name: grown})


@pytest.mark.parametrize("operator", LEAF_OPERATORS)
def test_another_device_is_refused(operator: str) -> None:
    with pytest.raises(NotImplementedError, match=r"^native: device: want 'cpu', got 'meta' \(fail-closed\)$"):
        getattr(provider(PROFILES[0]), operator)(**arguments(operator, "meta"))


@pytest.mark.parametrize(
    ("operator", "key"),
    [
        *(("hc_split_sinkhorn_bwd", key) for key in ("sig_pre", "sig_post", "softmax")),
        *(("fp32_gemm_rms_bwd", key) for key in ("r", "q")),
        ("rmsnorm_residual_bwd", "r"),
    ],
)
def test_a_saved_dict_that_lacks_a_key_or_has_other_rows_is_refused(operator: str, key: str) -> None:
    given = arguments(operator)
    without = {k: t for k, t in given["saved"].items() if k != key}
    shorter = given["saved"] | {key: given["saved"][key][:2]}
    for saved in (without, shorter, None):
        with pytest.raises(ValueError, match=f"^{operator}: saved"):
            getattr(provider(PROFILES[0]), operator)(**given | {"saved": saved})


def test_a_block_on_another_device_is_refused() -> None:
    batch, grads = drawn("refused", 3, 12)
    _, saved = provider(PROFILES[0]).mhc_block_forward(batch)
    elsewhere = dataclasses.replace(batch, weight_fingerprint="").to("meta")
    zeros = torch.zeros(3, 4), torch.zeros(3, 4, 4)
    for call in (
        lambda ops: ops.mhc_block_forward(elsewhere),
        lambda ops: ops.mhc_pre_fwd(elsewhere),
        lambda ops: ops.mhc_pre_rmsnorm_fused_fwd(elsewhere),
        lambda ops: ops.mhc_block_backward(elsewhere, saved, grads.to("meta")),
        lambda ops: ops.mhc_pre_bwd(grads.d_normalized, *zeros, elsewhere, saved),
    ):
        with pytest.raises(NotImplementedError, match=r"devices: want 'meta'.*\(fail-closed\)"):
            call(provider(PROFILES[0]))


def test_a_block_with_a_wrong_field_is_refused() -> None:
    batch, grads = drawn("refused", 3, 12)
    ops = provider(PROFILES[0])
    _, saved = ops.mhc_block_forward(batch)
    with pytest.raises(TypeError, match=r"^r_old: got dtype"):
        ops.mhc_block_forward(dataclasses.replace(batch, r_old=batch.r_old.float()))
    with pytest.raises(ValueError, match=r"^y_sublayer: got shape"):
        ops.mhc_pre_rmsnorm_fused_fwd(dataclasses.replace(batch, y_sublayer=batch.y_sublayer[:2]))
    with pytest.raises(TypeError, match=r"^d_residual: got dtype"):
        ops.mhc_block_backward(batch, saved, dataclasses.replace(grads, d_residual=grads.d_residual.float()))
    with pytest.raises(ValueError, match=r"^d_r_new: got shape"):
        ops.mhc_block_backward(batch, saved, GradBoundary(grads.d_r_new[:2], grads.d_normalized, grads.d_residual))
    with pytest.raises(NotImplementedError, match="numeric_profile"):
        ops.mhc_block_forward(drawn("refused", 3, 12, PROFILES[1])[0])
    with pytest.raises(ValueError, match=r"trace.numeric_profile"):
        ops.mhc_block_forward(batch, MHCTrace(PROFILES[1]))


# --- tensors without memory of their own ---


def zero_tensor(t: torch.Tensor) -> torch.Tensor:
    """Torch's zeros that are a shape and nothing else."""
    zeros: torch.Tensor = torch._efficientzerotensor(tuple(t.shape), dtype=t.dtype)
    return zeros


def emptied(t: torch.Tensor) -> torch.Tensor:
    """What FSDP leaves of a parameter that it has sharded: its shape over a storage of no bytes."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def emptied_behind_an_offset(t: torch.Tensor) -> torch.Tensor:
    """The same for a view whose address, the offset alone, is not null."""
    whole = torch.cat((t.new_zeros(3), t.reshape(-1)))
    view = whole[3:].view(t.shape)
    whole.untyped_storage().resize_(0)
    return view


WITHOUT_MEMORY = (zero_tensor, emptied, emptied_behind_an_offset)
_NO_MEMORY = r"^native: want a tensor with memory of its own, got one without \(fail-closed\)$"


@pytest.mark.parametrize("make", WITHOUT_MEMORY)
@pytest.mark.parametrize(("operator", "name"), ARGUMENTS)
def test_an_argument_without_memory_of_its_own_is_refused(operator: str, name: str, make: Any) -> None:
    given = arguments(operator)
    with pytest.raises(NotImplementedError, match=_NO_MEMORY):
        getattr(provider(PROFILES[0]), operator)(**given | {name: make(given[name])})


@pytest.mark.parametrize("make", WITHOUT_MEMORY)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_block_of_a_tensor_without_memory_of_its_own_is_refused(profile: str, make: Any) -> None:
    """Each input, parameter and arriving gradient, and each tensor that a forward kept."""
    batch, grads = drawn("refused", 3, 12, profile)
    ops = provider(profile)
    _, saved = ops.mhc_block_forward(batch)
    batch = dataclasses.replace(batch, weight_fingerprint="")  # it would read the parameters before any kernel
    for field in ("r_old", "y_sublayer"):
        with pytest.raises(NotImplementedError, match=_NO_MEMORY):
            ops.mhc_block_forward(dataclasses.replace(batch, **{field: make(getattr(batch, field))}))
    for field in ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias"):
        parameters = dataclasses.replace(batch.controller, **{field: make(getattr(batch.controller, field))})
        with pytest.raises(NotImplementedError, match=_NO_MEMORY):
            ops.mhc_block_forward(dataclasses.replace(batch, controller=parameters))
    with pytest.raises(NotImplementedError, match=_NO_MEMORY):
        ops.mhc_block_forward(
            dataclasses.replace(batch, norm=dataclasses.replace(batch.norm, gamma=make(batch.norm.gamma)))
        )
    for field in ("d_r_new", "d_normalized", "d_residual"):
        with pytest.raises(NotImplementedError, match=_NO_MEMORY):
            ops.mhc_block_backward(batch, saved, dataclasses.replace(grads, **{field: make(getattr(grads, field))}))
    for key in ("p", "r", "pre", "post", "c", "hidden"):
        with pytest.raises(NotImplementedError, match=_NO_MEMORY):
            ops.mhc_block_backward(batch, saved | {key: make(saved[key])}, grads)


@pytest.mark.parametrize("make", WITHOUT_MEMORY)
def test_an_empty_tensor_needs_no_memory(make: Any) -> None:
    """The refusal is of elements that cannot be read, not of a null address."""
    ops = provider(PROFILES[0])
    none = make(torch.zeros(0, 4, 12, dtype=torch.bfloat16))
    assert ops.h_aggregate_fwd(torch.zeros(0, 4), none).shape == (0, 12)


@pytest.mark.parametrize("key", ["gemm", "sinkhorn", "p", "r", "pre", "post", "c", "hidden", "norm"])
def test_a_backward_without_a_saved_tensor_is_refused(key: str) -> None:
    batch, grads = drawn("refused", 3, 12)
    ops = provider(PROFILES[0])
    _, saved = ops.mhc_block_forward(batch)
    with pytest.raises(ValueError, match=f"saved: want the dict of the forward with key '{key}'"):
        ops.mhc_block_backward(batch, {k: v for k, v in saved.items() if k != key}, grads)


def test_another_profile_is_refused() -> None:
    tolerant = NumericProfile("tests-native-tolerant", "torch-library", tolerance={"*": Tolerance(1)}, base=PROFILES[0])
    with restored_registry():
        register_profile(tolerant)
        for profile in (tolerant.id, "no-such-profile", ""):
            with pytest.raises(ValueError, match=f"^native: numeric_profile: got '{profile}', want one of: "):
                NativeOperators(profile)
