"""RMSNorm with the contract's bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_engine.mhc.contract import GAMMA_DTYPES, ORACLE_PROFILE
from rl_engine.mhc.nn.storage import KeepsDtype
from rl_engine.mhc.ops import rmsnorm_residual


class RMSNorm(KeepsDtype):
    """``y = (x * rsqrt(mean(x^2) + eps)) * gamma`` of BF16 ``x[..., D]``, FP32 inside, rounded to BF16 once.

    ``weight[D]`` is gamma, BF16 or FP32; the contract has both, their bytes differ, and a cast of the module moves
    neither (``storage.KeepsDtype``). eps is the contract's, 1e-6. Any
    leading shape and stride; T=0 too. Errors of the forward: those of ``ops.rmsnorm_residual``.
    """

    def __init__(
        self,
        hidden: int,
        *,
        numeric_profile: str = ORACLE_PROFILE,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """Gamma of ones. ``ValueError`` for a width below 1, ``TypeError`` for a dtype that is not the contract's."""
        super().__init__()
        if type(hidden) is not int or hidden < 1:
            raise ValueError(f"hidden: got {hidden!r}, want a positive integer")
        if dtype not in GAMMA_DTYPES.values():
            raise TypeError(f"dtype: got {dtype}, want torch.bfloat16 or torch.float32")
        self.hidden = hidden
        self.numeric_profile = numeric_profile
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """BF16 ``[..., D]`` of BF16 ``x[..., D]``."""
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(f"x: got shape {tuple(x.shape)}, want [..., {self.hidden}]")
        y, _ = rmsnorm_residual(x.reshape(-1, self.hidden), self.weight, numeric_profile=self.numeric_profile)
        return y.view(x.shape)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"hidden={self.hidden}, numeric_profile={self.numeric_profile!r}"
