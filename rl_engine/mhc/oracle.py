"""The FP32 oracle: the operators and the block under the names of the contract, profile ``oracle-fp32-mhc-v1``.

A facade. The arithmetic is in ``operators/``, one file each; the chain is in ``block.py``.
"""

from __future__ import annotations

from rl_engine.mhc.block import (
    SUPPORTED_FUSION,
    SUPPORTED_TRAINABILITY,
    capabilities,
    mhc_block_backward,
    mhc_block_forward,
    mhc_pre_bwd,
    mhc_pre_fwd,
    mhc_pre_rmsnorm_fused_fwd,
)
from rl_engine.mhc.contract import ORACLE_PROFILE
from rl_engine.mhc.operators import reference_operators

name = "oracle"
numeric_profile = ORACLE_PROFILE

_operators = reference_operators(ORACLE_PROFILE)

hc_split_sinkhorn_fwd = _operators.hc_split_sinkhorn_fwd
hc_split_sinkhorn_bwd = _operators.hc_split_sinkhorn_bwd
fp32_gemm_rms_fwd = _operators.fp32_gemm_rms_fwd
fp32_gemm_rms_bwd = _operators.fp32_gemm_rms_bwd
mhc_post_fwd = _operators.mhc_post_fwd
mhc_post_bwd = _operators.mhc_post_bwd
h_aggregate_fwd = _operators.h_aggregate_fwd
h_aggregate_bwd = _operators.h_aggregate_bwd
rmsnorm_residual_fwd = _operators.rmsnorm_residual_fwd
rmsnorm_residual_bwd = _operators.rmsnorm_residual_bwd
fixed_k_gemm_fwd = _operators.fixed_k_gemm_fwd
fixed_k_gemm_bwd = _operators.fixed_k_gemm_bwd

__all__ = [
    "SUPPORTED_FUSION",
    "SUPPORTED_TRAINABILITY",
    "capabilities",
    "fixed_k_gemm_bwd",
    "fixed_k_gemm_fwd",
    "fp32_gemm_rms_bwd",
    "fp32_gemm_rms_fwd",
    "h_aggregate_bwd",
    "h_aggregate_fwd",
    "hc_split_sinkhorn_bwd",
    "hc_split_sinkhorn_fwd",
    "mhc_block_backward",
    "mhc_block_forward",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_bwd",
    "mhc_pre_fwd",
    "mhc_pre_rmsnorm_fused_fwd",
    "rmsnorm_residual_bwd",
    "rmsnorm_residual_fwd",
]
