"""The backward of the pre half and of the gates alone, which no operator of the contract has under these names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_engine.mhc import block
from rl_engine.mhc.contract import CONTROLLER_RMS
from rl_engine.mhc.provider import ReferenceProvider
from tests.backends.support import PROFILES, assert_same, at_level, drawn, halves, levels, provider

SIZES = [(0, 64), (1, 4096), (3, 5), (17, 66), (66, 128), (33, 4100)]


@pytest.mark.parametrize("formula", CONTROLLER_RMS)
@pytest.mark.parametrize("profile", PROFILES)
def test_without_the_link_it_is_the_composition_of_the_leaves(profile: str, formula: str) -> None:
    ops, ref = provider(profile), ReferenceProvider(profile)
    for tokens, hidden in SIZES:
        batch, grads = drawn(f"halves {tokens}", tokens, hidden, profile, controller_rms=formula)
        post, c = torch.randn(tokens, 4), torch.randn(tokens, 4, 4)
        h, *_, saved = block.mhc_pre_rmsnorm_fused_fwd(batch, ops=ref)
        d_hidden, d_gamma = ref.rmsnorm_residual_bwd(
            grads.d_normalized, grads.d_residual, h, batch.norm.gamma, saved["norm"]
        )
        wanted = {**block.mhc_pre_bwd(d_hidden, post, c, batch, saved, ops=ref), "d_gamma": d_gamma}
        for level in levels():
            with at_level(level):
                *_, kept = ops.mhc_pre_rmsnorm_fused_fwd(batch)
                got = ops.mhc_pre_rmsnorm_fused_bwd(grads.d_normalized, grads.d_residual, post, c, batch, kept)
            assert_same(got, wanted, f"T={tokens}, D={hidden}, {level}")


@pytest.mark.parametrize("profile", PROFILES)
def test_layouts_and_rows_of_no_number(profile: str) -> None:
    """Strided gradients and saved parts give the bytes of contiguous ones; what is NaN rounds to NaN."""
    batch, grads = drawn("halves strided", 9, 68, profile)
    batch.r_old[3, 1, 7] = float("nan")
    grads.d_r_new[5, 2, 11] = float("inf")
    found = halves(provider(profile), batch, grads)

    def strided(t: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
        return wide[..., ::2].copy_(t)

    moved = type(grads)(*(strided(t) for t in (grads.d_r_new, grads.d_normalized, grads.d_residual)))
    assert_same(halves(provider(profile), batch, moved), found, "strided")
    assert torch.isnan(found["d_r_old"][3]).any()  # type: ignore[index]
    assert torch.isfinite(found["d_r_old"][0]).all()  # type: ignore[index]


WRONG: list[tuple[str, Any, type[Exception]]] = [
    ("d_normalized", torch.zeros(4, 63, dtype=torch.bfloat16), ValueError),
    ("d_residual", torch.zeros(4, 64, dtype=torch.float64), TypeError),
    ("d_post", torch.zeros(4, 4, dtype=torch.bfloat16), TypeError),
    ("d_c", torch.zeros(4, 16), ValueError),
    ("d_r_new", torch.zeros(5, 4, 64, dtype=torch.bfloat16), ValueError),
    ("d_r_new", [1.0], TypeError),
    ("streams_dtype", torch.float16, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_what_is_wrong_is_named(name: str, value: Any, error: type[Exception]) -> None:
    batch, grads = drawn("halves refused", 4, 64)
    ops = provider(PROFILES[0])
    *_, post, c, saved = ops.mhc_pre_rmsnorm_fused_fwd(batch)
    arguments = {"d_normalized": grads.d_normalized, "d_residual": grads.d_residual, "d_post": post, "d_c": c}
    with pytest.raises(error, match=f"mhc_pre_rmsnorm_fused_bwd: {name}: got .* want"):
        ops.mhc_pre_rmsnorm_fused_bwd(**{**arguments, name: value}, batch=batch, saved=saved)
