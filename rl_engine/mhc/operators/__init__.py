"""The six P1 operators in plain torch, one file each: what the oracle is made of.

They favour being read over being fast: Python loops over a reduced axis, one line of arithmetic for one line of the
contract.
"""

from __future__ import annotations

import functools
import importlib
from typing import cast

from rl_engine.mhc.operators.aggregate import Aggregate
from rl_engine.mhc.operators.fixed_gemm import FixedGemm
from rl_engine.mhc.operators.gemm_rms import GemmRms
from rl_engine.mhc.operators.interface import LEAF_OPERATORS, OperatorSet, Saved
from rl_engine.mhc.operators.post import Post
from rl_engine.mhc.operators.rmsnorm import RmsNorm
from rl_engine.mhc.operators.sinkhorn import SplitSinkhorn
from rl_engine.mhc.profiles import get_profile


class ReferenceOperators(SplitSinkhorn, GemmRms, Post, Aggregate, RmsNorm, FixedGemm):
    """All leaf operators of one numeric profile."""


@functools.cache
def reference_operators(numeric_profile: str) -> ReferenceOperators:
    """The reference operators of a profile; ``ValueError`` where its id is not known.

    A profile of another arithmetic brings its own, under ``NumericProfile.operators``; a profile with a tolerance
    has its base's. ``ValueError`` too where those cannot be loaded.
    """
    spec = get_profile(get_profile(numeric_profile).reference).operators
    if not spec:
        return ReferenceOperators(numeric_profile)
    module, _, name = spec.partition(":")
    try:
        return cast(ReferenceOperators, getattr(importlib.import_module(module), name)(numeric_profile))
    except Exception as error:
        raise ValueError(
            f"operators of {numeric_profile!r}: cannot load {spec!r}: {type(error).__name__}: {error}"
        ) from error


__all__ = ["LEAF_OPERATORS", "OperatorSet", "ReferenceOperators", "Saved", "reference_operators"]
