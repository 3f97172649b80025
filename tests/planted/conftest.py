"""What the judge does alike for every provider is done once here: many providers are judged, and the oracle stays."""

from __future__ import annotations

import functools

import pytest

from rl_engine.mhc import fixtures
from rl_engine.mhc.acceptance import origin, runner

golden = functools.cache(fixtures.golden_manifest)


@pytest.fixture(autouse=True)
def _shared_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's hashes are computed once, and the sweep over T is the one size that a defect here shows at."""
    monkeypatch.setattr(origin, "golden_manifest", golden)
    monkeypatch.setattr(runner, "SWEEP_TOKENS", (2048,))
