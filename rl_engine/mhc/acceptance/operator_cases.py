"""The operator cases: inputs handed to a provider's operators directly, forward and backward.

Each case is a function of an operator set that returns named outputs; the judge calls it once with the candidate
and once with the oracle. The names are ``operator.output``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rl_engine.mhc.contract import HC_MULT, MHC_EPS, PROD_CONTROLLER_N, RMSNORM_EPS
from rl_engine.mhc.fixture_inputs import PhiloxDraws, bf16
from rl_engine.mhc.fixtures import RMS_EDGES, SINKHORN_EDGES, make_rms_edge_inputs, make_sinkhorn_edge_inputs

Outputs = dict[str, torch.Tensor]
Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class OperatorCase:
    """One set of inputs for one operator: ``run(ops, inputs(hidden, numeric_profile))``.

    The published edges are drawn as their profile draws them, all others by Philox.
    """

    name: str
    about: str
    inputs: Callable[[int, str], Inputs]
    run: Callable[[Any, Inputs], Outputs]


def run_sinkhorn(ops: Any, inputs: Inputs) -> Outputs:
    """``h, dpre, dpost, dc`` through ``hc_split_sinkhorn``."""
    h, dpre, dpost, dc = inputs
    pre, post, c, saved = ops.hc_split_sinkhorn_fwd(h)
    dh = ops.hc_split_sinkhorn_bwd(dpre, dpost, dc, saved)
    fwd = "hc_split_sinkhorn_fwd"
    return {f"{fwd}.pre": pre, f"{fwd}.post": post, f"{fwd}.c": c, "hc_split_sinkhorn_bwd.dh": dh}


def run_gemm_rms(ops: Any, inputs: Inputs) -> Outputs:
    """``x_flat, weight, dp, dr`` through ``fp32_gemm_rms``."""
    x_flat, weight, dp, dr = inputs
    p, r, saved = ops.fp32_gemm_rms_fwd(x_flat, weight, MHC_EPS)
    dx, dw = ops.fp32_gemm_rms_bwd(dp, dr, x_flat, weight, saved)
    fwd, bwd = "fp32_gemm_rms_fwd", "fp32_gemm_rms_bwd"
    return {f"{fwd}.P": p, f"{fwd}.r": r, f"{bwd}.dX": dx, f"{bwd}.dW": dw}


def run_post(ops: Any, inputs: Inputs) -> Outputs:
    """``r_old, y, c, post, dr_new`` through ``mhc_post``."""
    r_old, y, c, post, dr_new = inputs
    r_new = ops.mhc_post_fwd(r_old, y, c, post)
    dr, dy, dc, dpost = ops.mhc_post_bwd(dr_new, r_old, y, c, post)
    bwd = "mhc_post_bwd"
    return {"mhc_post_fwd.r_new": r_new, f"{bwd}.dR_old": dr, f"{bwd}.dy": dy, f"{bwd}.dC": dc, f"{bwd}.dPOST": dpost}


def run_aggregate(ops: Any, inputs: Inputs) -> Outputs:
    """``pre, r_old, dh`` through ``h_aggregate``."""
    pre, r_old, dh = inputs
    hidden = ops.h_aggregate_fwd(pre, r_old)
    dr, dpre = ops.h_aggregate_bwd(dh, pre, r_old)
    return {"h_aggregate_fwd.hidden": hidden, "h_aggregate_bwd.dR": dr, "h_aggregate_bwd.dPRE": dpre}


def run_rmsnorm(ops: Any, inputs: Inputs) -> Outputs:
    """``x, gamma, dy, d_residual`` through ``rmsnorm_residual``."""
    x, gamma, dy, d_residual = inputs
    y, residual, saved = ops.rmsnorm_residual_fwd(x, gamma, RMSNORM_EPS)
    dx, dgamma = ops.rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved)
    fwd, bwd = "rmsnorm_residual_fwd", "rmsnorm_residual_bwd"
    return {f"{fwd}.y": y, f"{fwd}.residual": residual, f"{bwd}.dX": dx, f"{bwd}.dGamma": dgamma}


def run_fixed_gemm(ops: Any, inputs: Inputs) -> Outputs:
    """``x, w, dy`` through ``fixed_k_gemm``."""
    x, w, dy = inputs
    dx, dw = ops.fixed_k_gemm_bwd(dy, x, w)
    return {"fixed_k_gemm_fwd.out": ops.fixed_k_gemm_fwd(x, w), "fixed_k_gemm_bwd.dX": dx, "fixed_k_gemm_bwd.dW": dw}


def _sinkhorn_extremes(hidden: int, numeric_profile: str) -> Inputs:
    draws = PhiloxDraws("sinkhorn_extremes")
    one_hot = torch.zeros(3, PROD_CONTROLLER_N)
    one_hot[0, 8::5], one_hot[1, 11:23:3], one_hot[2, :] = 80.0, -80.0, -80.0
    h = torch.cat((one_hot, draws(13, PROD_CONTROLLER_N, scale=32.0)))
    return h, draws(16, HC_MULT), draws(16, HC_MULT), draws(16, HC_MULT, HC_MULT)


def _gemm_rms_rows(hidden: int, numeric_profile: str) -> Inputs:
    draws, k = PhiloxDraws("gemm_rms_rows"), HC_MULT * hidden
    x = draws(5, k)
    x[1], x[2], x[3] = 0.0, x[2] * 1e-30, x[3] * 1e20
    return x, draws(PROD_CONTROLLER_N, k, scale=draws.weight_scale(k)), draws(5, PROD_CONTROLLER_N), draws(5)


def _post_ties(hidden: int, numeric_profile: str) -> Inputs:
    """Sums that fall half-way between two BF16 values, to either side of even, with both signs."""
    draws = PhiloxDraws("post_ties")
    tokens = 4
    r_old = bf16(draws, tokens, HC_MULT, hidden).sign().to(torch.bfloat16)
    odd = torch.arange(hidden) % 2
    y = (2.0**-8 + odd * 2.0**-7).to(torch.bfloat16).expand(tokens, hidden) * r_old[:, 0]
    c = torch.eye(HC_MULT)[torch.tensor([0, 0, 0, 0])].t().repeat(tokens, 1, 1)
    post = torch.tensor([1.0, -1.0, 1.0, 3.0]).repeat(tokens, 1)
    return r_old, y.contiguous(), c, post, bf16(draws, tokens, HC_MULT, hidden)


def _aggregate_ties(hidden: int, numeric_profile: str) -> Inputs:
    """Like ``_post_ties``: stream 0 against half a BF16 ulp of it from stream 1; a row of negative zeros."""
    draws = PhiloxDraws("aggregate_ties")
    r_old = torch.zeros(4, HC_MULT, hidden)
    r_old[:, 0] = draws(4, hidden).sign()
    r_old[:, 1] = r_old[:, 0] * (1 + 2 * (torch.arange(hidden) % 2))
    r_old[3] = -0.0
    pre = torch.tensor([1.0, 2.0**-8, 1.0, 1.0]).repeat(4, 1)
    return pre, r_old.to(torch.bfloat16), bf16(draws, 4, hidden)


def _fixed_gemm(rows: int, dtype: torch.dtype) -> Callable[[int, str], Inputs]:
    def draw(hidden: int, numeric_profile: str) -> Inputs:
        draws = PhiloxDraws(f"fixed_gemm.{rows}")
        return draws(rows, hidden).to(dtype), draws(17, hidden).to(dtype), draws(rows, 17)

    return draw


def _rms_edges(gamma_dtype: str) -> Callable[[int, str], Inputs]:
    return lambda hidden, profile: make_rms_edge_inputs(gamma_dtype, profile, hidden)


OPERATOR_CASES = (
    OperatorCase(
        SINKHORN_EDGES,
        "published: saturated, shifted, zero and one-hot logits",
        lambda hidden, profile: make_sinkhorn_edge_inputs(profile),
        run_sinkhorn,
    ),
    OperatorCase(RMS_EDGES, "published: zero, tiny, constant and ramp rows", _rms_edges("bfloat16"), run_rmsnorm),
    OperatorCase("rms_edges_fp32_gamma", "the same rows, FP32 gamma", _rms_edges("float32"), run_rmsnorm),
    OperatorCase("sinkhorn_extremes", "logits of +-80, all equal, one-hot, wide", _sinkhorn_extremes, run_sinkhorn),
    OperatorCase("gemm_rms_rows", "FP32 rows of 0, 1e-30 and 1e20", _gemm_rms_rows, run_gemm_rms),
    OperatorCase("post_ties", "stores exactly half-way between two BF16 values", _post_ties, run_post),
    OperatorCase("aggregate_ties", "stores exactly half-way, and negative zeros", _aggregate_ties, run_aggregate),
    OperatorCase("fixed_gemm", "33 rows, FP32", _fixed_gemm(33, torch.float32), run_fixed_gemm),
    OperatorCase("fixed_gemm_bf16", "one row, BF16", _fixed_gemm(1, torch.bfloat16), run_fixed_gemm),
    OperatorCase("fixed_gemm_empty", "no rows", _fixed_gemm(0, torch.float32), run_fixed_gemm),
)
