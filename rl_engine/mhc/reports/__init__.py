"""Renderings of a verdict: text for people, JSON for machines. Pure functions; nothing here judges."""

from __future__ import annotations

from rl_engine.mhc.reports.json_report import render_json, write_json
from rl_engine.mhc.reports.text import render_text

__all__ = ["render_json", "render_text", "write_json"]
