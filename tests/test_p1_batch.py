"""Parameters, batches and gradients: what their fingerprints see and what their validation refuses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from rl_engine.mhc.contract import ControllerParams, GradBoundary, NormParams, ResidualBatch
from tests.operators.block_inputs import block_leaves, grad_leaves, make_block, with_leaves
from tests.operators.support import BF16, FP32
from tests.reference.bridge import assert_same_tensor

# --- parameters ---


def test_alphas_in_order_and_expanded() -> None:
    batch, _ = make_block("alphas", 1, 2)
    controller = batch.controller
    assert [a.item() for a in controller.alphas] == [
        controller.alpha_pre.item(),
        controller.alpha_post.item(),
        controller.alpha_res.item(),
    ]
    with torch.device("meta"):
        expanded = controller.expanded_alpha(batch.contract)
    want = torch.cat([controller.alpha_pre.repeat(4), controller.alpha_post.repeat(4), controller.alpha_res.repeat(16)])
    assert_same_tensor("expanded", expanded, want)
    trained = dataclasses.replace(controller, alpha_pre=controller.alpha_pre.requires_grad_())
    assert not trained.expanded_alpha(batch.contract).requires_grad


@pytest.mark.parametrize("leaf", ["weight", "alpha_pre", "alpha_post", "alpha_res", "bias", "gamma"])
@pytest.mark.parametrize("gamma_dtype", [BF16, FP32])
def test_the_weight_fingerprint_moves_with_every_byte(leaf: str, gamma_dtype: torch.dtype) -> None:
    batch, _ = make_block("bytes", 1, 1, gamma_dtype=gamma_dtype)
    seen = {batch.compute_weight_fingerprint()}
    value = block_leaves(batch)[leaf]
    for index in range(value.numel() * value.element_size()):
        changed = value.clone()
        changed.view(torch.uint8)[..., :].view(-1)[index] ^= 1
        other = with_leaves(batch, **{leaf: changed})
        seen.add(other.compute_weight_fingerprint())
        if not changed.isnan().any():
            other.sealed().validate()
        with pytest.raises(ValueError, match="weight_fingerprint"):
            dataclasses.replace(other, weight_fingerprint=batch.weight_fingerprint).validate()
    assert len(seen) == 1 + value.numel() * value.element_size()


def test_the_weight_fingerprint_moves_with_dtype_shape_and_name() -> None:
    batch, _ = make_block("dtypes", 1, 2)
    ones = torch.ones(2, dtype=BF16)
    same_bytes = NormParams(ones.view(FP32)), NormParams(ones.view(torch.int16)), NormParams(ones.reshape(1, 2))
    prints = {params.fingerprint() for params in (NormParams(ones), *same_bytes)}
    assert len(prints) == 4
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    swapped = dataclasses.replace(batch.controller, alpha_pre=a, alpha_post=b)
    assert swapped.fingerprint() != dataclasses.replace(swapped, alpha_pre=b, alpha_post=a).fingerprint()


def test_the_weight_fingerprint_moves_with_the_contract_and_not_with_the_data() -> None:
    batch, _ = make_block("contract", 2, 2)
    want = batch.compute_weight_fingerprint()
    placed = dataclasses.replace(batch, contract=batch.contract.with_mode("placement", "tp-sharded"))
    assert placed.compute_weight_fingerprint() != want
    with pytest.raises(ValueError, match="weight_fingerprint"):
        placed.validate()
    other = dataclasses.replace(batch, r_old=batch.r_old + 1, token_id=batch.token_id + 1)
    assert other.compute_weight_fingerprint() == want
    relaid = with_leaves(batch, weight=batch.controller.weight.t().contiguous().t())
    assert relaid.compute_weight_fingerprint() == want


def test_sealing() -> None:
    batch, _ = make_block("sealing", 1, 2)
    unsealed = dataclasses.replace(batch, weight_fingerprint="")
    unsealed.validate()
    sealed = unsealed.sealed()
    assert unsealed.weight_fingerprint == ""
    assert sealed.weight_fingerprint == unsealed.compute_weight_fingerprint()
    for tampered in ("0" * 64, sealed.weight_fingerprint.upper(), sealed.weight_fingerprint[:-1], " "):
        with pytest.raises(
            ValueError, match=f"weight_fingerprint: got '{tampered}', want '{sealed.weight_fingerprint}'"
        ):
            dataclasses.replace(sealed, weight_fingerprint=tampered).validate()
    sealed.controller.bias[0] += 1
    with pytest.raises(ValueError, match="weight_fingerprint"):
        sealed.validate()


# --- what a batch refuses ---

FIELD = {"y": "y_sublayer", "gamma": "norm.gamma"}
LEGEND = {"r_old": "[T, 4, D]", "y": "[T, D]", "weight": "[24, K]", "gamma": "[D]"}


def named(leaf: str) -> str:
    controller = {spec.name for spec in dataclasses.fields(ControllerParams)}
    return f"controller.{leaf}" if leaf in controller else FIELD.get(leaf, leaf)


LEAVES = ("r_old", "y", "weight", "alpha_pre", "alpha_post", "alpha_res", "bias", "gamma")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.int64, torch.bool, FP32, BF16])
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_wrong_dtype_is_a_type_error(leaf: str, dtype: torch.dtype) -> None:
    batch, _ = make_block("dtype", 2, 3)
    value = block_leaves(batch)[leaf]
    if value.dtype == dtype:
        batch.validate()
        return
    with pytest.raises(TypeError, match=f"^{named(leaf)}: got dtype {dtype}, want {value.dtype}"):
        with_leaves(batch, **{leaf: value.to(dtype)}).validate()


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_wrong_shape_is_a_value_error(leaf: str) -> None:
    batch, _ = make_block("shape", 2, 3)
    value = block_leaves(batch)[leaf]
    shapes = [value.unsqueeze(0), value.unsqueeze(-1), value.flatten()[:0], torch.cat([value, value], dim=-1)]
    for bad in (*shapes, torch.cat([value, value], dim=value.dim() - 2) if value.dim() > 1 else value.reshape(-1, 1)):
        with pytest.raises(ValueError, match=re.escape(str(tuple(bad.shape)))) as caught:
            with_leaves(batch, **{leaf: bad}).validate()
        assert str(caught.value).startswith(f"{named(leaf)}: got")
        assert LEGEND.get(leaf, "want") in str(caught.value)


@pytest.mark.parametrize("value", [None, [1.0], 3, "x"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_something_other_than_a_tensor_is_a_type_error(leaf: str, value: Any) -> None:
    batch, _ = make_block("type", 2, 3)
    with pytest.raises(TypeError, match=f"^{named(leaf)}: got {type(value).__name__}"):
        with_leaves(batch, **{leaf: value}).validate()


def test_token_ids() -> None:
    batch, _ = make_block("tokens", 2, 3)
    for dtype in (torch.int32, FP32, torch.bool, torch.uint8):
        with pytest.raises(TypeError, match=f"^token_id: got dtype {dtype}, want torch.int64"):
            dataclasses.replace(batch, token_id=batch.token_id.to(dtype)).validate()
    for bad in (torch.arange(3), torch.arange(1), torch.zeros(2, 1, dtype=torch.int64), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"^token_id: got shape .*want \(2,\)"):
            dataclasses.replace(batch, token_id=bad).validate()
    dataclasses.replace(batch, token_id=torch.tensor([-1, -1])).validate()


def test_the_row_geometry() -> None:
    for tokens in (0, 2, 16):
        batch, _ = make_block("geometry", tokens, 2)
        batch.validate()
        with pytest.raises(ValueError, match=f"row_geometry: got 'one-row' with T={tokens}, want T=1"):
            dataclasses.replace(batch, row_geometry="one-row").validate()
    batch, _ = make_block("geometry", 1, 2)
    dataclasses.replace(batch, row_geometry="one-row").validate()
    for bad in ("", "ragged", None, ["packed"]):
        with pytest.raises(ValueError, match=r"row_geometry: got .* want one of: one-row, packed"):
            dataclasses.replace(batch, row_geometry=bad).validate()


def test_gamma_is_what_the_contract_says() -> None:
    batch, _ = make_block("gamma", 1, 2)
    wide, _ = make_block("gamma", 1, 2, gamma_dtype=FP32)
    wide.validate()
    for params, contract in ((wide.norm, batch.contract), (batch.norm, wide.contract)):
        with pytest.raises(TypeError, match=r"norm.gamma: got dtype .* want torch"):
            params.validate(contract)


def test_the_contract_of_a_batch_is_validated() -> None:
    batch, _ = make_block("contract fields", 1, 2)
    wrong = {"hidden": 0, "layer_index": -1, "sinkhorn_iters": 19, "rmsnorm_eps": 1e-5, "fusion_mode": "fused"}
    for name, value in {**wrong, "placement": "", "numeric_profile": "x", "gamma_dtype": "float16"}.items():
        bad = dataclasses.replace(batch, contract=dataclasses.replace(batch.contract, **{name: value}))
        with pytest.raises(ValueError, match=f"contract.{name}"):
            bad.validate()


def test_everything_is_on_one_device() -> None:
    batch, grads = make_block("devices", 2, 3)
    unsealed = dataclasses.replace(batch, weight_fingerprint="")
    unsealed.to("meta").validate()
    grads.to("meta").validate(unsealed.to("meta"))
    with pytest.raises(ValueError, match="d_r_new: got device meta, want cpu"):
        grads.to("meta").validate(batch)
    for leaf in LEAVES:
        moved = with_leaves(batch, **{leaf: block_leaves(batch)[leaf].to("meta")})
        with pytest.raises(ValueError, match="device"):
            moved.validate()
    with pytest.raises(ValueError, match=r"^token_id: got device meta, want cpu"):
        dataclasses.replace(batch, token_id=batch.token_id.to("meta")).validate()
    both = dataclasses.replace(unsealed, controller=batch.controller.to("meta"), norm=batch.norm.to("meta"))
    with pytest.raises(ValueError, match=r"^controller.weight: got device meta, want cpu"):
        both.validate()


def test_to_moves_everything_and_keeps_the_rest() -> None:
    batch, grads = make_block("to", 2, 3)
    moved = batch.to("meta")
    tensors = [*block_leaves(moved).values(), moved.token_id, *grad_leaves(grads.to("meta"))]
    assert {t.device.type for t in tensors} == {"meta"}
    assert (moved.contract, moved.row_geometry) == (batch.contract, batch.row_geometry)
    assert moved.weight_fingerprint == batch.weight_fingerprint
    assert (moved.tokens, moved.hidden) == (2, 3)
    noted = dataclasses.replace(grads, metadata={"a": 1}).to("cpu")
    assert noted.metadata == {"a": 1}
    assert all(a is b for a, b in zip(grad_leaves(noted), grad_leaves(grads), strict=True))


# --- what the gradients refuse ---


@pytest.mark.parametrize("name", ["d_r_new", "d_normalized", "d_residual"])
def test_gradients_refuse(name: str) -> None:
    batch, grads = make_block("grads", 2, 3)
    grads.validate(batch)
    value = getattr(grads, name)
    for dtype in (FP32, torch.float16, torch.float64, torch.int16):
        with pytest.raises(TypeError, match=f"^{name}: got dtype {dtype}, want torch.bfloat16"):
            dataclasses.replace(grads, **{name: value.to(dtype)}).validate(batch)
    for bad in (value[:1], value[None], value.flatten(), torch.cat([value, value], -1), value.transpose(0, -1)):
        with pytest.raises(ValueError, match=f"^{name}: got shape {re.escape(str(tuple(bad.shape)))}, want "):
            dataclasses.replace(grads, **{name: bad}).validate(batch)
    for other in (None, [1.0]):
        with pytest.raises(TypeError, match=f"^{name}: got {type(other).__name__}"):
            dataclasses.replace(grads, **{name: other}).validate(batch)


def test_each_gradient_boundary_has_metadata_of_its_own() -> None:
    batch, _ = make_block("metadata", 1, 2)
    first, second = GradBoundary(batch.r_old, batch.y_sublayer, batch.y_sublayer), make_block("metadata", 1, 2)[1]
    first.metadata["a"] = 1
    assert second.metadata == {} == make_block("metadata", 1, 2)[1].metadata


def test_no_rows_are_valid() -> None:
    batch, grads = make_block("no rows", 0, 3)
    batch.validate()
    grads.validate(batch)
    assert (batch.tokens, batch.hidden) == (0, 3)
    assert isinstance(batch, ResidualBatch)
