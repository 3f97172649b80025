"""The judge: does a provider reproduce the bytes, everywhere and always, and if not, where does it part first.

``cases`` says what is run, ``observed`` watches the provider while it runs, ``judge`` compares one run with the
oracle's, ``invariance``, ``refusals`` and ``origin`` hold the laws that no single run shows, ``runner`` puts them
in order and returns a ``Verdict``. Nothing here imports a backend: providers arrive through ``resolve_provider``.
"""

from __future__ import annotations

from rl_engine.mhc.acceptance.cases import Case
from rl_engine.mhc.acceptance.runner import Options, judge_provider
from rl_engine.mhc.acceptance.verdict import VERDICT_SCHEMA, Check, Divergence, Verdict

__all__ = ["VERDICT_SCHEMA", "Case", "Check", "Divergence", "Options", "Verdict", "judge_provider"]
