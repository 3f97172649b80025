"""The ordered record of what a run produced at each boundary, and where two runs first part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rl_engine.mhc.bits import canonical_sha256
from rl_engine.mhc.elementary import ORACLE_PROFILE

FORWARD_BOUNDARIES = (
    "controller.p",
    "controller.r",
    "controller.h",
    "split.pre",
    "split.post",
    "split.c",
    "pre.hidden",
    "norm.normalized",
    "norm.residual",
    "post.r_new",
)
BACKWARD_BOUNDARIES = (
    "bwd.dy_sublayer",
    "bwd.d_c",
    "bwd.d_post",
    "bwd.d_hidden",
    "bwd.d_gamma",
    "bwd.d_r_old",
    "bwd.d_stream0",
    "bwd.d_stream1",
    "bwd.d_stream2",
    "bwd.d_stream3",
)


@dataclass(frozen=True)
class BoundaryRecord:
    """One recorded tensor: its boundary name, dtype (``"float32"``), shape, and the SHA-256 of its bytes.

    A NaN counts as the canonical one: its payload is not a difference, and processors make different ones.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class MHCTrace:
    """Boundary records in the order in which they were made, with notes on how the run was configured."""

    def __init__(self, numeric_profile: str = ORACLE_PROFILE) -> None:
        """An empty trace of a run under that numeric profile."""
        self.numeric_profile = numeric_profile
        self.records: list[BoundaryRecord] = []
        self.notes: dict[str, Any] = {}

    def record(self, name: str, tensor: torch.Tensor) -> None:
        """Append the record of ``tensor``, in any layout and on any device."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.records.append(BoundaryRecord(name, dtype, tuple(tensor.shape), canonical_sha256(tensor)))

    def note(self, key: str, value: Any) -> None:
        """Attach a JSON-ready fact about the run."""
        self.notes[key] = value

    def hashes(self) -> dict[str, str]:
        """Boundary name to SHA-256, in recorded order."""
        return {record.name: record.sha256 for record in self.records}

    def to_dict(self) -> dict[str, Any]:
        """``{numeric_profile, records, notes}``, JSON-ready."""
        records = [{"name": r.name, "dtype": r.dtype, "shape": list(r.shape), "sha256": r.sha256} for r in self.records]
        return {"numeric_profile": self.numeric_profile, "records": records, "notes": dict(self.notes)}


def first_divergence(a: MHCTrace | Iterable[BoundaryRecord], b: MHCTrace | Iterable[BoundaryRecord]) -> str | None:
    """The name of the first boundary, in recorded order, at which two traces differ; ``None`` where they do not.

    Name, dtype, shape and hash all count. Where one trace is longer, its first surplus record is the divergence;
    where the order differs, the name that ``a`` has there.
    """
    left = list(a.records if isinstance(a, MHCTrace) else a)
    right = list(b.records if isinstance(b, MHCTrace) else b)
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            return mine.name
    longer = left if len(left) > len(right) else right
    shared = min(len(left), len(right))
    return longer[shared].name if len(longer) > shared else None
