"""Run the acceptance command from a checkout; the package itself need not be installed.

A shim: what it does lives in ``rl_engine.mhc.cli``. Try ``scripts/check_p1.py --help``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Threads that wait by spinning starve each other where cores are shared. No result depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl_engine.mhc.cli import check_p1_main

if __name__ == "__main__":
    raise SystemExit(check_p1_main())
