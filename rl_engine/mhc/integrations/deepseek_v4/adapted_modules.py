"""The modules that ``adapter.install`` puts in the place of those of transformers. Importing it loads transformers.

Each is a subclass, so that an instance changes into it and back by its ``__class__``: parameters and their names, hooks
and optimizers stay what they are. All that an instance gets is ``_mhc_numeric_profile``. A subclass keeps its base's
name, since plans that say what may be split (``_no_split_modules``, wrapping policies) find a class by that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from rl_engine.mhc.contract import RELEASED_RMS
from rl_engine.mhc.ops import expand_streams, mhc_head, mhc_post_linked, mhc_pre_rmsnorm


class DeepseekV4DecoderLayer(modeling.DeepseekV4DecoderLayer):  # type: ignore[misc]  # transformers is Any to mypy
    """One decoder layer: two blocks of the contract, around ``self_attn`` and around ``mlp``.

    ``attn_hc`` and ``input_layernorm`` hold the parameters of the first block, ``ffn_hc`` and
    ``post_attention_layernorm`` those of the second; none of the four is called.
    """

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """BF16 streams ``[B, S, 4, D]`` of BF16 ``hidden_states[B, S, 4, D]``; ``kwargs`` go to the attention.

        ``TypeError`` for another dtype of the streams or of what a sublayer returns; in layer 0, where a gradient is
        recorded, ``ValueError`` for streams that differ; and the errors of ``ops.mhc_pre_rmsnorm``.
        """
        streams, profile = hidden_states, self._mhc_numeric_profile
        _check_dtype(f"layers.{self.layer_idx}: hidden_states", streams)
        if self.layer_idx == 0 and streams.requires_grad and torch.is_grad_enabled():
            streams = _expanded_again(streams, profile)

        def attention(x: Tensor) -> Tensor:
            y: Tensor = self.self_attn(x, **kwargs)[0]
            _check_dtype(f"layers.{self.layer_idx}.self_attn: output", y)
            return y

        def mlp(x: Tensor) -> Tensor:
            y: Tensor = self.mlp(x, input_ids=input_ids)
            _check_dtype(f"layers.{self.layer_idx}.mlp: output", y)
            return y

        streams = _block(streams, self.attn_hc, self.input_layernorm, attention, profile)
        return _block(streams, self.ffn_hc, self.post_attention_layernorm, mlp, profile)


class DeepseekV4HyperHead(modeling.DeepseekV4HyperHead):  # type: ignore[misc]  # transformers is Any to mypy
    """The merging of the streams at the model's end, with ``ops.mhc_head``."""

    def forward(self, x: Tensor) -> Tensor:
        """BF16 ``[B, S, D]`` of BF16 streams ``x[B, S, 4, D]``; ``TypeError`` for another dtype."""
        _check_dtype("hc_head: x", x)
        hidden = mhc_head(
            x.reshape(-1, *x.shape[-2:]),
            self.hc_fn,
            self.hc_scale,
            self.hc_base,
            controller_rms=RELEASED_RMS,
            numeric_profile=self._mhc_numeric_profile,
        )
        return hidden.view(*x.shape[:-2], x.shape[-1])


def _block(streams: Tensor, hc: Any, norm: Any, sublayer: Callable[[Tensor], Tensor], numeric_profile: str) -> Tensor:
    shape = streams.shape
    r_old = streams.reshape(-1, *shape[-2:])
    # Not slices: their gradients are padded with zeros and added, where -0 would turn into +0.
    pre, post, res = hc.scale.split(1)
    normalized, _, post, c, link = mhc_pre_rmsnorm(
        r_old,
        hc.fn,
        pre,
        post,
        res,
        hc.base,
        norm.weight,
        controller_rms=RELEASED_RMS,
        numeric_profile=numeric_profile,
    )
    y = sublayer(normalized.view(*shape[:-2], shape[-1])).reshape(-1, shape[-1])
    return mhc_post_linked(r_old, y, c, post, link, numeric_profile=numeric_profile).view(shape)


def _expanded_again(streams: Tensor, numeric_profile: str) -> Tensor:
    """The same streams, with the gradient of ``ops.expand_streams``: the tree in FP32, rounded to BF16 once.

    The model expands the embedding with ``Tensor.expand``, whose gradient is a ``sum`` that pins no order. Here that
    sum gets the finished gradient in the first stream and zeros in the others, which can only turn a -0 into +0.
    """
    if not torch.compiler.is_compiling():  # it would break the graph, and a model has nothing else to call this with
        bits = streams.detach().view(torch.int16)
        if not torch.equal(bits, bits[..., :1, :].expand_as(bits)):
            raise ValueError("layers.0: hidden_states: got streams that differ, want the embedding in each of them")
    rows = streams.select(-2, 0).reshape(-1, streams.shape[-1])
    return expand_streams(rows, numeric_profile=numeric_profile).view(streams.shape)


def _check_dtype(field: str, t: Tensor) -> None:
    if t.dtype != torch.bfloat16:
        raise TypeError(f"{field}: got dtype {t.dtype}, want torch.bfloat16")
