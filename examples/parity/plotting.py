"""The picture: the importance ratio of every token, and how a difference grows from block to block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.parity.comparing import Comparison, ratios
from examples.parity.scoring import PACKED, Scored

STRICT, PLAIN = "#0b6e4f", "#c8553d"


class NoMatplotlib(ImportError):
    """A plot was asked for where matplotlib is not installed."""


def pyplot() -> Any:
    """``matplotlib.pyplot`` set to draw to files; ``NoMatplotlib`` says what to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise NoMatplotlib("--plot needs matplotlib: python -m pip install matplotlib") from error
    return plt


def draw(found: Mapping[str, Mapping[str, Scored]], comparisons: list[Comparison], path: Path) -> None:
    """Write the plot to ``path``; its suffix names the format. ``found`` is by model, then by scoring."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.0), layout="constrained")
    last = comparisons[-1].scoring
    colours = dict(zip(found, (STRICT, PLAIN), strict=True))
    for model in reversed(list(found)):
        ratio = ratios(found[model][last], found[model][PACKED])
        left.plot(ratio.numpy(), ".", markersize=3.5, color=colours[model], label=model)
    left.set(title="Importance ratio of each token", xlabel="token", ylabel=f"{last} / {PACKED}")
    left.ticklabel_format(axis="y", useOffset=False)
    strict = comparisons[0].model
    markers = dict(zip(dict.fromkeys(c.scoring for c in comparisons), "osv^D", strict=False))
    for c in comparisons:
        blocks, shares = range(1, len(c.moved_by_block) + 1), [100 * share for share in c.moved_by_block]
        label = f"{c.model}: {c.scoring}" if c.model != strict else None
        right.plot(
            blocks, shares, "-" + markers[c.scoring], markersize=4, color=colours[c.model], alpha=0.8, label=label
        )
    right.set(title="Hidden values whose bits differ", xlabel="after block", ylabel="% of the streams")
    right.set_xticks(range(1, len(comparisons[0].moved_by_block) + 1))
    right.set_ylim(bottom=-2)
    right.plot([], [], "-", color=STRICT, label=f"{strict}: all of them")
    right.legend(frameon=False, fontsize=8)
    left.legend(frameon=False, fontsize=8, loc="upper right", markerscale=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)
