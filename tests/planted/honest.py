"""Providers without a defect: the judge must pass every one of them."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import ORACLE_PROFILE, ResidualBatch
from rl_engine.mhc.provider import ReferenceProvider, check_capability
from tests.planted import kernels
from tests.planted.arithmetic import ascending
from tests.planted.kernels import kernel

Grads = dict[str, Any]


class Leaves:
    """Every leaf operator, of the kernels that were written from the contract."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd)
    hc_split_sinkhorn_bwd = kernel(kernels.hc_split_sinkhorn_bwd)
    fp32_gemm_rms_fwd = kernel(kernels.fp32_gemm_rms_fwd)
    fp32_gemm_rms_bwd = kernel(kernels.fp32_gemm_rms_bwd)
    mhc_post_fwd = kernel(kernels.mhc_post_fwd)
    mhc_post_bwd = kernel(kernels.mhc_post_bwd)
    h_aggregate_fwd = kernel(kernels.h_aggregate_fwd)
    h_aggregate_bwd = kernel(kernels.h_aggregate_bwd)
    rmsnorm_residual_fwd = kernel(kernels.rmsnorm_residual_fwd)
    rmsnorm_residual_bwd = kernel(kernels.rmsnorm_residual_bwd)
    fixed_k_gemm_fwd = kernel(kernels.fixed_k_gemm_fwd)
    fixed_k_gemm_bwd = kernel(kernels.fixed_k_gemm_bwd)


class Honest(Leaves, ReferenceProvider):
    """All leaf operators of its own under the reference's composites."""

    name = "honest"


class HonestPost(ReferenceProvider):
    """One operator of its own, the rest the reference's: the shortest way in."""

    name = "honest-post"
    mhc_post_fwd = kernel(kernels.mhc_post_fwd)


class Composites:
    """The composites, written from the contract; each gates itself and calls its parts through ``ops``."""

    def mhc_pre_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        check_capability(self, batch.contract, batch)
        parts = self if ops is None else ops
        x_flat = batch.r_old.float().reshape(batch.tokens, batch.contract.flat_k)
        p, r, gemm = parts.fp32_gemm_rms_fwd(x_flat, batch.controller.weight, batch.contract.mhc_eps)
        m = r[:, None] * p
        h = self.affine(m, alpha24(batch), batch.controller.bias)
        pre, post, c, sinkhorn = parts.hc_split_sinkhorn_fwd(h, batch.contract)
        hidden = parts.h_aggregate_fwd(pre, batch.r_old)
        saved = {"x_flat": x_flat, "p": p, "r": r, "m": m, "h": h, "pre": pre, "post": post, "c": c}
        return hidden, pre, post, c, {**saved, "gemm": gemm, "sinkhorn": sinkhorn}

    def mhc_pre_bwd(
        self,
        dhidden: torch.Tensor,
        dpost: torch.Tensor,
        dc: torch.Tensor,
        batch: ResidualBatch,
        saved: dict[str, Any],
        ops: Any = None,
    ) -> Grads:
        check_capability(self, batch.contract, batch)
        parts = self if ops is None else ops
        d_r, d_pre = parts.h_aggregate_bwd(dhidden, saved["pre"], batch.r_old)
        dh = parts.hc_split_sinkhorn_bwd(d_pre, dpost, dc, saved["sinkhorn"])
        dm = dh * alpha24(batch)
        ones = torch.ones((), dtype=torch.float32, device=dh.device)
        dr = ascending((dm * saved["p"]).t(), ones.expand(24))
        dp = dm * saved["r"][:, None]
        dx, dw = parts.fp32_gemm_rms_bwd(dp, dr, saved["x_flat"], batch.controller.weight, saved["gemm"])
        d_alpha = ascending(dh * saved["m"], ones.expand(batch.tokens))
        by_segment = [self.segment(d_alpha[lo:hi]) for lo, hi in ((0, 4), (4, 8), (8, 24))]
        grads = dict(zip(("d_alpha_pre", "d_alpha_post", "d_alpha_res"), by_segment, strict=True))
        grads |= {"d_controller_weight": dw, "d_bias": self.over_tokens(dh)}
        grads = {"d_r_old": d_r + dx.reshape(d_r.shape), **self.controller_grads(batch, grads)}
        return grads

    def mhc_pre_rmsnorm_fused_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        check_capability(self, batch.contract, batch)
        parts = self if ops is None else ops
        hidden, _, post, c, saved = parts.mhc_pre_fwd(batch)
        normalized, residual, norm = parts.rmsnorm_residual_fwd(hidden, batch.norm.gamma, batch.contract.rmsnorm_eps)
        return hidden, normalized, residual, post, c, {**saved, "hidden": hidden, "norm": norm}

    # What defects replace.

    def affine(self, m: torch.Tensor, alpha: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (m * alpha) + bias

    def segment(self, part: torch.Tensor) -> torch.Tensor:
        """The gradient ``[1]`` of one alpha, of those of its segment."""
        return ascending(part, torch.ones_like(part)).reshape(1)

    def over_tokens(self, dh: torch.Tensor) -> torch.Tensor:
        return ascending(dh, torch.ones_like(dh))

    def controller_grads(self, batch: ResidualBatch, grads: Grads) -> Grads:
        return dict.fromkeys(grads) if batch.contract.trainability == "mixer-frozen" else grads


def alpha24(batch: ResidualBatch) -> torch.Tensor:
    """The three alphas, repeated over their segments."""
    pre, post, res = batch.controller.alphas
    return torch.cat((pre.expand(4), post.expand(4), res.expand(16)))


class Standalone(Leaves, Composites):
    """Nothing of the reference at all: not its class, its composites, its declaration or its provenance."""

    name = "standalone"
    numeric_profile = ORACLE_PROFILE

    def capabilities(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "geometry": ["one-row", "packed"],
            "devices": ["cpu"],
            "fusion_modes": ["unfused", "fused-pre-norm"],
            "trainability": ["full", "mixer-frozen"],
            "placements": ["replicated"],
        }

    def provenance(self) -> dict[str, Any]:
        return {
            "requested_backend": self.name,
            "actual_backend": self.name,
            "numeric_profile": self.numeric_profile,
            "torch_version": str(torch.__version__),
        }
