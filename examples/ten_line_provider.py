"""A provider with one operator of its own: try it with ``--provider examples.ten_line_provider:TenLineProvider``."""

import torch

from rl_engine.mhc.provider import ReferenceProvider


class TenLineProvider(ReferenceProvider):
    """The reference with its own aggregation of the four streams."""

    name = "ten-line"

    def h_aggregate_fwd(self, pre: torch.Tensor, r_old: torch.Tensor) -> torch.Tensor:
        """``hidden = tree_i(PRE[i] * R[i])``: FP32 products and sums, one rounding to BF16."""
        a = [pre[:, i, None] * r_old[:, i].float() for i in range(4)]
        return ((a[0] + a[1]) + (a[2] + a[3])).to(torch.bfloat16)
