"""The same sequences scored in every way a trainer and a rollout engine have."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.parity.corpus import Batch, Sequences, packed, padded
from examples.parity.model import Cache, LanguageModel, Output, Weight
from examples.parity.training import Progress

PACKED = "packed"
"""The name of the scoring that the others are compared with: one training batch, under autograd."""

Piece = tuple[Batch, Output]


@dataclass(frozen=True)
class Scored:
    """What one scoring found, in the order of the sequences and of the tokens in them, however they came.

    ``chosen`` FP32 ``[N - sequences]``: the log-probability of each next token. ``log_probs`` FP32 ``[N, V]``: of every
    word. ``streams`` BF16 ``[blocks, N, 4, D]``: the hidden values after each block.
    """

    chosen: Tensor
    log_probs: Tensor
    streams: Tensor


def scorings(model: LanguageModel, sequences: Sequences, seed: int, progress: Progress) -> dict[str, Scored]:
    """Every scoring by name, ``PACKED`` first."""
    count = len(sequences)
    ordered, shuffled = list(range(count)), list(range(count))
    random.Random(f"parity.order.{seed}").shuffle(shuffled)
    some = max(1, min(3, count - 1))
    ways = {
        "one sequence a batch": (ordered, 1, "right"),
        f"{some} a batch, shuffled, padded": (shuffled, some, "right"),
        f"{count} a batch, reversed, left-padded": (ordered[::-1], count, "left"),
    }
    progress(f"{model.arithmetic.name}: {PACKED}")
    batch = packed(sequences)
    found = {PACKED: gathered([(batch, model(batch))], sequences)}
    rollout = in_bf16(model)
    with torch.no_grad():
        for name, (order, size, side) in ways.items():
            progress(f"{model.arithmetic.name}: {name}")
            found[name] = gathered(in_batches(rollout, sequences, order, size, side), sequences)
        found["token by token, KV cache"] = gathered(token_by_token(rollout, sequences, progress), sequences)
    return found


def in_bf16(model: LanguageModel) -> LanguageModel:
    """A copy with BF16 matrices, as a rollout engine holds them; controllers and norms stay FP32."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, Weight):
            module.to(torch.bfloat16)
    return copied


def in_batches(
    model: LanguageModel, sequences: Sequences, order: Sequence[int], size: int, side: str
) -> Iterator[Piece]:
    """``size`` sequences at a time in this order, padded on one ``side``."""
    for first in range(0, len(order), size):
        batch = padded(sequences, order[first : first + size], side)
        yield batch, model(batch)


def token_by_token(model: LanguageModel, sequences: Sequences, progress: Progress) -> Iterator[Piece]:
    """One sequence after the other, each one token at a time, as a rollout decodes."""
    for number in range(len(sequences)):
        progress(f"{model.arithmetic.name}: token by token, sequence {number + 1} of {len(sequences)}")
        whole, cache = padded(sequences, (number,)), Cache()
        for column in range(whole.tokens.shape[1]):
            batch = whole.at(column)
            yield batch, model(batch, cache)


def gathered(pieces: Iterable[Piece], sequences: Sequences) -> Scored:
    """What the pieces say, each token at its place; ``ValueError`` unless each comes exactly once."""
    places = {(number, at): None for number, sequence in enumerate(sequences) for at in range(len(sequence))}
    index = {place: row for row, place in enumerate(places)}
    order, log_probs, streams = [], [], []
    for batch, output in pieces:
        real = batch.segments >= 0
        named = zip(batch.segments[real].tolist(), batch.positions[real].tolist(), strict=True)
        order += [index[place] for place in named]
        log_probs.append(output.log_probs.detach()[real])
        streams.append(torch.stack([t[real] for t in output.streams]))
    if sorted(order) != list(range(len(index))):
        raise ValueError(f"pieces: got {len(order)} tokens, want each of {len(index)} once")
    back = torch.tensor(order).argsort()
    rows = torch.cat(log_probs)[back]
    asked = torch.tensor([index[number, at] for number, at in places if (number, at + 1) in index])
    wanted = torch.tensor([token for sequence in sequences for token in sequence[1:]])
    return Scored(rows[asked, wanted], rows, torch.cat(streams, dim=1)[:, back])
