"""Some training steps on the synthetic corpus, through the strict forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from examples.parity.corpus import Batch, Corpus, packed
from examples.parity.model import LanguageModel, Output

LEARNING_RATE = 6e-3

Progress = Callable[[str], None]
"""Called with what is done next, before each step."""


def next_tokens(output: Output, batch: Batch) -> torch.Tensor:
    """FP32 ``[N]``: the log-probability of each token of a packed row that follows another one of its sequence."""
    segments, tokens = batch.segments[0], batch.tokens[0]
    (follows,) = (segments[1:] == segments[:-1]).nonzero(as_tuple=True)
    return output.log_probs[0, follows, tokens[follows + 1]]


def train(model: LanguageModel, corpus: Corpus, steps: int, tokens: int, count: int, progress: Progress) -> list[float]:
    """The loss of each of ``steps`` AdamW steps, each on a new packed batch of ``count`` sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(steps):
        progress(f"training, step {step + 1} of {steps}")
        batch = packed(corpus.draw(tokens, count))
        loss = -next_tokens(model(batch), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
