"""A small causal language model with mHC blocks, written once and run in two arithmetics.

What a model computes is here; how a product, a softmax or a block boundary rounds is in ``strict.py`` and ``plain.py``.
Both have the same parameters under the same names. Activations are BF16, the controllers FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from examples.parity.corpus import VOCABULARY, Batch

HEAD = 32
"""The width of an attention head."""

ROPE_BASE = 10000.0

LONGEST = 4096
"""Positions of the rotary table."""


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute the model. Shapes: B rows, L tokens, H heads, V words; BF16 where nothing else is said.

    ``linear(x[..., K], w[N, K])`` is ``[..., N]``; ``attend(q, k, v, sees)`` is ``[B, H, Lq, 32]`` of ``q[B, H, Lq,
    32]``, ``k`` and ``v`` ``[B, H, Lk, 32]`` and bool ``sees[B, 1, Lq, Lk]``; ``gated(gate, up)`` is ``silu(gate) *
    up``; ``log_probs(x[..., D], w[V, D])`` is FP32 ``[..., V]``; ``expand`` makes four streams ``[..., 4, D]`` of an
    embedding and ``collapse`` their mean; ``block(sublayer, hidden)`` and ``norm(hidden)`` make modules.
    """

    name: str
    linear: Callable[[Tensor, Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    gated: Callable[[Tensor, Tensor], Tensor]
    log_probs: Callable[[Tensor, Tensor], Tensor]
    expand: Callable[[Tensor], Tensor]
    collapse: Callable[[Tensor], Tensor]
    block: Callable[[nn.Module, int], nn.Module]
    norm: Callable[[int], nn.Module]


@dataclass
class Cache:
    """What token-by-token decoding keeps: the tokens so far, and their keys and values ``[B, H, L, 32]`` by layer."""

    seen: Batch | None = None
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones last."""
        if layer in self.layers:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        return k, v


@dataclass(frozen=True)
class Output:
    """FP32 ``log_probs[B, L, V]`` of the next token, and the BF16 streams ``[B, L, 4, D]`` after every block."""

    log_probs: Tensor
    streams: tuple[Tensor, ...]


class Weight(nn.Module):
    """An FP32 matrix ``[N, K]`` that is read as BF16; its gradient is FP32."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * columns**-0.5)

    def forward(self) -> Tensor:
        """BF16 ``[N, K]``."""
        return self.weight.to(torch.bfloat16)


class Attention(nn.Module):
    """Causal attention with rotary positions: BF16 ``[B, L, D]`` to the same."""

    def __init__(self, arithmetic: Arithmetic, hidden: int, layer: int) -> None:
        super().__init__()
        self.arithmetic, self.layer = arithmetic, layer
        self.inward, self.outward = Weight(3 * hidden, hidden), Weight(hidden, hidden)

    def forward(self, x: Tensor, batch: Batch, keys: Batch, cache: Cache | None) -> Tensor:
        """``batch`` asks; ``keys`` are its own tokens, after those of the cache where there is one."""
        rows, length, hidden = x.shape
        joint = self.arithmetic.linear(x, self.inward()).view(rows, length, 3, hidden // HEAD, HEAD)
        q, k, v = joint.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotated(q, batch.positions), rotated(k, batch.positions)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        mixed = self.arithmetic.attend(q, k, v, batch.sees(keys))
        return self.arithmetic.linear(mixed.transpose(1, 2).reshape(x.shape), self.outward())


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``: BF16 ``[B, L, D]`` to the same, 2·D wide inside."""

    def __init__(self, arithmetic: Arithmetic, hidden: int) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.inward, self.outward = Weight(4 * hidden, hidden), Weight(hidden, 2 * hidden)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Each token by itself."""
        gate, up = self.arithmetic.linear(x, self.inward()).chunk(2, dim=-1)
        return self.arithmetic.linear(self.arithmetic.gated(gate, up), self.outward())


class LanguageModel(nn.Module):
    """Embedding, four streams, ``2 * layers`` mHC blocks, their mean, RMSNorm, and log-probabilities over V words."""

    def __init__(self, arithmetic: Arithmetic, hidden: int, layers: int) -> None:
        super().__init__()
        if hidden < HEAD or hidden % HEAD:
            raise ValueError(f"hidden: got {hidden}, want a positive multiple of {HEAD}")
        self.arithmetic = arithmetic
        self.embedding, self.head = Weight(VOCABULARY, hidden), Weight(VOCABULARY, hidden)
        sublayers: list[nn.Module] = []
        for layer in range(layers):
            sublayers += [Attention(arithmetic, hidden, layer), FeedForward(arithmetic, hidden)]
        self.blocks = nn.ModuleList(arithmetic.block(sublayer, hidden) for sublayer in sublayers)
        self.norm = arithmetic.norm(hidden)

    def forward(self, batch: Batch, cache: Cache | None = None) -> Output:
        """Log-probabilities and streams of ``batch``, which continues the cache where there is one."""
        keys = batch
        if cache is not None:
            keys = cache.seen = batch if cache.seen is None else cache.seen.followed_by(batch)
        streams, trace = self.arithmetic.expand(nn.functional.embedding(batch.tokens, self.embedding())), []
        for block in self.blocks:
            streams = block(streams, batch, keys, cache)
            trace.append(streams.detach())
        hidden = self.norm(self.arithmetic.collapse(streams))
        return Output(self.arithmetic.log_probs(hidden, self.head()), tuple(trace))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of BF16 ``x[B, H, L, 32]`` at ``positions[B, L]``: FP32 products, one rounding to BF16.

    Strict as it stands in both arithmetics: a few elementwise operations, each of which IEEE 754 pins. The sines come
    from one table for all positions, made once, in FP64: a value does not depend on who asks for it.
    """
    cosine, sine = (table[positions].unsqueeze(1) for table in _TABLES)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1).to(x.dtype)


def _tables() -> tuple[Tensor, Tensor]:
    rates = ROPE_BASE ** -(torch.arange(HEAD // 2, dtype=torch.float64) / (HEAD // 2))
    angles = torch.arange(LONGEST, dtype=torch.float64)[:, None] * rates
    return angles.cos().float(), angles.sin().float()


_TABLES = _tables()
