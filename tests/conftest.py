"""Settings that hold for every test."""

from __future__ import annotations

from hypothesis import settings

# Examples are drawn from the test itself, so every run and every machine sees the same ones; a slow
# machine is no failure, and nothing is remembered from run to run.
settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")
