"""The same values in other memory: padded, strided, transposed, offset, expanded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from rl_engine.mhc.contract import ControllerParams, GradBoundary, NormParams, ResidualBatch

Layout = Callable[[torch.Tensor], torch.Tensor]


def padded(t: torch.Tensor) -> torch.Tensor:
    """Rows with a gap behind each, the gap full of NaN (or of the largest integer)."""
    wide = _junk(t, (*t.shape[:-1], t.shape[-1] + 5))
    view = wide[..., : t.shape[-1]]
    return view.copy_(t)


def strided(t: torch.Tensor) -> torch.Tensor:
    """Every other element of a buffer whose odd elements are junk."""
    wide = _junk(t, (*t.shape[:-1], 2 * t.shape[-1]))
    return wide[..., ::2].copy_(t)


def transposed(t: torch.Tensor) -> torch.Tensor:
    """Axes in memory in reverse order."""
    reverse = tuple(reversed(range(t.dim())))
    return t.permute(reverse).contiguous().permute(reverse)


def offset(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, but starting one element into its storage, so that no vector load is aligned."""
    buffer = _junk(t, (t.numel() + 1,))
    return buffer[1:].view(t.shape).copy_(t)


LAYOUTS: dict[str, Layout] = {"padded": padded, "strided": strided, "transposed": transposed, "offset": offset}


def laid_out(
    batch: ResidualBatch, grads: GradBoundary | None, layout: Layout
) -> tuple[ResidualBatch, GradBoundary | None]:
    """The same batch and gradients with every tensor in ``layout``."""
    controller = ControllerParams(
        weight=layout(batch.controller.weight),
        alpha_pre=layout(batch.controller.alpha_pre),
        alpha_post=layout(batch.controller.alpha_post),
        alpha_res=layout(batch.controller.alpha_res),
        bias=layout(batch.controller.bias),
    )
    moved = dataclasses.replace(
        batch,
        r_old=layout(batch.r_old),
        y_sublayer=layout(batch.y_sublayer),
        controller=controller,
        norm=NormParams(layout(batch.norm.gamma)),
    )
    return moved, _map_grads(grads, layout)


def expanded(
    batch: ResidualBatch, grads: GradBoundary | None, tokens: int
) -> tuple[ResidualBatch, GradBoundary | None]:
    """Row 0 repeated ``tokens`` times by a stride of zero."""

    def expand(t: torch.Tensor) -> torch.Tensor:
        return t[:1].expand(tokens, *t.shape[1:])

    ids = torch.arange(tokens, dtype=torch.int64, device=batch.token_id.device)
    moved = dataclasses.replace(
        batch,
        r_old=expand(batch.r_old),
        y_sublayer=expand(batch.y_sublayer),
        token_id=ids,
        row_geometry=geometry(tokens),
    )
    return moved, _map_grads(grads, expand)


def selected(
    batch: ResidualBatch, grads: GradBoundary | None, index: torch.Tensor
) -> tuple[ResidualBatch, GradBoundary | None]:
    """The rows that ``index`` (int64, on the batch's device) names, in that order, contiguous."""
    moved = dataclasses.replace(
        batch,
        r_old=batch.r_old[index],
        y_sublayer=batch.y_sublayer[index],
        token_id=batch.token_id[index],
        row_geometry=geometry(index.numel()),
    )
    return moved, _map_grads(grads, lambda t: t[index])


def cloned(batch: ResidualBatch, grads: GradBoundary | None) -> tuple[ResidualBatch, GradBoundary | None]:
    """A contiguous copy with storage of its own."""

    def clone(t: torch.Tensor) -> torch.Tensor:
        return t.clone(memory_format=torch.contiguous_format)

    return laid_out(batch, grads, clone)


def geometry(tokens: int) -> str:
    """The row geometry of that many tokens."""
    return "one-row" if tokens == 1 else "packed"


def _map_grads(grads: GradBoundary | None, layout: Layout) -> GradBoundary | None:
    if grads is None:
        return None
    return dataclasses.replace(
        grads,
        d_r_new=layout(grads.d_r_new),
        d_normalized=layout(grads.d_normalized),
        d_residual=layout(grads.d_residual),
    )


def _junk(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    fill = float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max
    return torch.full(shape, fill, dtype=like.dtype, device=like.device)
