"""The hyper-connection around a sublayer: mix the streams down, normalize, run the sublayer, mix its output back in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_engine.mhc.contract import CONTROLLER_RMS, HC_MULT, ORACLE_PROFILE, P1_RMS
from rl_engine.mhc.nn.controller import MHCController
from rl_engine.mhc.nn.norm import RMSNorm
from rl_engine.mhc.ops import expand_streams as expand_rows
from rl_engine.mhc.ops import mhc_post_linked, mhc_pre_rmsnorm


class HyperConnection(nn.Module):
    """``streams[..., 4, D] -> streams[..., 4, D]``, BF16: ``mhc_pre``, RMSNorm, ``sublayer``, ``mhc_post``.

    ``sublayer`` takes the normalized BF16 ``[..., D]`` and returns a BF16 tensor of that shape. The bytes are those of
    the contract's block with ``d_residual`` zero. The gradient of the streams is one FP32 sum of both paths through the
    block, rounded to BF16 once, which separate modules under autograd could not give. Where no controller parameter
    requires a gradient the backward runs as ``mixer-frozen``.

    Between forward and backward it keeps the streams, the sublayer's output and 71 FP32 values a token.
    """

    def __init__(
        self,
        sublayer: nn.Module,
        hidden: int,
        *,
        controller_rms: str = P1_RMS,
        numeric_profile: str = ORACLE_PROFILE,
        gamma_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A controller and a norm of width ``hidden`` around ``sublayer``.

        ``controller_rms`` is P1's formula, or ``rsqrt-mean-plus-eps``, which released checkpoints are trained with.
        ``ValueError`` for another one or a width below 1, ``TypeError`` for another dtype of gamma.
        """
        super().__init__()
        if controller_rms not in CONTROLLER_RMS:
            raise ValueError(f"controller_rms: got {controller_rms!r}, want one of: {', '.join(CONTROLLER_RMS)}")
        self.hidden = hidden
        self.controller_rms = controller_rms
        self.numeric_profile = numeric_profile
        self.controller = MHCController(hidden, device=device)
        self.norm = RMSNorm(hidden, numeric_profile=numeric_profile, dtype=gamma_dtype, device=device)
        self.sublayer = sublayer

    def forward(self, streams: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The new streams; ``args`` and ``kwargs`` go to the sublayer.

        Errors: ``ValueError`` for streams that are not ``[..., 4, D]`` and for a sublayer's output of another shape
        than its input, ``TypeError`` for a dtype that is not BF16, and those of ``ops.mhc_pre_rmsnorm``.
        """
        shape = streams.shape
        if streams.dim() < 2 or shape[-2:] != (HC_MULT, self.hidden):
            raise ValueError(f"streams: got shape {tuple(shape)}, want [..., {HC_MULT}, {self.hidden}]")
        rows = streams.dim() == 3
        r_old = streams if rows else streams.reshape(-1, HC_MULT, self.hidden)
        normalized, _, post, c, link = mhc_pre_rmsnorm(
            r_old,
            *self.controller.tensors(),
            self.norm.weight,
            controller_rms=self.controller_rms,
            numeric_profile=self.numeric_profile,
        )
        if not rows:
            normalized = normalized.view(*shape[:-2], self.hidden)
        y = self.sublayer(normalized, *args, **kwargs)
        if not isinstance(y, Tensor) or y.dtype != torch.bfloat16:
            got = f"dtype {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"sublayer's output: got {got}, want a tensor of torch.bfloat16")
        if y.shape != normalized.shape:
            raise ValueError(f"sublayer's output: got shape {tuple(y.shape)}, want {tuple(normalized.shape)}")
        if not rows:
            y = y.reshape(-1, self.hidden)
        r_new = mhc_post_linked(r_old, y, c, post, link, numeric_profile=self.numeric_profile)
        return r_new if rows else r_new.view(shape)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"controller_rms={self.controller_rms!r}, numeric_profile={self.numeric_profile!r}"


def expand_streams(hidden_states: Tensor, *, numeric_profile: str = ORACLE_PROFILE) -> Tensor:
    """BF16 ``[..., 4, D]``: the embedding ``hidden_states[..., D]``, BF16, as each of the four streams.

    The gradient is that of ``ops.expand_streams``: the stream tree in FP32, rounded to BF16 once.
    """
    if hidden_states.dim() == 0:
        raise ValueError("hidden_states: got shape (), want [..., D]")
    shape = hidden_states.shape
    streams = expand_rows(hidden_states.reshape(-1, shape[-1]), numeric_profile=numeric_profile)
    return streams.view(*shape[:-1], HC_MULT, shape[-1])
