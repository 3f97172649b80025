"""One sublayer's hyper-connection of the DeepSeek-V4 model in HF transformers, with the parameters of a batch.

What is timed is their code: ``DeepseekV4HyperConnection`` (coefficients and collapse), ``DeepseekV4RMSNorm``, and the
two lines of ``DeepseekV4DecoderLayer.forward`` that mix the sublayer's output back, with a given output in place of
attention. Their controller norm is ``rsqrt(mean + eps)`` where the contract has ``1 / (sqrt(mean) + eps)``, and they
mix the streams in BF16; both show in the error that is reported beside the time.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from rl_engine.mhc.contract import ResidualBatch

MODELING = "transformers.models.deepseek_v4.modeling_deepseek_v4"
CONFIGURATION = "transformers.models.deepseek_v4.configuration_deepseek_v4"


def unavailable() -> str:
    """Why the block cannot be had; empty where it can."""
    try:
        importlib.import_module(MODELING)
    except Exception as error:  # an import of foreign code may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]} (the `bench` extra installs it)"
    return ""


class HFBlock(nn.Module):
    """``(r_old[T, 4, D], y[T, D]) -> (r_new, normalized, hidden)``."""

    def __init__(self, batch: ResidualBatch) -> None:
        super().__init__()
        modeling, configuration = importlib.import_module(MODELING), importlib.import_module(CONFIGURATION)
        contract, controller = batch.contract, batch.controller
        config: Any = configuration.DeepseekV4Config(
            hidden_size=contract.hidden,
            hc_mult=contract.hc_mult,
            hc_sinkhorn_iters=contract.sinkhorn_iters,
            hc_eps=contract.mhc_eps,
            rms_norm_eps=contract.rmsnorm_eps,
        )
        self.attn_hc = modeling.DeepseekV4HyperConnection(config).to(dtype=torch.float32)
        self.norm = modeling.DeepseekV4RMSNorm(contract.hidden, eps=contract.rmsnorm_eps).to(dtype=torch.float32)
        with torch.no_grad():
            self.attn_hc.fn.copy_(controller.weight)
            self.attn_hc.base.copy_(controller.bias)
            self.attn_hc.scale.copy_(torch.cat(controller.alphas))
            self.norm.weight.copy_(batch.norm.gamma)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight, the three alphas, bias, gamma."""
        return self.attn_hc.fn, self.attn_hc.scale, self.attn_hc.base, self.norm.weight

    def forward(self, r_old: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As in ``DeepseekV4DecoderLayer.forward``, one sequence; without ``y`` the sublayer is the identity."""
        hidden_states = r_old.unsqueeze(0)
        dtype = hidden_states.dtype
        post, comb, collapsed = self.attn_hc(hidden_states)
        normalized = self.norm(collapsed)
        attn_output = normalized if y is None else y.unsqueeze(0)
        hidden_states = post.to(dtype).unsqueeze(-1) * attn_output.unsqueeze(-2) + torch.matmul(
            comb.to(dtype).transpose(-1, -2), hidden_states
        )
        return hidden_states.squeeze(0), normalized.squeeze(0), collapsed.squeeze(0)
