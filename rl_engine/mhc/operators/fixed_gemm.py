"""Operator 6: the batch-invariant GEMM reference."""

from __future__ import annotations

import torch

from rl_engine.mhc.operators.interface import check_arguments
from rl_engine.mhc.operators.reference import Reference, reference_operator
from rl_engine.mhc.reduction import fixed_dot


class FixedGemm(Reference):
    """``fixed_k_gemm``, forward and backward."""

    @reference_operator
    def fixed_k_gemm_fwd(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """FP32 ``[M, N]``: ``out[m, n] = fold_k x[m, k] * w[n, k]`` of ``x[M, K]``, ``w[N, K]`` (FP32 or BF16)."""
        check_arguments("fixed_k_gemm_fwd", x=x, w=w)
        return fixed_dot(x, w)

    @reference_operator
    def fixed_k_gemm_bwd(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dX[M, K], dW[N, K])``, FP32, of ``dy[M, N]`` (FP32 or BF16): dX folds over n, dW over m."""
        check_arguments("fixed_k_gemm_bwd", dy=dy, x=x, w=w)
        return fixed_dot(dy, w.t()), fixed_dot(dy.t(), x.t())
