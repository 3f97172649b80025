"""Operator 4, its arithmetic part: aggregate the four streams into the sublayer's input with PRE."""

from __future__ import annotations

import torch

from rl_engine.mhc.operators.interface import check_arguments
from rl_engine.mhc.operators.reference import Reference, reference_operator
from rl_engine.mhc.reduction import HC_MULT, serial_fold, stream4_sum, widen


class Aggregate(Reference):
    """``h_aggregate``, forward and backward."""

    @reference_operator
    def h_aggregate_fwd(self, pre: torch.Tensor, r_old: torch.Tensor) -> torch.Tensor:
        """BF16 ``hidden[T, D]`` of FP32 ``pre[T, 4]`` and BF16 ``r_old[T, 4, D]``.

        ``hidden = tree_i(PRE[i] * R[i])``, rounded to BF16 once, at the store.
        """
        check_arguments("h_aggregate_fwd", pre=pre, r_old=r_old)
        r = widen("r_old", r_old)
        return stream4_sum([pre[:, i, None] * r[:, i, :] for i in range(HC_MULT)]).to(torch.bfloat16)

    @reference_operator
    def h_aggregate_bwd(
        self, dh: torch.Tensor, pre: torch.Tensor, r_old: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(dR[T, 4, D], dPRE[T, 4])``, FP32, of ``dh[T, D]`` (BF16 or FP32).

        ``dR[i] = PRE[i] * dH``, ``dPRE[i] = fold_d(dH * R[i])``.
        """
        sizes = check_arguments("h_aggregate_bwd", dh=dh, pre=pre, r_old=r_old)
        grad = widen("dh", dh)
        grad_by_d, r_by_d = grad.t().contiguous(), widen("r_old", r_old).permute(2, 0, 1).contiguous()
        dpre = serial_fold(
            lambda lo, hi, some: grad_by_d[lo:hi, some, None] * r_by_d[lo:hi, some],
            sizes["D"],
            (sizes["T"], HC_MULT),
            grad.device,
        )
        return pre[:, :, None] * grad[:, None, :], dpre
