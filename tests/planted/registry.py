"""Every planted defect, from every family, in one place."""

from __future__ import annotations

from tests.planted import (
    backward,
    conduct,
    controller,
    declaration,
    forward,
    identity,
    memory,
    pairs,
    split,
    surroundings,
)
from tests.planted.defect import DEFECTS, REFUSED, Defect

FAMILIES = (controller, split, forward, backward, conduct, memory, surroundings, declaration, identity, pairs)

__all__ = ["DEFECTS", "FAMILIES", "REFUSED", "Defect"]
