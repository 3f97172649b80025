"""Numeric profiles: which arithmetic a set of bytes belongs to.

A profile is named by the contract, moves its fingerprint, and decides what a provider is judged by.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_engine.mhc.elementary import ORACLE_PROFILE
from rl_engine.mhc.reduction import LONG_REDUCTION_ORDER, STREAM4_TREE


@dataclass(frozen=True)
class NumericProfile:
    """One frozen choice of everything that can move a byte.

    ``long_reduction_order`` and ``stream_tree`` name the two reduction trees; ``elementary`` the recipe for exp,
    sigmoid, rsqrt, sqrt; ``fma`` the policy on fused multiply-add; ``downcast_points`` the only places where FP32
    becomes BF16.
    """

    id: str
    elementary: str
    long_reduction_order: str = LONG_REDUCTION_ORDER
    stream_tree: str = STREAM4_TREE
    fma: str = "forbidden"
    downcast_points: tuple[str, ...] = ("pre.hidden", "norm.normalized", "post.r_new")


_REGISTRY = {ORACLE_PROFILE: NumericProfile(ORACLE_PROFILE, elementary="torch-library")}


def known_profiles() -> tuple[str, ...]:
    """The ids of all registered profiles, sorted."""
    return tuple(sorted(_REGISTRY))


def get_profile(profile_id: str) -> NumericProfile:
    """The registered profile of that id; a ``ValueError`` lists the known ones for any other."""
    try:
        return _REGISTRY[profile_id]
    except KeyError:
        raise ValueError(f"numeric_profile: got {profile_id!r}, want one of: {', '.join(known_profiles())}") from None
