"""Watch a provider while its operators run: which were called, and whether the reference ran inside one.

A claimed operator in which a reference operator runs is a silent fallback. An operator that the provider does not claim
may be the reference's, and is reported as such. Both are read off what ran, not off what the provider says.
"""

from __future__ import annotations

import functools
from typing import Any

from rl_engine.mhc.operators.interface import COMPOSITE_OPERATORS, LEAF_OPERATORS, OPERATORS, parameters_of
from rl_engine.mhc.operators.reference import reference_calls
from rl_engine.mhc.provider import REFERENCE_BACKEND, claimed_operators, combined_backend


class Observed:
    """A provider with its calls observed. It is an operator set itself: ``mhc_block_forward(batch, ops=observed)``."""

    def __init__(self, provider: Any) -> None:
        """Observe ``provider``; its claims are read once, now."""
        self.provider = provider
        self.name = str(provider.name)
        self.numeric_profile = str(provider.numeric_profile)
        self.claimed = claimed_operators(provider)
        self.called: dict[str, int] = {}
        self.reference_inside: dict[str, set[str]] = {}
        self._stack: list[str] = []

    def capabilities(self) -> Any:
        """The provider's own declaration."""
        return self.provider.capabilities()

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATORS:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    @property
    def fallbacks(self) -> dict[str, list[str]]:
        """Claimed operator to the reference operators that ran inside it."""
        return {op: sorted(inside) for op, inside in sorted(self.reference_inside.items()) if op in self.claimed}

    def operator_backends(self) -> dict[str, str]:
        """What each leaf operator and own composite that was called actually ran on."""
        own = str(self.capabilities().get("backend", self.name))
        return {
            op: REFERENCE_BACKEND if op in self.reference_inside else own
            for op in OPERATORS
            if op in self.called and (op in LEAF_OPERATORS or op in self.claimed)
        }

    def actual_backend(self) -> str:
        """One name for ``operator_backends``."""
        return combined_backend(self.operator_backends().values())

    def _call(self, operator: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.provider, operator)
        if operator in COMPOSITE_OPERATORS and "ops" in parameters_of(function):
            kwargs.setdefault("ops", self)
        self.called[operator] = self.called.get(operator, 0) + 1
        self._stack.append(operator)
        try:
            if len(self._stack) > 1:
                return function(*args, **kwargs)
            with reference_calls(self._heard):
                return function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            vars(error).setdefault("mhc_operator", operator)
            raise
        finally:
            self._stack.pop()

    def _heard(self, reference_operator: str) -> None:
        if self._stack:
            self.reference_inside.setdefault(self._stack[-1], set()).add(reference_operator)
