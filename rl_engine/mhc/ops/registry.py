"""Which provider computes an operation: one explicit table, by the type of the tensors' device and the profile.

What is not in the table is refused. Nothing falls back to another device, profile or provider.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rl_engine.mhc.capabilities import declared_names
from rl_engine.mhc.contract import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.provider import MHCProvider, resolve_provider

Key = tuple[str, str]
"""A device type such as ``cpu``, and the id of a numeric profile."""

_specs: dict[Key, str] = {("cpu", ORACLE_PROFILE): "native", ("cpu", PORTABLE_PROFILE): "native"}
_providers: dict[Key, MHCProvider] = {}
_lock = threading.RLock()


def register_backend(device_type: str, numeric_profile: str, spec: str) -> None:
    """From now on ``spec`` computes what lies on ``device_type`` under ``numeric_profile``, in the whole process.

    ``spec`` is an alias or ``module.path:ClassName``, as ``provider.resolve_provider`` takes it; it is loaded at the
    first use. It replaces what was registered. ``TypeError`` for anything but three strings, ``ValueError`` for an
    empty one.
    """
    for name, value in (("device_type", device_type), ("numeric_profile", numeric_profile), ("spec", spec)):
        if not isinstance(value, str):
            raise TypeError(f"register_backend: {name}: got {type(value).__name__}, want a string")
        if not value:
            raise ValueError(f"register_backend: {name}: got '', want a name")
    with _lock:
        _specs[device_type, numeric_profile] = spec
        _providers.pop((device_type, numeric_profile), None)


def registered_backends() -> dict[Key, str]:
    """A copy of the table: ``(device_type, numeric_profile)`` to the registered spec."""
    with _lock:
        return dict(_specs)


def backend_for(device_type: str, numeric_profile: str) -> MHCProvider:
    """The provider that is registered for a device type and a profile, the same object at every call.

    ``NotImplementedError`` ("fail-closed") where none is, and where the registered one serves another profile or does
    not declare the device; ``ValueError`` where it cannot be loaded.
    """
    found = _providers.get((device_type, numeric_profile))
    return _loaded(device_type, numeric_profile) if found is None else found


@contextmanager
def using_backend(device_type: str, numeric_profile: str, spec: str) -> Iterator[MHCProvider]:
    """Within the block ``spec`` is registered, in the whole process; after it, what was registered before."""
    key = device_type, numeric_profile
    before = registered_backends().get(key)
    register_backend(device_type, numeric_profile, spec)
    try:
        yield backend_for(device_type, numeric_profile)
    finally:
        with _lock:
            _specs.pop(key)
            _providers.pop(key, None)
            if before is not None:
                _specs[key] = before


def _loaded(device_type: str, numeric_profile: str) -> MHCProvider:
    with _lock:
        key = device_type, numeric_profile
        if key not in _specs:
            known = ", ".join(f"({device}, {profile}): {spec}" for (device, profile), spec in sorted(_specs.items()))
            raise NotImplementedError(
                f"ops: no backend for device {device_type!r} under {numeric_profile!r} (fail-closed); registered: "
                f"{known or 'none'}"
            )
        provider = resolve_provider(_specs[key], numeric_profile)
        if provider.numeric_profile != numeric_profile:
            raise NotImplementedError(
                f"ops: {_specs[key]!r}: numeric_profile: got {provider.numeric_profile!r}, want {numeric_profile!r} "
                "(fail-closed)"
            )
        devices = declared_names(provider.capabilities(), "devices")
        if device_type not in devices:
            raise NotImplementedError(
                f"ops: {_specs[key]!r}: device: want {device_type!r}, got a declaration of {sorted(devices)} "
                "(fail-closed)"
            )
        return _providers.setdefault(key, provider)
