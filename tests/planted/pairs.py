"""Defects inside one pair of the stream tree, or of where the sublayer's term is added: seen by `post_order` alone."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.planted.defect import Planted, planted


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


class Spelled(Planted):
    """The terms of `mhc_post`: coefficients and streams by i, and POST * y."""

    def combine(self, c: list[Tensor], r: list[Tensor], term: Tensor) -> Tensor:
        raise NotImplementedError

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        wide = r_old.float()
        coefficients, streams = [c[:, i, :, None] for i in range(4)], [wide[:, i, None, :] for i in range(4)]
        return self.combine(coefficients, streams, post[:, :, None] * y.float()[:, None, :]).to(torch.bfloat16)


@planted("mhc_post_fwd.r_new", "operators", "post_order")
class FusedFirstPair(Spelled):
    """The first pair of the stream tree is contracted."""

    def combine(self, c: list[Tensor], r: list[Tensor], term: Tensor) -> Tensor:
        return (fused(c[0], r[0], c[1] * r[1]) + (c[2] * r[2] + c[3] * r[3])) + term


@planted("mhc_post_fwd.r_new", "operators", "post_order")
class FusedSecondPair(Spelled):
    """The second pair of the stream tree is contracted."""

    def combine(self, c: list[Tensor], r: list[Tensor], term: Tensor) -> Tensor:
        return ((c[0] * r[0] + c[1] * r[1]) + fused(c[2], r[2], c[3] * r[3])) + term


@planted("mhc_post_fwd.r_new", "operators", "post_order")
class TermFirst(Spelled):
    """The sublayer's term joins the first pair."""

    def combine(self, c: list[Tensor], r: list[Tensor], term: Tensor) -> Tensor:
        return ((c[0] * r[0] + term) + c[1] * r[1]) + (c[2] * r[2] + c[3] * r[3])


@planted("mhc_post_fwd.r_new", "operators", "post_order")
class TermWithSecondPair(Spelled):
    """The sublayer's term joins the second pair."""

    def combine(self, c: list[Tensor], r: list[Tensor], term: Tensor) -> Tensor:
        return (c[0] * r[0] + c[1] * r[1]) + ((c[2] * r[2] + c[3] * r[3]) + term)
