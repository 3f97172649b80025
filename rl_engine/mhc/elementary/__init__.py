"""exp, sigmoid, rsqrt, sqrt and division: one recipe for each numeric profile.

Every other multiply and add of the contract is pinned by IEEE 754 alone; these functions are not, so a profile names
the recipe that computes them. ``for_profile`` is the only way in.
"""

from __future__ import annotations

from rl_engine.mhc.elementary.recipe import Elementary
from rl_engine.mhc.elementary.torch_library import TORCH_LIBRARY

ORACLE_PROFILE = "oracle-fp32-mhc-v1"

_RECIPES: dict[str, Elementary] = {ORACLE_PROFILE: TORCH_LIBRARY}


def for_profile(profile_id: str) -> Elementary:
    """The elementary functions of a numeric profile; a ``ValueError`` lists the known ones for any other id."""
    try:
        return _RECIPES[profile_id]
    except KeyError:
        known = ", ".join(sorted(_RECIPES))
        raise ValueError(f"numeric_profile: got {profile_id!r}, want one of: {known}") from None


__all__ = ["ORACLE_PROFILE", "Elementary", "for_profile"]
