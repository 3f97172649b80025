"""A verdict as JSON, under the schema that the document names itself."""

from __future__ import annotations

import json
import os

from rl_engine.mhc.acceptance.verdict import Verdict
from rl_engine.mhc.tensor_file import replace_file


def render_json(verdict: Verdict) -> str:
    """The verdict as JSON text, keys sorted, ending in a newline. NaN and infinities appear as strings."""
    return json.dumps(verdict.to_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"


def write_json(verdict: Verdict, path: str | os.PathLike[str]) -> None:
    """Write ``render_json`` to ``path``, replacing it atomically."""
    replace_file(path, render_json(verdict).encode())
