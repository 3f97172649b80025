"""Operator 2: the controller projection and the RMS scale of the flattened residual."""

from __future__ import annotations

import math

import torch

from rl_engine.mhc.contract import P1_RMS, RELEASED_RMS
from rl_engine.mhc.operators.interface import Saved, check_arguments, check_controller_rms, saved_controller_rms
from rl_engine.mhc.operators.reference import Reference, fp32_scalar, need, reference_operator
from rl_engine.mhc.reduction import serial_fold, widen


class GemmRms(Reference):
    """``fp32_gemm_rms``, forward and backward."""

    @reference_operator
    def fp32_gemm_rms_fwd(
        self, x_flat: torch.Tensor, weight: torch.Tensor, eps: float, controller_rms: str = P1_RMS
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """``(P[T, 24], r[T], saved)``, FP32, of ``x_flat[T, K]`` (FP32 or BF16) and FP32 ``weight[24, K]``.

        ``P[t, n] = fold_k x*w`` and ``s = fold_k x*x``, both K ascending; ``norm = sqrt(s)``, ``q = norm / sqrt(K)``,
        ``r = 1 / (q + eps)``. The 25 chains of a token share the K axis and run as one fold. saved: ``s, norm, q, r,
        k``. Under ``rsqrt-mean-plus-eps``: ``mean = s / K + eps``, ``r = rsqrt(mean)``; saved: ``s, mean, r, k,
        controller_rms``.
        """
        check_controller_rms("fp32_gemm_rms_fwd", controller_rms)
        sizes = check_arguments("fp32_gemm_rms_fwd", x_flat=x_flat, weight=weight)
        tokens, k, n = sizes["T"], sizes["K"], weight.shape[0]
        x, w = widen("x_flat", x_flat).t().contiguous(), weight.t().contiguous()

        def terms(lo: int, hi: int, some: slice) -> torch.Tensor:
            row = x[lo:hi, some, None]
            products, squares = row * w[lo:hi, None, :], row * row
            return torch.cat((products, squares), dim=2)

        folded = serial_fold(terms, k, (tokens, n + 1), x.device)
        p, s = folded[:, :n].clone(), folded[:, n].clone()
        if controller_rms == RELEASED_RMS:
            mean = self.elementary.div(s, fp32_scalar(k, s)) + fp32_scalar(eps, s)
            r = self.elementary.rsqrt(mean)
            return p, r, {"s": s, "mean": mean, "r": r, "k": k, "controller_rms": controller_rms}
        norm = self.elementary.sqrt(s)
        q = self.elementary.div(norm, fp32_scalar(math.sqrt(k), s))
        r = self.elementary.div(fp32_scalar(1.0, s), q + fp32_scalar(eps, s))
        return p, r, {"s": s, "norm": norm, "q": q, "r": r, "k": k}

    @reference_operator
    def fp32_gemm_rms_bwd(
        self, dp: torch.Tensor, dr: torch.Tensor, x_flat: torch.Tensor, weight: torch.Tensor, saved: Saved
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dX[T, K], dW[24, K])``, FP32, of FP32 ``dp[T, 24]``, ``dr[T]``.

        ``dX_gemm`` folds over n, ``dW`` over t, ``dX_rms = dr * ((-(r*r) * X) / (K*q))``, ``dX = dX_gemm +
        dX_rms``. A row with ``q == 0`` divides by 1 instead of ``K*q``: an all-zero row gets a zero RMS leg and no
        other row moves. After a forward under ``rsqrt-mean-plus-eps``, ``dX_rms = dr * ((-((r*r)*r) * X) / K)``.
        """
        sizes = check_arguments("fp32_gemm_rms_bwd", dp=dp, dr=dr, x_flat=x_flat, weight=weight)
        released = saved_controller_rms("fp32_gemm_rms_bwd", saved) == RELEASED_RMS
        need("fp32_gemm_rms_bwd", saved, *(("r",) if released else ("r", "q")), tokens=sizes["T"])
        tokens, k, n = sizes["T"], sizes["K"], weight.shape[0]
        x, dp_by_n = widen("x_flat", x_flat).contiguous(), dp.t().contiguous()
        w, dp_by_t = weight.contiguous(), dp.contiguous()
        dx_gemm = serial_fold(
            lambda lo, hi, some: dp_by_n[lo:hi, some, None] * w[lo:hi, None, :], n, (tokens, k), x.device
        )
        dw = serial_fold(lambda lo, hi, some: dp_by_t[lo:hi, some, None] * x[lo:hi, None, :], tokens, (n, k), x.device)
        r = saved["r"]
        if released:
            slope, denominator = -((r * r) * r), fp32_scalar(k, r).expand_as(r)
        else:
            q = saved["q"]
            slope, denominator = -(r * r), torch.where(q == 0, fp32_scalar(1.0, q), fp32_scalar(k, q) * q)
        scaled = self.elementary.div(slope.unsqueeze(1) * x, denominator.unsqueeze(1))
        return dx_gemm + dr.unsqueeze(1) * scaled, dw
