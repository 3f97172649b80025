"""Operator 1: split the controller outputs and project the mixing matrix by Sinkhorn iterations."""

from __future__ import annotations

import torch

from rl_engine.mhc.contract import (
    COMB_SLICE,
    HC_MULT,
    MHC_EPS,
    POST_SLICE,
    PRE_SLICE,
    SINKHORN_ITERS,
    LayerContract,
)
from rl_engine.mhc.operators.interface import Saved, check_arguments, check_contract
from rl_engine.mhc.operators.reference import Reference, fp32_scalar, need, reference_operator
from rl_engine.mhc.reduction import stream4_max, stream4_sum_dim

STEP_KINDS = ("col",) + ("row", "col") * (SINKHORN_ITERS - 1)
"""The 39 normalizations in order: a column, then 19 times (row, column)."""

_AXIS = {"col": -2, "row": -1}
"""The axis of ``M[T, i, j]`` that a normalization sums over: a column sum runs over i, a row sum over j."""


class SplitSinkhorn(Reference):
    """``hc_split_sinkhorn``, forward and backward."""

    @reference_operator
    def hc_split_sinkhorn_fwd(
        self, h: torch.Tensor, contract: LayerContract | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Saved]:
        """``(pre[T, 4], post[T, 4], c[T, 4, 4], saved)`` of FP32 ``h[T, 24]``; everything FP32.

        ``pre = sigmoid(h[0:4]) + eps``, ``post = 2 * sigmoid(h[4:8])``. ``c``: softmax over the last axis of
        ``h[8:24].reshape(4, 4)`` with the maximum subtracted, plus eps, then the 39 normalizations of ``STEP_KINDS``,
        each ``M / (tree-sum + eps)``. ``contract=None`` means the frozen constants; a given one is validated, and must
        name the profile of this operator set (``ValueError``).
        """
        check_contract("hc_split_sinkhorn_fwd", contract, self.numeric_profile)
        tokens = check_arguments("hc_split_sinkhorn_fwd", h=h)["T"]
        eps = fp32_scalar(MHC_EPS, h)
        sig_pre = self.elementary.sigmoid(h[:, PRE_SLICE])
        sig_post = self.elementary.sigmoid(h[:, POST_SLICE])
        logits = h[:, COMB_SLICE].reshape(tokens, HC_MULT, HC_MULT)
        exps = self.elementary.exp(logits - stream4_max(logits, -1).unsqueeze(-1))
        softmax = self.elementary.div(exps, stream4_sum_dim(exps, -1).unsqueeze(-1))
        matrix, steps = softmax + eps, []
        for kind in STEP_KINDS:
            denominator = stream4_sum_dim(matrix, _AXIS[kind]) + eps
            steps.append((kind, matrix, denominator))
            matrix = self.elementary.div(matrix, denominator.unsqueeze(_AXIS[kind]))
        saved = {"sig_pre": sig_pre, "sig_post": sig_post, "softmax": softmax, "steps": steps, "eps": MHC_EPS}
        return sig_pre + eps, fp32_scalar(2.0, h) * sig_post, matrix, saved

    @reference_operator
    def hc_split_sinkhorn_bwd(
        self, dpre: torch.Tensor, dpost: torch.Tensor, dc: torch.Tensor, saved: Saved
    ) -> torch.Tensor:
        """``dh[T, 24]`` of FP32 ``dpre[T, 4]``, ``dpost[T, 4]``, ``dc[T, 4, 4]``; everything FP32.

        Walks the saved steps in reverse. Per step, over the normalized axis: ``g = tree-sum(dN * M_in)``,
        ``dM = dN/den - g/(den*den)``. Then ``dL = S * (dM - tree-sum_row(dM*S))``,
        ``dh_pre = dpre * (s*(1-s))``, ``dh_post = dpost * (2*(s*(1-s)))``.
        """
        tokens = check_arguments("hc_split_sinkhorn_bwd", dpre=dpre, dpost=dpost, dc=dc)["T"]
        need("hc_split_sinkhorn_bwd", saved, "sig_pre", "sig_post", "softmax", "steps", tokens=tokens)
        div, grad = self.elementary.div, dc
        for kind, matrix, denominator in reversed(saved["steps"]):
            axis = _AXIS[kind]
            g = stream4_sum_dim(grad * matrix, axis)
            spread = div(g, denominator * denominator).unsqueeze(axis)
            grad = div(grad, denominator.unsqueeze(axis)) - spread
        softmax = saved["softmax"]
        dlogits = softmax * (grad - stream4_sum_dim(grad * softmax, -1).unsqueeze(-1))
        one, two = fp32_scalar(1.0, dc), fp32_scalar(2.0, dc)
        sig_pre, sig_post = saved["sig_pre"], saved["sig_post"]
        dh = torch.empty((tokens, COMB_SLICE.stop), dtype=torch.float32, device=dc.device)
        dh[:, PRE_SLICE] = dpre * (sig_pre * (one - sig_pre))
        dh[:, POST_SLICE] = dpost * (two * (sig_post * (one - sig_post)))
        dh[:, COMB_SLICE] = dlogits.reshape(tokens, HC_MULT * HC_MULT)
        return dh
