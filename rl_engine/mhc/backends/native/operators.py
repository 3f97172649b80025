"""The leaf operators on the native kernels: check the arguments, allocate the outputs, call.

Shapes, dtypes, equations and rounding points are those of the reference operators, whose names these are. What
``saved`` holds is less: the 39 Sinkhorn matrices and FP32 copies of BF16 inputs are computed again in the backward.
"""

from __future__ import annotations

import torch

from rl_engine.mhc.backends.native.call import (
    ONE_THREAD_BELOW,
    PORTABLE,
    Native,
    as_rows,
    dense,
    native,
    new_bf16,
    new_fp32,
    row_contiguous,
)
from rl_engine.mhc.backends.native.library import Rows
from rl_engine.mhc.checks import check_tensor
from rl_engine.mhc.contract import (
    HC_MULT,
    MHC_EPS,
    ORACLE_PROFILE,
    P1_RMS,
    PORTABLE_PROFILE,
    PROD_CONTROLLER_N,
    RELEASED_RMS,
    LayerContract,
)
from rl_engine.mhc.elementary import Elementary, for_profile
from rl_engine.mhc.operators.interface import (
    Saved,
    check_arguments,
    check_contract,
    check_controller_rms,
    saved_controller_rms,
)
from rl_engine.mhc.operators.reference import need

_GATES = 2 * HC_MULT
_AT_ONCE = 96
"""Elements of one call of ``torch.exp`` or ``torch.sqrt``. From 100 on their vector library spreads them over OpenMP
threads, which a forked child does not have and waits for, and whose floating-point mode is not the caller's."""

_TOKENS_AT_ONCE = 512
"""Tokens of one call of the others, few enough for the calling thread, and for all that a recipe does besides."""

_BF16 = torch.bfloat16


class NativeOperators:
    """The twelve leaf operators of one numeric profile."""

    def __init__(self, numeric_profile: str) -> None:
        """Operators of ``oracle-fp32-mhc-v1`` or ``portable-fp32-mhc-v1``; ``ValueError`` for any other profile.

        ``NativeBackendUnavailable`` where the compiled library is not there.
        """
        known = (ORACLE_PROFILE, PORTABLE_PROFILE)
        if numeric_profile not in known:
            raise ValueError(f"native: numeric_profile: got {numeric_profile!r}, want one of: {', '.join(known)}")
        self.numeric_profile = numeric_profile
        self.portable = numeric_profile == PORTABLE_PROFILE
        self._elementary: Elementary = PORTABLE if self.portable else for_profile(numeric_profile)
        self._native: Native = native()
        self.isa = self._native.isa_name
        self.run = self._native.run
        self.default_float_mode = self._native.default_float_mode

    def hc_split_sinkhorn_fwd(
        self, h: torch.Tensor, contract: LayerContract | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Saved]:
        """``(pre[T, 4], post[T, 4], c[T, 4, 4], saved)`` of FP32 ``h[T, 24]``.

        saved: ``sig_pre, sig_post, softmax, eps``; the backward recomputes the 39 steps from ``softmax``.
        """
        check_contract("hc_split_sinkhorn_fwd", contract, self.numeric_profile)
        tokens = check_arguments("hc_split_sinkhorn_fwd", h=h)["T"]
        h = dense(h.detach())
        sig, exps = new_fp32(tokens, _GATES), new_fp32(tokens, HC_MULT * HC_MULT)
        self.run("mhc_split_shift", tokens, h.data_ptr(), exps.data_ptr())
        with self.default_float_mode():
            self.split_gates(h, sig, exps)
        pre, post, c = new_fp32(tokens, HC_MULT), new_fp32(tokens, HC_MULT), new_fp32(tokens, HC_MULT, HC_MULT)
        softmax = new_fp32(tokens, HC_MULT, HC_MULT)
        outputs = (pre, post, c, softmax)
        self.run("mhc_split_fwd", tokens, sig.data_ptr(), exps.data_ptr(), *(output.data_ptr() for output in outputs))
        saved = {"sig_pre": sig[:, :HC_MULT], "sig_post": sig[:, HC_MULT:], "softmax": softmax, "eps": MHC_EPS}
        return pre, post, c, saved

    def hc_split_sinkhorn_bwd(
        self, dpre: torch.Tensor, dpost: torch.Tensor, dc: torch.Tensor, saved: Saved
    ) -> torch.Tensor:
        """``dh[T, 24]`` of FP32 ``dpre[T, 4]``, ``dpost[T, 4]``, ``dc[T, 4, 4]``."""
        tokens = check_arguments("hc_split_sinkhorn_bwd", dpre=dpre, dpost=dpost, dc=dc)["T"]
        operator = "hc_split_sinkhorn_bwd"
        sig_pre, sig_post = (kept(operator, saved, name, tokens, HC_MULT) for name in ("sig_pre", "sig_post"))
        softmax = dense(kept(operator, saved, "softmax", tokens, HC_MULT, HC_MULT))
        dpre, dpost, dc = dense(dpre), dense(dpost), dense(dc)
        dh = new_fp32(tokens, PROD_CONTROLLER_N)
        pointers = (dpre.data_ptr(), dpost.data_ptr(), dc.data_ptr())
        sigs = (as_rows(sig_pre), as_rows(sig_post))
        self.run("mhc_split_bwd", tokens, *pointers, *sigs, softmax.data_ptr(), dh.data_ptr())
        return dh

    def fp32_gemm_rms_fwd(
        self, x_flat: torch.Tensor, weight: torch.Tensor, eps: float, controller_rms: str = P1_RMS
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """``(P[T, 24], r[T], saved)`` of ``x_flat[T, K]`` (FP32 or BF16, widened in registers), ``weight[24, K]``."""
        check_controller_rms("fp32_gemm_rms_fwd", controller_rms)
        sizes = check_arguments("fp32_gemm_rms_fwd", x_flat=x_flat, weight=weight)
        tokens, k = sizes["T"], sizes["K"]
        x, w = row_contiguous(x_flat), row_contiguous(weight)
        p, s = new_fp32(tokens, PROD_CONTROLLER_N), new_fp32(tokens)
        out = (p.data_ptr(), s.data_ptr())
        self.run("mhc_fold_k", tokens, PROD_CONTROLLER_N, k, as_rows(x), as_rows(w), *out)
        if controller_rms == RELEASED_RMS:
            mean = new_fp32(tokens)
            self.run("mhc_gemm_rms_mean", tokens, k, float(eps), s.data_ptr(), mean.data_ptr())
            r = self._by_elementary("rsqrt", mean)
            return p, r, {"s": s, "mean": mean, "r": r, "k": k, "controller_rms": controller_rms}
        q, r = new_fp32(tokens), new_fp32(tokens)
        norm = self._by_elementary("sqrt", s)
        scaled = (norm.data_ptr(), q.data_ptr(), r.data_ptr())
        self.run("mhc_gemm_rms_scale", tokens, k, float(eps), *scaled)
        return p, r, {"s": s, "norm": norm, "q": q, "r": r, "k": k}

    def fp32_gemm_rms_bwd(
        self, dp: torch.Tensor, dr: torch.Tensor, x_flat: torch.Tensor, weight: torch.Tensor, saved: Saved
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dX[T, K], dW[24, K])`` of FP32 ``dp[T, 24]``, ``dr[T]``."""
        sizes = check_arguments("fp32_gemm_rms_bwd", dp=dp, dr=dr, x_flat=x_flat, weight=weight)
        tokens, k = sizes["T"], sizes["K"]
        q, r = scale_of("fp32_gemm_rms_bwd", saved, tokens), dense(kept("fp32_gemm_rms_bwd", saved, "r", tokens))
        dp, dr = dense(dp), dense(dr)
        x, w = row_contiguous(x_flat), row_contiguous(weight)
        dx, dw = new_fp32(tokens, k), new_fp32(PROD_CONTROLLER_N, k)
        q_or_null = None if q is None else q.data_ptr()
        rows = (dp.data_ptr(), dr.data_ptr(), as_rows(x), as_rows(w), q_or_null, r.data_ptr())
        self.run("mhc_gemm_rms_bwd", tokens, k, *rows, dx.data_ptr(), dw.data_ptr())
        return dx, dw

    def mhc_post_fwd(self, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
        """BF16 ``r_new[T, 4, D]`` of BF16 ``r_old[T, 4, D]``, ``y[T, D]``, FP32 ``c[T, 4, 4]``, ``post[T, 4]``."""
        sizes = check_arguments("mhc_post_fwd", r_old=r_old, y=y, c=c, post=post)
        r, y, c, post = row_contiguous(r_old), row_contiguous(y), dense(c), dense(post)
        r_new = new_bf16(*r_old.shape)
        inputs = (as_rows(r), as_rows(y), c.data_ptr(), post.data_ptr())
        self.run("mhc_post_fwd", sizes["T"], sizes["D"], *inputs, r_new.data_ptr())
        return r_new

    def mhc_post_bwd(
        self, dr_new: torch.Tensor, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(dR_old[T, 4, D], dy[T, D], dC[T, 4, 4], dPOST[T, 4])``, FP32, of ``dr_new[T, 4, D]`` (BF16 or FP32)."""
        tokens, d = _check_post_bwd(dr_new, r_old, y, c, post)
        dr_old = new_fp32(tokens, HC_MULT, d)
        return dr_old, *self._post_bwd(dr_old, new_fp32(tokens, d), dr_new, r_old, y, c, post)

    def mhc_post_gate_bwd(
        self, dr_new: torch.Tensor, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(dy, dC, dPOST)`` of ``mhc_post_bwd`` alone, ``dy`` rounded to BF16 once."""
        dy = new_bf16(*_check_post_bwd(dr_new, r_old, y, c, post))
        return self._post_bwd(None, dy, dr_new, r_old, y, c, post)

    def _post_bwd(
        self,
        dr_old: torch.Tensor | None,
        dy: torch.Tensor,
        dr_new: torch.Tensor,
        r_old: torch.Tensor,
        y: torch.Tensor,
        c: torch.Tensor,
        post: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, d = dy.shape
        g, r, y, c, post = row_contiguous(dr_new), row_contiguous(r_old), row_contiguous(y), dense(c), dense(post)
        dc, dpost = new_fp32(tokens, HC_MULT, HC_MULT), new_fp32(tokens, HC_MULT)
        inputs = (as_rows(g), as_rows(r), as_rows(y), c.data_ptr(), post.data_ptr())
        out = (None if dr_old is None else dr_old.data_ptr(), dy.data_ptr(), as_rows(dy).dtype)
        self.run("mhc_post_bwd", tokens, d, *inputs, *out, dc.data_ptr(), dpost.data_ptr())
        return dy, dc, dpost

    def h_aggregate_fwd(self, pre: torch.Tensor, r_old: torch.Tensor) -> torch.Tensor:
        """BF16 ``hidden[T, D]`` of FP32 ``pre[T, 4]`` and BF16 ``r_old[T, 4, D]``."""
        sizes = check_arguments("h_aggregate_fwd", pre=pre, r_old=r_old)
        tokens, d = sizes["T"], sizes["D"]
        pre, r = dense(pre), row_contiguous(r_old)
        hidden = new_bf16(tokens, d)
        self.run("mhc_aggregate_fwd", tokens, d, pre.data_ptr(), as_rows(r), hidden.data_ptr())
        return hidden

    def h_aggregate_bwd(
        self, dh: torch.Tensor, pre: torch.Tensor, r_old: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dR[T, 4, D], dPRE[T, 4])``, FP32, of ``dh[T, D]`` (BF16 or FP32)."""
        sizes = check_arguments("h_aggregate_bwd", dh=dh, pre=pre, r_old=r_old)
        tokens, d = sizes["T"], sizes["D"]
        dh, pre, r = row_contiguous(dh), dense(pre), row_contiguous(r_old)
        dr, dpre = new_fp32(tokens, HC_MULT, d), new_fp32(tokens, HC_MULT)
        inputs = (as_rows(dh), pre.data_ptr(), as_rows(r))
        self.run("mhc_aggregate_bwd", tokens, d, *inputs, dr.data_ptr(), dpre.data_ptr())
        return dr, dpre

    def rmsnorm_residual_fwd(
        self, x: torch.Tensor, gamma: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """``(y[T, D], residual[T, D], saved)``, both BF16, of BF16 ``x[T, D]``, ``gamma[D]`` (BF16 or FP32)."""
        sizes = check_arguments("rmsnorm_residual_fwd", x=x, gamma=gamma)
        tokens, d = sizes["T"], sizes["D"]
        x, gamma, mean = row_contiguous(x), dense(gamma), new_fp32(tokens)
        self.run("mhc_rmsnorm_mean", tokens, d, as_rows(x), float(eps), mean.data_ptr())
        r = self._by_elementary("rsqrt", mean)
        y, residual = (new_bf16(tokens, d) for _ in range(2))
        inputs = (as_rows(x), _as_row(gamma), r.data_ptr())
        self.run("mhc_rmsnorm_fwd", tokens, d, *inputs, y.data_ptr(), residual.data_ptr())
        return y, residual, {"r": r, "d": d}

    def rmsnorm_residual_bwd(
        self, dy: torch.Tensor, d_residual: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, saved: Saved
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dX[T, D], dGamma[D])``, FP32, of ``dy[T, D]``, ``d_residual[T, D]`` (BF16 or FP32)."""
        sizes = check_arguments("rmsnorm_residual_bwd", dy=dy, d_residual=d_residual, x=x, gamma=gamma)
        tokens, d = sizes["T"], sizes["D"]
        r = dense(kept("rmsnorm_residual_bwd", saved, "r", tokens))
        dy, skip, x = row_contiguous(dy), row_contiguous(d_residual), row_contiguous(x)
        gamma = dense(gamma)
        dx, dgamma = new_fp32(tokens, d), new_fp32(d)
        inputs = (as_rows(dy), as_rows(skip), as_rows(x), _as_row(gamma), r.data_ptr())
        self.run("mhc_rmsnorm_bwd", tokens, d, *inputs, dx.data_ptr(), dgamma.data_ptr())
        return dx, dgamma

    def fixed_k_gemm_fwd(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """FP32 ``[M, N]``: ``out[m, n] = fold_k x[m, k] * w[n, k]`` of ``x[M, K]``, ``w[N, K]`` (FP32 or BF16)."""
        sizes = check_arguments("fixed_k_gemm_fwd", x=x, w=w)
        m, n, k = sizes["M"], sizes["N"], sizes["K"]
        x, w, out = row_contiguous(x), row_contiguous(w), new_fp32(m, n)
        self.run("mhc_fold_k", m, n, k, as_rows(x), as_rows(w), out.data_ptr(), None)
        return out

    def fixed_k_gemm_bwd(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dX[M, K], dW[N, K])``, FP32, of ``dy[M, N]`` (FP32 or BF16): dX folds over n, dW over m."""
        sizes = check_arguments("fixed_k_gemm_bwd", dy=dy, x=x, w=w)
        m, n, k = sizes["M"], sizes["N"], sizes["K"]
        dy, x, w = row_contiguous(dy), row_contiguous(x), row_contiguous(w)
        dx, dw = new_fp32(m, k), new_fp32(n, k)
        self.run("mhc_fold_n", m, n, k, as_rows(dy), as_rows(w), dx.data_ptr())
        self.run("mhc_fold_m", m, n, k, as_rows(dy), as_rows(x), dw.data_ptr())
        return dx, dw

    def fill(self, out: torch.Tensor, function: str, values: torch.Tensor) -> None:
        """``out = function(values)``: exp, sigmoid, rsqrt or sqrt of the profile, of FP32 values with tokens first.

        ``out`` is contiguous. To be called under ``default_float_mode``; in pieces that torch computes on this thread.
        """
        compute = getattr(self._elementary, function)
        if values.numel() >= ONE_THREAD_BELOW:
            parts = torch.split(out, _TOKENS_AT_ONCE), torch.split(values, _TOKENS_AT_ONCE)
            for part, piece in zip(*parts, strict=True):
                self.fill(part, function, piece)
        elif self.portable or values.numel() < _AT_ONCE:
            out.copy_(compute(values))
        elif function in ("exp", "sqrt"):
            pieces = torch.split(values.reshape(-1), _AT_ONCE)
            torch.cat([compute(piece) for piece in pieces], out=out.view(-1))
        else:
            torch.cat([compute(piece) for piece in torch.split(values, _TOKENS_AT_ONCE)], out=out)

    def split_gates(self, h: torch.Tensor, sig: torch.Tensor, exps: torch.Tensor) -> None:
        """``sig = sigmoid(h[:, 0:8])`` and ``exps = exp(exps)`` in place, as ``fill`` does."""
        self.fill(sig, "sigmoid", h[:, :_GATES])
        self.fill(exps, "exp", exps)

    def _by_elementary(self, function: str, values: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(values)
        with self.default_float_mode():
            self.fill(result, function, values)
        return result


def kept(operator: str, saved: Saved, key: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor of a forward's ``saved`` dict under ``key``, row-contiguous; a kernel reads it by its address.

    ``ValueError`` where it is missing or has another shape, ``TypeError`` for another dtype.
    """
    need(operator, saved, key)
    check_tensor(f"{operator}: saved[{key!r}]", saved[key], shape, (dtype,))
    return row_contiguous(saved[key])


def scale_of(operator: str, gemm: Saved, tokens: int) -> torch.Tensor | None:
    """The dense ``q[T]`` of a forward's ``saved``; ``None`` under ``rsqrt-mean-plus-eps``, whose backward has none."""
    if saved_controller_rms(operator, gemm) == RELEASED_RMS:
        return None
    return dense(kept(operator, gemm, "q", tokens))


def _as_row(t: torch.Tensor) -> Rows:
    return Rows(t.data_ptr(), t.numel(), int(t.dtype == _BF16))


def _check_post_bwd(
    dr_new: torch.Tensor, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor
) -> tuple[int, int]:
    sizes = check_arguments("mhc_post_bwd", dr_new=dr_new, r_old=r_old, y=y, c=c, post=post)
    return sizes["T"], sizes["D"]
