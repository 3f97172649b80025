"""exp, sigmoid, rsqrt, sqrt and division: one recipe for each numeric profile.

Every other multiply and add of the contract is pinned by IEEE 754 alone; these functions are not, so a profile
names the recipe that computes them. ``for_profile`` is the only way in.
"""

from __future__ import annotations

from rl_engine.mhc.elementary.portable import PORTABLE
from rl_engine.mhc.elementary.recipe import Elementary
from rl_engine.mhc.elementary.torch_library import TORCH_LIBRARY

ORACLE_PROFILE = "oracle-fp32-mhc-v1"
PORTABLE_PROFILE = "portable-fp32-mhc-v1"

RECIPES: dict[str, Elementary] = {recipe.name: recipe for recipe in (TORCH_LIBRARY, PORTABLE)}
"""Recipe name to recipe."""

_recipe_of_profile = {ORACLE_PROFILE: TORCH_LIBRARY.name, PORTABLE_PROFILE: PORTABLE.name}


def for_profile(profile_id: str) -> Elementary:
    """The elementary functions of a numeric profile; a ``ValueError`` lists the known ones for any other id."""
    try:
        return RECIPES[_recipe_of_profile[profile_id]]
    except KeyError:
        known = ", ".join(sorted(_recipe_of_profile))
        raise ValueError(f"numeric_profile: got {profile_id!r}, want one of: {known}") from None


def bind_recipe(profile_id: str, recipe: str) -> None:
    """Give a new profile the recipe of that name; ``ValueError`` for an unknown recipe or a profile with another."""
    if recipe not in RECIPES:
        raise ValueError(f"elementary: got {recipe!r}, want one of: {', '.join(RECIPES)}")
    if _recipe_of_profile.setdefault(profile_id, recipe) != recipe:
        raise ValueError(f"elementary: {profile_id!r} has {_recipe_of_profile[profile_id]!r}, got {recipe!r}")


__all__ = ["ORACLE_PROFILE", "PORTABLE_PROFILE", "RECIPES", "Elementary", "bind_recipe", "for_profile"]
