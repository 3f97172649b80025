"""The operators as operations of ``torch.library``, namespace ``rl_mhc``: autograd, ``torch.compile``, any backend.

Importing registers them. Each function takes tensors of any stride on one device and asks ``registry`` for the provider
of that device and the numeric profile; outputs and gradients are contiguous and have memory of their own. The bytes are
the contract's, forward and backward, eager and compiled; autocast and the default dtype change nothing. A gradient has
the dtype of its input, rounded once. Second derivatives are a ``RuntimeError``.
"""

from __future__ import annotations

from rl_engine.mhc.ops.aggregate import h_aggregate
from rl_engine.mhc.ops.block import mhc_block
from rl_engine.mhc.ops.expand import expand_streams
from rl_engine.mhc.ops.fixed_gemm import fixed_k_gemm
from rl_engine.mhc.ops.gemm_rms import fp32_gemm_rms
from rl_engine.mhc.ops.head import mhc_head
from rl_engine.mhc.ops.post import mhc_post, mhc_post_linked
from rl_engine.mhc.ops.pre_rmsnorm import mhc_pre_rmsnorm
from rl_engine.mhc.ops.registry import backend_for, register_backend, registered_backends, using_backend
from rl_engine.mhc.ops.rmsnorm import rmsnorm_residual
from rl_engine.mhc.ops.sinkhorn import hc_split_sinkhorn

__all__ = [
    "backend_for",
    "expand_streams",
    "fixed_k_gemm",
    "fp32_gemm_rms",
    "h_aggregate",
    "hc_split_sinkhorn",
    "mhc_block",
    "mhc_head",
    "mhc_post",
    "mhc_post_linked",
    "mhc_pre_rmsnorm",
    "register_backend",
    "registered_backends",
    "rmsnorm_residual",
    "using_backend",
]
