"""Numeric profiles: which arithmetic a set of bytes belongs to, and the registry of them.

A profile is named by the contract, moves its fingerprint, and decides what a provider is judged by. Two are built in. A
package adds others by ``register_profile``, or by an entry point of the group ``rl_engine.mhc.profiles`` that is a
``NumericProfile``; entry points are read when an id is asked for that is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE, RECIPES, bind_recipe
from rl_engine.mhc.reduction import LONG_REDUCTION_ORDER, STREAM4_TREE

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP = "rl_engine.mhc.profiles"
EVERY_BOUNDARY = "*"


@dataclass(frozen=True)
class Tolerance:
    """How far a value may be from its reference: ``ulp`` steps of its format, or ``atol + rtol * |reference|``.

    An element passes where either holds. All zero would be strict, and is refused.
    """

    ulp: int = 0
    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.ulp, self.rtol, self.atol)
        if type(self.ulp) is not int or self.ulp >= 1 << 62:
            raise ValueError(f"tolerance: ulp: got {self.ulp!r}, want an integer below 2^62")
        if not all(math.isfinite(n) and n >= 0 for n in numbers) or not any(numbers):
            raise ValueError(f"tolerance: got {self}, want finite numbers of at least 0, not all 0")


@dataclass(frozen=True)
class NumericProfile:
    """One frozen choice of everything that can move a byte.

    ``elementary`` names the recipe for exp, sigmoid, rsqrt, sqrt; ``long_reduction_order`` and ``stream_tree`` the
    two reduction trees; ``fma`` the policy on fused multiply-add; ``downcast_points`` the only places where FP32
    becomes BF16.

    ``tolerance`` is empty for a strict profile, whose bytes must be equal. Otherwise it maps a boundary (or ``*``)
    to what is allowed there, ``base`` names the strict profile whose oracle is the reference, and a verdict says
    that it is not byte equality. A strict profile of another arithmetic names its own reference:
    ``operators="module.path:Class"``, a class of operators constructed with the profile's id.
    """

    id: str
    elementary: str
    long_reduction_order: str = LONG_REDUCTION_ORDER
    stream_tree: str = STREAM4_TREE
    fma: str = "forbidden"
    downcast_points: tuple[str, ...] = ("pre.hidden", "norm.normalized", "post.r_new")
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict, hash=False)
    base: str | None = None
    operators: str = ""

    def __post_init__(self) -> None:
        for boundary, allowed in self.tolerance.items():
            if not isinstance(boundary, str) or not isinstance(allowed, Tolerance):
                raise TypeError(f"profile: tolerance[{boundary!r}]: got {type(allowed).__name__}, want a Tolerance")
        object.__setattr__(self, "tolerance", MappingProxyType(dict(self.tolerance)))

    @property
    def strict(self) -> bool:
        """Whether the bytes must be equal."""
        return not self.tolerance

    @property
    def reference(self) -> str:
        """The id of the profile whose oracle a provider of this one is compared with."""
        return self.id if self.strict or self.base is None else self.base

    def allowed(self, boundary: str) -> Tolerance | None:
        """What a boundary may differ by; ``None`` where its bytes must be equal."""
        return self.tolerance.get(boundary, self.tolerance.get(EVERY_BOUNDARY))


_REGISTRY = {
    ORACLE_PROFILE: NumericProfile(ORACLE_PROFILE, elementary="torch-library"),
    PORTABLE_PROFILE: NumericProfile(PORTABLE_PROFILE, elementary="correctly-rounded"),
}


def register_profile(profile: NumericProfile) -> None:
    """Make a profile known. Registering the same one again is harmless.

    ``ValueError`` where the id is taken by another profile, the recipe is unknown, a tolerance has no strict base,
    or the arithmetic is not the contract's and no ``operators`` are named.
    """
    if not isinstance(profile, NumericProfile):
        raise TypeError(f"profile: got {type(profile).__name__}, want a NumericProfile")
    taken = _REGISTRY.get(profile.id)
    if taken is not None:
        if taken != profile:
            raise ValueError(f"profile: {profile.id!r} is registered already, with other fields")
        return
    if not profile.id or not profile.id.isprintable():
        raise ValueError(f"profile: id: got {profile.id!r}, want a printable name")
    if profile.base is not None and (profile.base not in _REGISTRY or not _REGISTRY[profile.base].strict):
        raise ValueError(f"profile: base: got {profile.base!r}, want a registered strict profile")
    if not profile.strict and profile.base is None:
        raise ValueError(f"profile: {profile.id!r} has a tolerance, want a base to compare with")
    if profile.strict and not profile.operators and _arithmetic(profile) != _arithmetic(_REGISTRY[ORACLE_PROFILE]):
        raise ValueError(f"profile: {profile.id!r} has an arithmetic of its own, want operators that compute it")
    if profile.elementary not in RECIPES:
        raise ValueError(f"profile: elementary: got {profile.elementary!r}, want one of: {', '.join(RECIPES)}")
    bind_recipe(profile.id, profile.elementary)
    _REGISTRY[profile.id] = profile


def known_profiles() -> tuple[str, ...]:
    """The ids of all profiles, registered or offered by an installed package, sorted."""
    return tuple(sorted(_REGISTRY.keys() | {entry.name for entry in _offered()}))


def get_profile(profile_id: str) -> NumericProfile:
    """The profile of that id, from an entry point of that name if need be; else ``ValueError`` lists the known ones."""
    if profile_id not in _REGISTRY:
        for entry in _offered():
            if entry.name == profile_id:
                _register_entry(entry)
    try:
        return _REGISTRY[profile_id]
    except KeyError:
        raise ValueError(f"numeric_profile: got {profile_id!r}, want one of: {', '.join(known_profiles())}") from None


def _register_entry(entry: EntryPoint) -> None:
    try:
        profile = entry.load()
        if getattr(profile, "id", entry.name) != entry.name:
            raise ValueError(f"it is the profile {profile.id!r}")
        register_profile(profile)
    except Exception as error:  # foreign code: whatever it raises, there is no such profile
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"numeric_profile: entry point {entry.name!r} ({entry.value}): {reason}") from error


def _offered() -> EntryPoints:
    from importlib.metadata import entry_points  # read only when an unknown id is asked for

    return entry_points(group=ENTRY_POINT_GROUP)


def _arithmetic(profile: NumericProfile) -> tuple[object, ...]:
    return (profile.long_reduction_order, profile.stream_tree, profile.fma, profile.downcast_points)
