"""What an acceptance run found, as frozen data. Renderings of it are in ``reports``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rl_engine.mhc.bits import TensorDifference
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES

VERDICT_SCHEMA = "rl_engine.mhc/verdict/v1"

_PARAMETER_GRADS = tuple(
    f"grad.{k}" for k in ("d_bias", "d_alpha_pre", "d_alpha_post", "d_alpha_res", "d_controller_weight")
)
_BEFORE_RESIDUAL = BACKWARD_BOUNDARIES.index("bwd.d_r_old")

DATAFLOW = (
    *FORWARD_BOUNDARIES,
    *BACKWARD_BOUNDARIES[:_BEFORE_RESIDUAL],
    *_PARAMETER_GRADS,
    *BACKWARD_BOUNDARIES[_BEFORE_RESIDUAL:],
)
"""The judged tensors of a block in dataflow order: the trace's boundaries, and the controller gradients among them."""


@dataclass(frozen=True)
class Divergence:
    """One tensor at which a candidate is not the reference.

    ``kind`` is ``bytes``, ``type``, ``dtype``, ``shape``, ``device``, ``presence`` (``None`` against a tensor),
    ``refusal``, ``provenance``, ``storage`` (shared or mutated) or ``error`` (an exception). ``difference`` has the
    figures where the kind is ``bytes``; ``hint`` names a cause that the bytes show by themselves.
    """

    boundary: str
    kind: str
    message: str
    difference: TensorDifference | None = None
    hint: str = ""

    @property
    def rank(self) -> tuple[bool, int]:
        """Where it stands among others: dataflow order, operator outputs after every block boundary.

        Storage comes first: an overwritten tensor explains differences and is explained by none. There, what is not a
        boundary is an input or a saved tensor, and precedes the boundaries.
        """
        storage = self.kind == "storage"
        if self.boundary in DATAFLOW:
            return not storage, DATAFLOW.index(self.boundary)
        return not storage, -1 if storage else len(DATAFLOW)


@dataclass(frozen=True)
class Check:
    """One thing that was verified: its group, what, on which case, how many comparisons, and what was wrong.

    ``status`` is ``pass``, ``fail`` or ``note`` (nothing was verified, and ``detail`` says why).
    """

    group: str
    name: str
    case: str
    status: str
    comparisons: int = 0
    detail: str = ""
    divergences: tuple[Divergence, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The whole finding, and the ``options`` under which it was made.

    ``refusals`` are what the provider declined or is not declared for, each a sentence. ``compared_with`` is the
    profile whose oracle was the reference. Where ``byte_equality`` is false the provider's profile has a tolerance,
    and a pass says no more than that.
    """

    provider: str
    numeric_profile: str
    device: str
    provenance: dict[str, Any]
    environment: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    refusals: tuple[str, ...] = ()
    pending: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    byte_equality: bool = True
    compared_with: str = ""

    @property
    def passed(self) -> bool:
        """True where something was verified, nothing failed and nothing was refused."""
        verified = any(check.status == "pass" for check in self.checks)
        return verified and not self.refusals and not any(check.status == "fail" for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The failed checks, in the order in which they ran."""
        return tuple(check for check in self.checks if check.status == "fail")

    @property
    def comparisons(self) -> int:
        """How many tensors or facts were compared."""
        return sum(check.comparisons for check in self.checks)

    @property
    def first_divergence(self) -> tuple[Check, Divergence] | None:
        """The divergence that comes first in dataflow order over all cases; the earliest check among equals."""
        found = [(check, divergence) for check in self.failures for divergence in check.divergences]
        return min(found, key=lambda pair: pair[1].rank, default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, under the schema ``VERDICT_SCHEMA`` (see docs/verdict_schema.md)."""
        first = self.first_divergence
        return {
            "schema": VERDICT_SCHEMA,
            "passed": self.passed,
            "provider": self.provider,
            "numeric_profile": self.numeric_profile,
            "compared_with": self.compared_with,
            "byte_equality": self.byte_equality,
            "device": self.device,
            "comparisons": self.comparisons,
            "seconds": round(self.seconds, 3),
            "first_divergence": None
            if first is None
            else {"group": first[0].group, "check": first[0].name, "case": first[0].case, **_plain(first[1])},
            "refusals": list(self.refusals),
            "pending": self.pending,
            "provenance": self.provenance,
            "environment": self.environment,
            "options": _finite(self.options),
            "checks": [_plain(check) for check in self.checks],
        }


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = _finite(dataclasses.asdict(value))
    return plain


def _finite(value: Any) -> Any:
    """``value`` with tuples as lists and NaN and infinities as strings, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
