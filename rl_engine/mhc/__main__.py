"""``python -m rl_engine.mhc`` is ``rl-mhc``."""

from __future__ import annotations

from rl_engine.mhc.cli import main

raise SystemExit(main())
