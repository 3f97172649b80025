"""The operator cases: inputs handed to a provider's operators directly, forward and backward.

Each case is a function of an operator set that returns named outputs; the judge calls it once with the candidate
and once with the oracle. The names are ``operator.output``.
"""

from __future__ import annotations

import functools
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

    The published edges are drawn as their profile draws them, all others by Philox. ``row_inputs`` are the
    positions of the inputs, and ``row_outputs`` the outputs, whose first axis is one of independent rows. Where
    ``may_refuse`` is set, the case is outside the frozen contract: right bytes or a typed refusal, never wrong
    bytes.
    """

    name: str
    about: str
    inputs: Callable[[int, str], Inputs]
    run: Callable[[Any, Inputs], Outputs]
    row_inputs: tuple[int, ...] = ()
    row_outputs: tuple[str, ...] = ()
    may_refuse: bool = False


def run_sinkhorn(ops: Any, inputs: Inputs) -> Outputs:
    """``h, dpre, dpost, dc`` through ``hc_split_sinkhorn``."""
    h, dpre, dpost, dc = inputs
    pre, post, c, saved = ops.hc_split_sinkhorn_fwd(h)
    dh = ops.hc_split_sinkhorn_bwd(dpre, dpost, dc, saved)
    fwd = "hc_split_sinkhorn_fwd"
    return {f"{fwd}.pre": pre, f"{fwd}.post": post, f"{fwd}.c": c, "hc_split_sinkhorn_bwd.dh": dh}


def run_gemm_rms(ops: Any, inputs: Inputs, eps: float = MHC_EPS) -> Outputs:
    """``x_flat, weight, dp, dr`` through ``fp32_gemm_rms``."""
    x_flat, weight, dp, dr = inputs
    p, r, saved = ops.fp32_gemm_rms_fwd(x_flat, weight, eps)
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


def run_rmsnorm(ops: Any, inputs: Inputs, eps: float = RMSNORM_EPS) -> Outputs:
    """``x, gamma, dy, d_residual`` through ``rmsnorm_residual``."""
    x, gamma, dy, d_residual = inputs
    y, residual, saved = ops.rmsnorm_residual_fwd(x, gamma, eps)
    dx, dgamma = ops.rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved)
    fwd, bwd = "rmsnorm_residual_fwd", "rmsnorm_residual_bwd"
    return {f"{fwd}.y": y, f"{fwd}.residual": residual, f"{bwd}.dX": dx, f"{bwd}.dGamma": dgamma}


def run_fixed_gemm(ops: Any, inputs: Inputs) -> Outputs:
    """``x, w, dy`` through ``fixed_k_gemm``."""
    x, w, dy = inputs
    out = ops.fixed_k_gemm_fwd(x, w)
    dx, dw = ops.fixed_k_gemm_bwd(dy, x, w)
    return {"fixed_k_gemm_fwd.out": out, "fixed_k_gemm_bwd.dX": dx, "fixed_k_gemm_bwd.dW": dw}


def _sinkhorn_extremes(hidden: int, numeric_profile: str) -> Inputs:
    draws = PhiloxDraws("sinkhorn_extremes")
    one_hot = torch.zeros(3, PROD_CONTROLLER_N)
    one_hot[0, 8::5], one_hot[1, 11:23:3], one_hot[2, :] = 80.0, -80.0, -80.0
    h = torch.cat((one_hot, draws(13, PROD_CONTROLLER_N, scale=32.0)))
    return h, draws(16, HC_MULT), draws(16, HC_MULT), draws(16, HC_MULT, HC_MULT)


def _gemm_rms_rows(hidden: int, numeric_profile: str) -> Inputs:
    draws, k = PhiloxDraws("gemm_rms_rows"), HC_MULT * hidden
    x = _full(draws, 33, k)
    x[1], x[2], x[3] = 0.0, x[2] * 1e-30, x[3] * 1e20
    return x, draws(PROD_CONTROLLER_N, k, scale=draws.weight_scale(k)), draws(33, PROD_CONTROLLER_N), draws(33)


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


def _full(draws: PhiloxDraws, *shape: int) -> torch.Tensor:
    """FP32 numbers that use all 24 bits, so that their products round."""
    return draws(*shape) + draws(*shape, scale=2.0**-14)


def _aggregate_order(hidden: int, numeric_profile: str) -> Inputs:
    """Sums of which all but the rounding cancels: no BF16 store hides another order, or an FMA in either pair."""
    draws = PhiloxDraws("aggregate_order")
    r_old, pre = bf16(draws, 4, HC_MULT, hidden), _full(draws, 4, HC_MULT)
    pre[0], r_old[0] = torch.tensor(_CANCELLING), 1.0
    for row, first in ((1, 0), (2, 2), (3, 0)):
        _cancel_pair(r_old[row], pre[row], first)
    return pre, r_old, _full(draws, 4, hidden)


def _post_order(hidden: int, numeric_profile: str) -> Inputs:
    """The same for the sum over streams, for its sum with ``POST * y``, and for ``POST * y`` added too early."""
    draws = PhiloxDraws("post_order")
    r_old, y = bf16(draws, 7, HC_MULT, hidden), bf16(draws, 7, hidden)
    c, post = _full(draws, 7, HC_MULT, HC_MULT), _full(draws, 7, HC_MULT)
    c[0], post[0], r_old[0] = torch.tensor(_CANCELLING)[:, None], 0.0, 1.0
    r_old[1:4], c[1:4] = 0.0, 0.0
    r_old[1:4, 0], c[1:4, 0] = y[1:4], -post[1:4]
    for row, first in ((4, 0), (5, 2)):
        _cancel_pair(r_old[row], c[row], first)
        post[row] = 0.0
    c[6], post[6], r_old[6], y[6] = torch.tensor([1.0, 0.0, -1.0, 0.0])[:, None], 1.5 * 2.0**-25, 1.0, 1.0
    return r_old, y, c, post, bf16(draws, 7, HC_MULT, hidden)


def _cancel_pair(streams: torch.Tensor, coefficients: torch.Tensor, first: int) -> None:
    """Leave two streams, the second the first's negative: their products cancel, unless one of them is not rounded."""
    others = [i for i in range(HC_MULT) if i not in (first, first + 1)]
    streams[others] = 0.0
    streams[first + 1], coefficients[first + 1] = -streams[first], coefficients[first]


def _rms_near_ties(hidden: int, numeric_profile: str) -> Inputs:
    """FP32 gammas that put ``(x*r)*gamma`` on, or an FP32 ULP beside, the middle of two BF16 values."""
    draws = PhiloxDraws("rms_near_ties")
    row = bf16(draws, 1, hidden)
    r = 1.0 / (row.double().square().mean() + RMSNORM_EPS).sqrt()  # has to come close, no more
    ties = 1 + (torch.arange(hidden) % 64) * 2.0**-7 + 2.0**-8
    gamma = (ties / (row.double() * r)).float()[0]
    return torch.cat((row, -row)), gamma, bf16(draws, 2, hidden), bf16(draws, 2, hidden, scale=0.25)


def _post_specials(hidden: int, numeric_profile: str) -> Inputs:
    """Infinities, NaN, and sums beyond the largest BF16 number, which become infinite; FP32 gradients."""
    draws = PhiloxDraws("post_specials")
    r_old, y = bf16(draws, 5, HC_MULT, hidden), bf16(draws, 5, hidden)
    r_old[1], r_old[2, 0], y[3], r_old[4, 1] = 3e38, float("inf"), float("nan"), float("-inf")
    return r_old, y, draws(5, HC_MULT, HC_MULT), draws(5, HC_MULT), _full(draws, 5, HC_MULT, hidden)


def _rms_specials(hidden: int, numeric_profile: str) -> Inputs:
    """Rows with an infinity, a NaN, and squares beyond FP32."""
    draws = PhiloxDraws("rms_specials")
    x = bf16(draws, 4, hidden)
    x[0, 0], x[1, -1], x[2] = float("inf"), float("nan"), 3e38
    return x, bf16(draws, hidden), bf16(draws, 4, hidden), bf16(draws, 4, hidden)


def _rms_fp32_grads(hidden: int, numeric_profile: str) -> Inputs:
    """FP32 gradients arriving, which no kernel may round on the way in."""
    draws = PhiloxDraws("rms_fp32_grads")
    return bf16(draws, 3, hidden), draws(hidden), _full(draws, 3, hidden), _full(draws, 3, hidden)


def _gemm_rms_bf16(hidden: int, numeric_profile: str) -> Inputs:
    """A BF16 residual, widened exactly."""
    x, weight, dp, dr = _gemm_rms_rows(hidden, numeric_profile)
    return x.to(torch.bfloat16), weight, dp, dr


def _gemm_rms_tiny(hidden: int, numeric_profile: str) -> Inputs:
    """``dp = 0``, so that the RMS leg and its guard are seen alone; rows small enough for eps to matter."""
    draws, k = PhiloxDraws("gemm_rms_tiny"), HC_MULT * hidden
    x = _full(draws, 33, k)
    x[1], x[2], x[3], x[4] = 0.0, x[2] * 1e-30, x[3] * 2.0**-12, x[4] * 1e-6
    dp = torch.zeros(33, PROD_CONTROLLER_N)
    return x, draws(PROD_CONTROLLER_N, k, scale=draws.weight_scale(k)), dp, draws(33)


_CANCELLING = (1.0, 2.0**-25, -1.0, 1.5 * 2.0**-25)
"""Sums to another value by every order but the tree."""


def _fixed_gemm(rows: int, dtype: torch.dtype) -> Callable[[int, str], Inputs]:
    def draw(hidden: int, numeric_profile: str) -> Inputs:
        draws = PhiloxDraws(f"fixed_gemm.{rows}")
        return _full(draws, rows, hidden).to(dtype), _full(draws, 17, hidden).to(dtype), _full(draws, rows, 17)

    return draw


OTHER_EPS = 1e-5
_GEMM_ROWS = ((0, 2), ("fixed_k_gemm_fwd.out", "fixed_k_gemm_bwd.dX"))


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
    OperatorCase("post_order", "sums of which all but the rounding cancels", _post_order, run_post),
    OperatorCase("aggregate_order", "sums of which all but the rounding cancels", _aggregate_order, run_aggregate),
    OperatorCase("rms_near_ties", "products on and beside the middle of two BF16 values", _rms_near_ties, run_rmsnorm),
    OperatorCase("gemm_rms_tiny", "the RMS leg alone, rows of 0 to 2^-12", _gemm_rms_tiny, run_gemm_rms),
    OperatorCase("gemm_rms_bf16", "BF16 rows of 0, 1e-30 and 1e20", _gemm_rms_bf16, run_gemm_rms),
    OperatorCase("post_specials", "infinities, NaN, overflow in the store, FP32 gradients", _post_specials, run_post),
    OperatorCase("rms_specials", "rows with an infinity, a NaN, squares beyond FP32", _rms_specials, run_rmsnorm),
    OperatorCase("rms_fp32_grads", "FP32 gradients arriving", _rms_fp32_grads, run_rmsnorm),
    OperatorCase(
        "rms_other_eps",
        "eps 1e-5 as an argument: its bytes, or a refusal",
        _rms_edges("bfloat16"),
        functools.partial(run_rmsnorm, eps=OTHER_EPS),
        may_refuse=True,
    ),
    OperatorCase(
        "gemm_rms_other_eps",
        "eps 1e-5 as an argument: its bytes, or a refusal",
        _gemm_rms_tiny,
        functools.partial(run_gemm_rms, eps=OTHER_EPS),
        may_refuse=True,
    ),
    OperatorCase("fixed_gemm", "33 rows, FP32", _fixed_gemm(33, torch.float32), run_fixed_gemm, *_GEMM_ROWS),
    OperatorCase("fixed_gemm_many", "257 rows, FP32", _fixed_gemm(257, torch.float32), run_fixed_gemm, *_GEMM_ROWS),
    OperatorCase("fixed_gemm_bf16", "one row, BF16", _fixed_gemm(1, torch.bfloat16), run_fixed_gemm),
    OperatorCase("fixed_gemm_empty", "no rows", _fixed_gemm(0, torch.float32), run_fixed_gemm),
)
