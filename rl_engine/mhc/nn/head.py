"""The model's end: four streams merged into the hidden state that the last norm and the output projection take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_engine.mhc.contract import CONTROLLER_RMS, HC_MULT, ORACLE_PROFILE, RELEASED_RMS
from rl_engine.mhc.nn.storage import KeepsDtype
from rl_engine.mhc.ops import mhc_head


class HyperHead(KeepsDtype):
    """``streams[..., 4, D] -> hidden[..., D]``, BF16: the sum of the streams, each times a gate of its own.

    ``weight[4, 4D]``, ``alpha[1]``, ``bias[4]``, FP32 whatever the module is cast to. The equation and the gradients
    are those of ``ops.mhc_head``. DeepSeek-V4 has one, ``hc_head``; Megatron's P1 has none.
    """

    def __init__(
        self,
        hidden: int,
        *,
        controller_rms: str = RELEASED_RMS,
        numeric_profile: str = ORACLE_PROFILE,
        device: torch.device | str | None = None,
    ) -> None:
        """A normal weight of scale ``(4 hidden)^-0.5``, alpha 1, bias 0.

        ``ValueError`` for a width below 1 and for another formula of the scale than the contract's two.
        """
        super().__init__()
        if type(hidden) is not int or hidden < 1:
            raise ValueError(f"hidden: got {hidden!r}, want a positive integer")
        if controller_rms not in CONTROLLER_RMS:
            raise ValueError(f"controller_rms: got {controller_rms!r}, want one of: {', '.join(CONTROLLER_RMS)}")
        self.hidden = hidden
        self.controller_rms = controller_rms
        self.numeric_profile = numeric_profile
        self.weight = nn.Parameter(torch.empty((HC_MULT, HC_MULT * hidden), dtype=torch.float32, device=device))
        self.alpha = nn.Parameter(torch.ones(1, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(HC_MULT, dtype=torch.float32, device=device))
        nn.init.normal_(self.weight, std=(HC_MULT * hidden) ** -0.5)

    def forward(self, streams: Tensor) -> Tensor:
        """BF16 ``hidden[..., D]`` of BF16 ``streams[..., 4, D]``.

        ``ValueError`` for another shape; the other errors are those of ``ops.mhc_head``.
        """
        shape = streams.shape
        if streams.dim() < 2 or shape[-2:] != (HC_MULT, self.hidden):
            raise ValueError(f"streams: got shape {tuple(shape)}, want [..., {HC_MULT}, {self.hidden}]")
        hidden = mhc_head(
            streams.reshape(-1, HC_MULT, self.hidden),
            self.weight,
            self.alpha,
            self.bias,
            controller_rms=self.controller_rms,
            numeric_profile=self.numeric_profile,
        )
        return hidden.view(*shape[:-2], self.hidden)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"hidden={self.hidden}, controller_rms={self.controller_rms!r}, numeric_profile={self.numeric_profile!r}"
