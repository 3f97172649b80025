"""What differs between two scorings of the same tokens, and the table of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from examples.parity.scoring import PACKED, Scored
from rl_engine.mhc.bits import differing


@dataclass(frozen=True)
class Comparison:
    """One scoring beside the packed one, by the same model.

    ``moved`` of ``tokens`` log-probabilities of a next token have other bytes, the farthest by ``largest``;
    ``words_moved`` counts those of all words. ``kl`` is the mean over the tokens of ``sum p log(p/q) - p + q`` in FP64,
    which has no negative term and is the Kullback-Leibler divergence where p and q sum to 1; p is the packed scoring.
    ``ratio_low`` and ``ratio_high`` are the extremes of the importance ratio ``q/p`` of a next token. ``hidden_moved``
    of ``hidden`` values of the streams have other bytes, ``moved_by_block`` is the share after each block.
    """

    scoring: str
    model: str
    tokens: int
    moved: int
    largest: float
    words_moved: int
    kl: float
    ratio_low: float
    ratio_high: float
    hidden: int
    hidden_moved: int
    moved_by_block: tuple[float, ...]

    @property
    def exact(self) -> bool:
        """Every byte equal, KL 0 and every ratio 1, without rounding; never true of NaN or of nothing."""
        counts = self.moved, self.words_moved, self.hidden_moved
        return self.tokens > 0 and not any(counts) and (self.kl, self.ratio_low, self.ratio_high) == (0.0, 1.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Its fields, and ``exact``."""
        return {**asdict(self), "exact": self.exact}


def ratios(other: Scored, packed: Scored) -> Tensor:
    """FP64 ``[tokens]``: the importance ratio of each next token."""
    return (other.chosen.double() - packed.chosen.double()).exp()


def compared(scoring: str, model: str, other: Scored, packed: Scored) -> Comparison:
    """``other`` beside ``packed``."""
    log_p, log_q, ratio = packed.log_probs.double(), other.log_probs.double(), ratios(other, packed)
    terms = log_p.exp() * (log_p - log_q) - log_p.exp() + log_q.exp()
    moved = differing(other.streams, packed.streams)
    return Comparison(
        scoring=scoring,
        model=model,
        tokens=packed.chosen.numel(),
        moved=int(differing(other.chosen, packed.chosen).sum()),
        largest=float((other.chosen.double() - packed.chosen.double()).abs().max()),
        words_moved=int(differing(other.log_probs, packed.log_probs).sum()),
        kl=float(terms.sum(dim=-1).mean()),
        ratio_low=float(ratio.min()),
        ratio_high=float(ratio.max()),
        hidden=moved.numel(),
        hidden_moved=int(moved.sum()),
        moved_by_block=tuple(moved.flatten(1).double().mean(dim=1).tolist()),
    )


def all_compared(found: Mapping[str, Mapping[str, Scored]]) -> list[Comparison]:
    """Every scoring but the packed one, model beside model; ``found`` is by model, then by scoring."""
    return [
        compared(scoring, model, scored[scoring], scored[PACKED])
        for scoring in next(iter(found.values()))
        if scoring != PACKED
        for model, scored in found.items()
    ]


def table_of(comparisons: list[Comparison]) -> Table:
    """A row for each scoring and model."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("scored as", "by"):
        table.add_column(heading, overflow="fold")
    tokens, hidden = comparisons[0].tokens, comparisons[0].hidden
    counted = [
        f"{what}\nthat differ,\nof {total}" for what, total in (("log-probs", tokens), ("hidden values", hidden))
    ]
    for heading in (counted[0], "largest\ndifference", "KL", "importance\nratio", counted[1]):
        table.add_column(heading, justify="right", overflow="fold")
    last = ""
    for c in comparisons:
        ratio = "1" if c.ratio_low == c.ratio_high == 1.0 else f"{c.ratio_low:.4f} to {c.ratio_high:.4f}"
        figures = str(c.moved), _number(c.largest), _number(c.kl), ratio, str(c.hidden_moved)
        table.add_row(c.scoring if c.scoring != last else "", c.model, *figures)
        last = c.scoring
    return table


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"
