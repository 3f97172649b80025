"""What a forward keeps for its backward: how much, and that a ``saved`` of another kind is refused, not read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.backends.support import PROFILES, drawn, provider, tensors_of
from tests.backends.test_native_refusals import arguments

KEPT_BYTES = 408
"""Bytes a token kept beyond inputs and outputs: 102 FP32 numbers (p 24, h 24, c 16, softmax 16, the sigmoids 8, pre 4,
post 4; s, norm, q, r, mean and inv_rms one each, in one storage). No width D in it."""


def kept_bytes(saved: Any, apart_from: list[torch.Tensor]) -> int:
    """The bytes of all storages in ``saved`` but those of ``apart_from``."""
    known = {t.untyped_storage().data_ptr() for t in apart_from}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(saved)}
    return sum(size for address, size in storages.items() if address not in known)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("hidden", [3, 64, 257])
def test_a_block_keeps_408_bytes_a_token_whatever_its_width(hidden: int, profile: str) -> None:
    batch, _ = drawn("saved memory", 129, hidden, profile)
    r_new, saved = provider(profile).mhc_block_forward(batch)
    outputs = [r_new, *(saved[name] for name in ("hidden", "normalized", "residual"))]
    assert kept_bytes(saved, [*tensors_of(batch), *outputs]) == KEPT_BYTES * batch.tokens


@pytest.mark.parametrize("profile", PROFILES)
def test_mhc_pre_keeps_408_bytes_a_token(profile: str) -> None:
    batch, _ = drawn("saved memory", 129, 64, profile)
    hidden, *_, saved = provider(profile).mhc_pre_fwd(batch)
    assert kept_bytes(saved, [*tensors_of(batch), hidden]) == KEPT_BYTES * batch.tokens


def test_the_count_of_kept_bytes_sees_a_copy_of_the_streams() -> None:
    batch, _ = drawn("saved memory", 129, 64)
    hidden, *_, saved = provider(PROFILES[0]).mhc_pre_fwd(batch)
    fat = saved | {"x_flat": saved["x_flat"].float()}
    assert kept_bytes(fat, [*tensors_of(batch), hidden]) == (KEPT_BYTES + 4 * 256) * batch.tokens


# --- a saved dict, or a batch, of another kind ---

LEAVES = [
    ("hc_split_sinkhorn_bwd", "softmax", torch.ones(5, 1)),
    ("hc_split_sinkhorn_bwd", "softmax", torch.ones(5, 4, 4).double()),
    ("hc_split_sinkhorn_bwd", "sig_pre", torch.ones(5, 1)),
    ("hc_split_sinkhorn_bwd", "sig_post", torch.ones(5, 4).double()),
    ("fp32_gemm_rms_bwd", "q", torch.ones(5).double()),
    ("fp32_gemm_rms_bwd", "q", [1.0] * 5),
    ("fp32_gemm_rms_bwd", "r", torch.ones(5).bfloat16()),
    ("rmsnorm_residual_bwd", "r", torch.ones(5, 2).bfloat16()),
]
FOREIGN = {
    "hidden is FP32": lambda s: {"hidden": s["hidden"].float()},
    "hidden is narrow": lambda s: {"hidden": s["hidden"][:, :4]},
    "hidden has other rows": lambda s: {"hidden": s["hidden"][:2]},
    "p is narrow": lambda s: {"p": s["p"][:, :4]},
    "c is FP64": lambda s: {"c": s["c"].double()},
    "post is BF16": lambda s: {"post": s["post"].bfloat16()},
    "softmax is flat": lambda s: {"sinkhorn": s["sinkhorn"] | {"softmax": s["sinkhorn"]["softmax"][:, 0]}},
    "q is FP64": lambda s: {"gemm": s["gemm"] | {"q": s["gemm"]["q"].double()}},
    "inv_rms is FP64": lambda s: {"norm": s["norm"] | {"r": s["norm"]["r"].double()}},
}
TYPED = (TypeError, ValueError)


@pytest.mark.parametrize(("operator", "key", "wrong"), LEAVES)
def test_an_operator_refuses_a_saved_tensor_of_another_shape_or_dtype(operator: str, key: str, wrong: object) -> None:
    given = arguments(operator)
    with pytest.raises(TYPED, match=f"^{operator}: saved.*{key}"):
        getattr(provider(PROFILES[0]), operator)(**given | {"saved": given["saved"] | {key: wrong}})


@pytest.mark.parametrize("wrong", FOREIGN)
def test_a_block_refuses_a_saved_tensor_of_another_shape_or_dtype(wrong: str) -> None:
    batch, grads = drawn("foreign", 3, 12)
    _, saved = provider(PROFILES[0]).mhc_block_forward(batch)
    with pytest.raises(TYPED, match="saved"):
        provider(PROFILES[0]).mhc_block_backward(batch, saved | FOREIGN[wrong](saved), grads)


def test_a_block_refuses_what_a_batch_of_another_width_saved() -> None:
    batch, grads = drawn("foreign", 3, 24)
    _, saved = provider(PROFILES[0]).mhc_block_forward(drawn("foreign", 3, 12)[0])
    with pytest.raises(TYPED, match="saved"):
        provider(PROFILES[0]).mhc_block_backward(batch, saved, grads)


def test_mhc_pre_bwd_refuses_a_batch_that_is_not_valid() -> None:
    batch, grads = drawn("foreign", 3, 12)
    ops = provider(PROFILES[0])
    *_, post, c, saved = ops.mhc_pre_fwd(batch)
    narrow = dataclasses.replace(batch.controller, weight=batch.controller.weight[:, :4])
    for name, changed in (("r_old", batch.r_old[:, :, :4]), ("r_old", batch.r_old.float()), ("controller", narrow)):
        wrong = dataclasses.replace(batch, weight_fingerprint="", **{name: changed})
        with pytest.raises(TYPED, match=name):
            ops.mhc_pre_bwd(grads.d_normalized, post, c, wrong, saved)


def test_mhc_pre_bwd_refuses_gradients_of_other_rows_or_width() -> None:
    batch, grads = drawn("foreign", 3, 12)
    ops = provider(PROFILES[0])
    *_, post, c, saved = ops.mhc_pre_fwd(batch)
    for dhidden, dpost, dc in (
        (grads.d_normalized[:2], post[:2], c[:2]),
        (grads.d_normalized[:, :4], post, c),
    ):
        with pytest.raises(TYPED, match="dhidden"):
            ops.mhc_pre_bwd(dhidden, dpost, dc, batch, saved)
