"""What the reference operators have in common: the profile they run under, and that a run of one can be seen.

A provider that claims an operator and quietly calls the reference instead is the fault that this project exists to
catch. So every reference operator announces itself, and the acceptance command listens while a claimed one runs.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from rl_engine.mhc.elementary import Elementary, for_profile
from rl_engine.mhc.float_mode import require_subnormals
from rl_engine.mhc.profiles import get_profile

P = ParamSpec("P")
R = TypeVar("R")

_listeners: list[Callable[[str], None]] = []
_lock = threading.Lock()


@contextmanager
def reference_calls(listener: Callable[[str], None]) -> Iterator[None]:
    """Within the block, call ``listener(operator)`` whenever a reference operator starts, on any thread."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def reference_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a method as a reference operator: announced, without autograd, refused where subnormals are flushed."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for listener in tuple(_listeners):
            listener(function.__name__)
        require_subnormals(max((a.numel() for a in args if isinstance(a, torch.Tensor)), default=0))
        with torch.no_grad():
            return function(*args, **kwargs)

    vars(run)["__signature__"] = inspect.signature(function)
    del vars(run)["__wrapped__"]  # a way around the announcement
    return run


class Reference:
    """The profile that a set of reference operators runs under, and its elementary functions."""

    def __init__(self, numeric_profile: str) -> None:
        """Operators of the profile with that id; ``ValueError`` where it is not known.

        Those of a profile with a tolerance are its base's.
        """
        self.numeric_profile = numeric_profile
        self.elementary: Elementary = for_profile(get_profile(numeric_profile).reference)


def fp32_scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """``value`` rounded once to FP32, 0-d, on the device of ``like``.

    A tensor, because a Python divisor may be turned into a reciprocal, and a Python addend into a wider type.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def need(operator: str, saved: object, *keys: str, tokens: int | None = None) -> None:
    """Raise ``ValueError`` naming the first of ``keys`` that the forward's ``saved`` dict lacks.

    With ``tokens``, a tensor there must have that many rows: the ``saved`` of another batch would broadcast.
    """
    for key in keys:
        if not isinstance(saved, dict) or key not in saved:
            raise ValueError(f"{operator}: saved: want the dict of the forward with key {key!r}")
        value = saved[key]
        if tokens is not None and isinstance(value, torch.Tensor) and value.shape[:1] != (tokens,):
            raise ValueError(f"{operator}: saved[{key!r}]: got shape {tuple(value.shape)}, want {tokens} rows")
