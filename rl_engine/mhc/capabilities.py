"""The gate: what an operator set declares, against what a contract and a batch ask for. Fail-closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_engine.mhc.contract import P1_RMS, LayerContract, ResidualBatch

NAME_LISTS = ("geometry", "devices", "fusion_modes", "trainability", "placements")
CAPABILITY_KEYS = ("backend", *NAME_LISTS)
_IMPLIED = {"controller_rms": [P1_RMS]}
"""What a declaration without the key says: providers older than the key know no other formula."""


def require_capabilities(ops: Any, contract: LayerContract, batch: ResidualBatch | None = None) -> None:
    """Raise ``NotImplementedError`` ("fail-closed") unless ``ops`` declares all that is asked for. Runs no operator.

    Asked for are the contract's numeric profile, fusion mode, trainability and placement, and for ``batch`` its
    device's type and its row geometry. ``ops.capabilities()`` must be a mapping with every key of
    ``CAPABILITY_KEYS``: ``backend`` a name, the rest non-empty lists of names. An optional ``hidden`` lists the
    widths served; without it every width is. An optional ``controller_rms`` lists the formulas of the controller's
    scale; without it P1's alone is served. What is missing or malformed declares nothing.
    """
    who = str(getattr(ops, "name", type(ops).__name__))
    profile = getattr(ops, "numeric_profile", None)
    if profile != contract.numeric_profile:
        raise _refusal(who, "numeric_profile", contract.numeric_profile, repr(profile))
    declare = getattr(ops, "capabilities", None)
    declared = _well_formed(declare() if callable(declare) else None, who)
    asked = {
        "fusion_modes": contract.fusion_mode,
        "trainability": contract.trainability,
        "placements": contract.placement,
        "controller_rms": contract.controller_rms,
    }
    if batch is not None:
        asked |= {"devices": batch.r_old.device.type, "geometry": batch.row_geometry}
    for key, wanted in asked.items():
        names = declared_names(declared, key)
        if wanted not in names:
            raise _refusal(who, key, wanted, f"a declaration of {', '.join(sorted(names))}")
    widths = declared.get("hidden")
    if widths is not None and contract.hidden not in widths:
        raise _refusal(who, "hidden", contract.hidden, f"a declaration of {sorted(widths)}")


def declared_names(capabilities: Any, key: str) -> frozenset[str]:
    """The names that ``capabilities[key]`` lists; none where it is missing or not a collection of strings.

    A missing ``controller_rms`` is P1's formula.
    """
    value = capabilities.get(key, _IMPLIED.get(key)) if isinstance(capabilities, Mapping) else None
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
        return frozenset()
    return frozenset(value)


def _well_formed(declared: object, who: str) -> Mapping[str, Any]:
    if not isinstance(declared, Mapping):
        raise NotImplementedError(f"{who}: capabilities: got {type(declared).__name__}, want a mapping (fail-closed)")
    backend = declared.get("backend")
    if not isinstance(backend, str) or not backend:
        raise NotImplementedError(f"{who}: capabilities['backend']: got {backend!r}, want a name (fail-closed)")
    for key in NAME_LISTS:
        if not declared_names(declared, key):
            got = repr(declared[key]) if key in declared else "nothing"
            raise NotImplementedError(f"{who}: capabilities[{key!r}]: got {got}, want a list of names (fail-closed)")
    widths = declared.get("hidden")
    sound = isinstance(widths, list | tuple | set | frozenset | range) and all(type(w) is int for w in widths)
    if widths is not None and not sound:
        raise NotImplementedError(f"{who}: capabilities['hidden']: got {widths!r}, want a list of widths (fail-closed)")
    return declared


def _refusal(who: str, key: str, wanted: object, got: str) -> NotImplementedError:
    return NotImplementedError(f"{who}: {key}: want {wanted!r}, got {got} (fail-closed)")
