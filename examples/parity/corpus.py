"""A synthetic corpus and how its sequences are laid out as batches: packed, padded, or token by token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 64
SUCCESSORS = 4
SHORTEST = 4
PADDING = -1
"""The segment of padding. Padding attends to padding, so no row of a softmax is ever empty."""

Sequences = tuple[tuple[int, ...], ...]


class Corpus:
    """Sequences of a Markov chain over 64 tokens: each is followed by one of four others, all equally likely.

    The least loss that a model can reach is ln 4 = 1.386 a token, that of a guess is ln 64 = 4.159.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"parity.{seed}")
        tokens = range(VOCABULARY)
        self._next = [self._random.sample(tokens, SUCCESSORS) for _ in tokens]

    def draw(self, tokens: int, count: int) -> Sequences:
        """``count`` sequences of uneven lengths, ``tokens`` in all; ``ValueError`` where that is too few for them."""
        if count < 1 or tokens < count * SHORTEST:
            raise ValueError(f"tokens: got {tokens} for {count} sequences, want at least {SHORTEST} for each")
        spare = tokens - count * SHORTEST
        cuts = [0, *sorted(self._random.randint(0, spare) for _ in range(count - 1)), spare]
        lengths = [SHORTEST + stop - start for start, stop in itertools.pairwise(cuts)]
        return tuple(self._sequence(length) for length in lengths)

    def _sequence(self, length: int) -> tuple[int, ...]:
        tokens = [self._random.randrange(VOCABULARY)]
        while len(tokens) < length:
            tokens.append(self._random.choice(self._next[tokens[-1]]))
        return tuple(tokens)


@dataclass(frozen=True)
class Batch:
    """Rows of tokens: ``tokens``, ``segments`` (whose sequence, or ``PADDING``) and ``positions`` in it, int64 [B, L].

    A token sees its own segment up to its own position and nothing else.
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor

    def sees(self, keys: Batch) -> Tensor:
        """Bool ``[B, 1, L, L of keys]``: which of ``keys`` each token attends to."""
        same = self.segments[:, :, None] == keys.segments[:, None, :]
        past = self.positions[:, :, None] >= keys.positions[:, None, :]
        return (same & past).unsqueeze(1)

    def followed_by(self, other: Batch) -> Batch:
        """Both, side by side."""
        pairs = (self.tokens, other.tokens), (self.segments, other.segments), (self.positions, other.positions)
        return Batch(*(torch.cat(pair, dim=1) for pair in pairs))

    def at(self, column: int) -> Batch:
        """One column of it."""
        return Batch(*(t[:, column : column + 1] for t in (self.tokens, self.segments, self.positions)))


def packed(sequences: Sequences) -> Batch:
    """All sequences end to end in one row, as a trainer packs them."""
    parts = [padded(sequences, (number,)) for number in range(len(sequences))]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.followed_by(part)
    return whole


def padded(sequences: Sequences, numbers: Sequence[int], side: str = "right") -> Batch:
    """A row for each of the named sequences, in the order of the names, filled up on one ``side`` to the longest."""
    longest = max(len(sequences[number]) for number in numbers)
    rows = []
    for number in numbers:
        sequence = sequences[number]
        fill = longest - len(sequence)
        own = list(sequence), [number] * len(sequence), list(range(len(sequence)))
        padding = [0] * fill, [PADDING] * fill, list(range(fill))
        rows.append([p + o if side == "left" else o + p for o, p in zip(own, padding, strict=True)])
    return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))
