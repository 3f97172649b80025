"""The controller split and the Sinkhorn projection, as they are written wrongly elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.planted import arithmetic, kernels
from tests.planted.arithmetic import constant, tree4
from tests.planted.defect import Planted, planted
from tests.planted.kernels import EPS, STEPS, kernel, plus_eps

# --- PRE and POST ---


@planted("split.pre")
class NoEpsOnPre(Planted):
    """PRE lacks its eps."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, pre=arithmetic.unrounded)


@planted("split.pre", case="odd_hidden")
class VectorSigmoid(Planted):
    """sigmoid runs on a contiguous copy, where torch's vector body rounds otherwise than its scalar tail (x86-64)."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, sig=lambda x: torch.sigmoid(x.contiguous()))


@planted("split.post", case="odd_hidden")
class SigmoidByExp(Planted):
    """sigmoid is written out as 1 / (1 + exp(-x))."""

    hc_split_sinkhorn_fwd = kernel(
        kernels.hc_split_sinkhorn_fwd, sig=lambda x: constant(1.0, x) / (constant(1.0, x) + torch.exp(-x))
    )


@planted("split.post")
class EpsOnPost(Planted):
    """POST gets an eps that belongs to PRE alone."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, post=lambda s: plus_eps(kernels.twice(s)))


@planted("split.post")
class SinglePost(Planted):
    """POST lacks its factor of 2."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, post=arithmetic.unrounded)


# --- the softmax ---


def _shifted(logits: Tensor) -> Tensor:
    return torch.exp(logits - logits.amax(-1, keepdim=True))


@planted("split.c")
class EpsInSoftmax(Planted):
    """The softmax divides by its sum plus eps, and nothing is added afterwards."""

    hc_split_sinkhorn_fwd = kernel(
        kernels.hc_split_sinkhorn_fwd,
        soft=lambda x: _shifted(x) / plus_eps(tree4(_shifted(x).unbind(-1)))[..., None],
        lift=arithmetic.unrounded,
    )


@planted("hc_split_sinkhorn_fwd.c", "operators", "sinkhorn_extremes")
class UnshiftedSoftmax(Planted):
    """The softmax does not subtract the maximum, and overflows."""

    hc_split_sinkhorn_fwd = kernel(
        kernels.hc_split_sinkhorn_fwd, soft=lambda x: torch.exp(x) / tree4(torch.exp(x).unbind(-1))[..., None]
    )


@planted("split.c")
class ColumnSoftmax(Planted):
    """The softmax runs over the streams that C reads and not over those that it writes."""

    hc_split_sinkhorn_fwd = kernel(
        kernels.hc_split_sinkhorn_fwd, soft=lambda x: kernels.softmax(x.transpose(1, 2)).transpose(1, 2)
    )


@planted("split.c")
class LibrarySoftmax(Planted):
    """torch.softmax and not the pinned tree."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, soft=lambda x: torch.softmax(x, dim=-1))


# --- the iterations ---


@planted("split.c", case="saturated_comb")
class NineteenIterations(Planted):
    """One iteration short, which a matrix that has converged does not show."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, steps=STEPS[:-2])


@planted("split.c", case="saturated_comb", hidden_in="one_row")
class TwentyOneIterations(Planted):
    """One iteration too many, which a matrix that has converged does not show."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, steps=(*STEPS, "row", "col"))


@planted("split.c")
class RowBeforeColumn(Planted):
    """Rows are normalized before columns."""

    hc_split_sinkhorn_fwd = kernel(
        kernels.hc_split_sinkhorn_fwd, steps=tuple({"row": "col", "col": "row"}[kind] for kind in STEPS)
    )


@planted("split.c")
class ClampedDenominator(Planted):
    """The denominator is the sum clamped at eps and not the sum plus eps."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, bound=lambda x: x.clamp(min=EPS))


@planted("split.c")
class OtherEps(Planted):
    """eps is 1e-8 in this backend."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, bound=lambda x: x + constant(1e-8, x))


@planted("split.c")
class DoubleEpsSinkhorn(Planted):
    """eps is typed as a double, so every denominator is FP64 until it is rounded."""

    hc_split_sinkhorn_fwd = kernel(
        kernels.hc_split_sinkhorn_fwd, lift=lambda x: (x.double() + EPS).float(), tree=lambda parts: _double_tree(parts)
    )


@planted("split.c")
class SerialSinkhorn(Planted):
    """Rows and columns are added from the left and not as a tree."""

    hc_split_sinkhorn_fwd = kernel(kernels.hc_split_sinkhorn_fwd, tree=arithmetic.left4)


def _double_tree(parts: tuple[Tensor, ...]) -> Tensor:
    return (tree4([p.double() for p in parts])).float()


# --- backward ---


@planted("grad.d_bias")
class LastStepOnly(Planted):
    """The Sinkhorn backward goes through the last step alone, as at a fixed point."""

    hc_split_sinkhorn_bwd = kernel(kernels.hc_split_sinkhorn_bwd, last=1)


@planted("grad.d_bias", case="one_row")
class SinglePostBackward(Planted):
    """POST's factor of 2 is missing in the backward."""

    hc_split_sinkhorn_bwd = kernel(kernels.hc_split_sinkhorn_bwd, factor=1.0)
