"""Operator 5: RMSNorm of the sublayer's input, with the input kept as the residual."""

from __future__ import annotations

import torch

from rl_engine.mhc.operators.interface import Saved, check_arguments
from rl_engine.mhc.operators.reference import Reference, fp32_scalar, need, reference_operator
from rl_engine.mhc.reduction import fixed_sumsq, serial_fold, widen


class RmsNorm(Reference):
    """``rmsnorm_residual``, forward and backward."""

    @reference_operator
    def rmsnorm_residual_fwd(
        self, x: torch.Tensor, gamma: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """``(y[T, D], residual[T, D], saved)``, both BF16, of BF16 ``x[T, D]`` and ``gamma[D]`` (BF16 or FP32).

        ``r = rsqrt(fold_d(x*x) / D + eps)``, ``y = (x*r) * gamma`` rounded to BF16 once, at the store. ``residual``
        has the bytes of ``x`` and storage of its own. ``rsqrt(mean + eps)`` here and ``1/(sqrt(mean) + eps)`` in
        ``fp32_gemm_rms`` are different functions.
        """
        d = check_arguments("rmsnorm_residual_fwd", x=x, gamma=gamma)["D"]
        x32 = widen("x", x)
        mean = self.elementary.div(fixed_sumsq(x32), fp32_scalar(d, x))
        r = self.elementary.rsqrt(mean + fp32_scalar(eps, x))
        y = ((x32 * r[:, None]) * widen("gamma", gamma)).to(torch.bfloat16)
        return y, x.clone(memory_format=torch.contiguous_format), {"r": r, "x32": x32, "d": d}

    @reference_operator
    def rmsnorm_residual_bwd(
        self, dy: torch.Tensor, d_residual: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, saved: Saved
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dX[T, D], dGamma[D])``, FP32, of ``dy[T, D]``, ``d_residual[T, D]`` (BF16 or FP32).

        ``u = dy*gamma``, ``q = fold_d(u*x)``, ``dX = (r*u) - (((x*((r*r)*r))*q)/D) + d_residual``,
        ``dGamma = fold_t((dy*x)*r)``.
        """
        sizes = check_arguments("rmsnorm_residual_bwd", dy=dy, d_residual=d_residual, x=x, gamma=gamma)
        need("rmsnorm_residual_bwd", saved, "r", tokens=sizes["T"])
        x32, dy32, r = widen("x", x).contiguous(), widen("dy", dy).contiguous(), saved["r"][:, None]
        u = dy32 * widen("gamma", gamma)
        u_by_d, x_by_d = u.t().contiguous(), x32.t().contiguous()
        q = serial_fold(
            lambda lo, hi, some: u_by_d[lo:hi, some] * x_by_d[lo:hi, some], sizes["D"], (sizes["T"],), u.device
        )
        pull = self.elementary.div((x32 * ((r * r) * r)) * q[:, None], fp32_scalar(sizes["D"], u))
        dx = (r * u) - pull + widen("d_residual", d_residual)
        dgamma = serial_fold(
            lambda lo, hi, some: (dy32[lo:hi, some] * x32[lo:hi, some]) * r[lo:hi], sizes["T"], (sizes["D"],), u.device
        )
        return dx, dgamma
