"""A provider's own path through the whole block is judged, and each way in which it could be wrong is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_engine.mhc import block
from rl_engine.mhc.acceptance import Options, judge_provider
from rl_engine.mhc.acceptance.verdict import Check
from rl_engine.mhc.acceptance.whole_block import has_whole_block
from rl_engine.mhc.contract import RELEASED_RMS, GradBoundary, ResidualBatch
from rl_engine.mhc.operators import Saved
from rl_engine.mhc.provider import ReferenceProvider, StubProvider, resolve_provider

CASE = "packed_t7_odd"


class OwnBlock(ReferenceProvider):
    """A whole-block path made of the oracle's results, announced to nobody, and changed where a subclass says so."""

    def mhc_block_forward(self, batch: ResidualBatch) -> tuple[torch.Tensor, Saved]:
        return REAL[0](batch)

    def mhc_block_backward(self, batch: ResidualBatch, saved: Saved, grads: GradBoundary) -> dict[str, Any]:
        return dict(REAL[1](batch, saved, grads))


class WrongForward(OwnBlock):
    def mhc_block_forward(self, batch: ResidualBatch) -> tuple[torch.Tensor, Saved]:
        r_new, saved = super().mhc_block_forward(batch)
        r_new[-1, 3, -1] = -r_new[-1, 3, -1]
        return r_new, saved


class MissingGradient(OwnBlock):
    def mhc_block_backward(self, batch: ResidualBatch, saved: Saved, grads: GradBoundary) -> dict[str, Any]:
        return {**super().mhc_block_backward(batch, saved, grads), "d_bias": None}


class OverwritesItsInput(OwnBlock):
    def mhc_block_forward(self, batch: ResidualBatch) -> tuple[torch.Tensor, Saved]:
        result = super().mhc_block_forward(batch)
        batch.y_sublayer.zero_()
        return result


class Raises(OwnBlock):
    def mhc_block_forward(self, batch: ResidualBatch) -> tuple[torch.Tensor, Saved]:
        raise RuntimeError("no kernel for this shape")


REAL = (block.mhc_block_forward, block.mhc_block_backward)


def whole_block_checks(provider: Any) -> list[Check]:
    verdict = judge_provider(provider, Options(cases=(CASE,)))
    return [check for check in verdict.checks if "whole-block path" in check.name]


@pytest.mark.parametrize(
    ("provider", "boundary"),
    [
        (WrongForward, "post.r_new"),
        (MissingGradient, "grad.d_bias"),
        (OverwritesItsInput, "storage"),
        (Raises, "mhc_block_forward"),
    ],
)
def test_a_defect_of_the_whole_block_path_fails_at_its_boundary(provider: type[OwnBlock], boundary: str) -> None:
    (check,) = whole_block_checks(provider())
    assert check.status == "fail"
    found = [divergence.boundary for divergence in check.divergences if divergence.boundary != "provenance"]
    assert found
    if provider is not Raises:
        assert found[0] == boundary
    else:
        assert "no kernel for this shape" in check.detail


def test_the_reference_inside_the_whole_block_path_is_a_fallback() -> None:
    (check,) = whole_block_checks(OwnBlock())
    assert check.status == "fail"
    assert "the reference ran inside" in check.detail


def test_the_native_whole_block_path_is_judged_and_passes() -> None:
    checks = whole_block_checks(resolve_provider("native"))
    assert [(check.status, check.comparisons) for check in checks] == [("pass", 25)] * 2
    assert [RELEASED_RMS in check.name for check in checks] == [False, True]


def test_a_provider_without_the_path_or_with_a_stub_of_it_is_not_asked() -> None:
    assert not has_whole_block(ReferenceProvider())
    assert not has_whole_block(StubProvider())
