"""Operator 3: mix the old streams with C and add the sublayer's output with POST."""

from __future__ import annotations

import torch

from rl_engine.mhc.operators.interface import check_arguments
from rl_engine.mhc.operators.reference import Reference, reference_operator
from rl_engine.mhc.reduction import HC_MULT, serial_fold, stream4_sum, widen


class Post(Reference):
    """``mhc_post``, forward and backward."""

    @reference_operator
    def mhc_post_fwd(self, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
        """BF16 ``r_new[T, 4, D]`` of BF16 ``r_old[T, 4, D]``, BF16 ``y[T, D]``, FP32 ``c[T, 4, 4]``, ``post[T, 4]``.

        ``r_new[j] = tree_i(C[i, j] * R[i]) + (POST[j] * y)``, rounded to BF16 once, at the store.
        """
        check_arguments("mhc_post_fwd", r_old=r_old, y=y, c=c, post=post)
        r = widen("r_old", r_old)
        mixed = stream4_sum([c[:, i, :, None] * r[:, i, None, :] for i in range(HC_MULT)])
        return (mixed + post[:, :, None] * widen("y", y)[:, None, :]).to(torch.bfloat16)

    @reference_operator
    def mhc_post_bwd(
        self, dr_new: torch.Tensor, r_old: torch.Tensor, y: torch.Tensor, c: torch.Tensor, post: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(dR_old[T, 4, D], dy[T, D], dC[T, 4, 4], dPOST[T, 4])``, FP32, of ``dr_new[T, 4, D]`` (BF16 or FP32).

        With ``G = dr_new``: ``dR[i] = tree_j(C[i, j] * G[j])``, ``dy = tree_j(POST[j] * G[j])``,
        ``dC[i, j] = fold_d(R[i] * G[j])``, ``dPOST[j] = fold_d(y * G[j])``. The last two share the D axis: one fold of
        five rows (four streams and y) by four.
        """
        sizes = check_arguments("mhc_post_bwd", dr_new=dr_new, r_old=r_old, y=y, c=c, post=post)
        g, r, y32 = widen("dr_new", dr_new), widen("r_old", r_old), widen("y", y)
        d_r = stream4_sum([c[:, :, j, None] * g[:, j, None, :] for j in range(HC_MULT)])
        dy = stream4_sum([post[:, j, None] * g[:, j, :] for j in range(HC_MULT)])
        left = torch.cat((r, y32[:, None, :]), dim=1).permute(2, 0, 1).contiguous()
        right = g.permute(2, 0, 1).contiguous()
        folded = serial_fold(
            lambda lo, hi, some: left[lo:hi, some, :, None] * right[lo:hi, some, None, :],
            sizes["D"],
            (sizes["T"], HC_MULT + 1, HC_MULT),
            g.device,
        )
        return d_r, dy, folded[:, :HC_MULT].clone(), folded[:, HC_MULT].clone()
