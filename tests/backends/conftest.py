"""`--native-library PATH`: run these tests on another build of the library, for example one with sanitizers.

It holds for the pytest process and its workers, not for tests that start a Python of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_engine.mhc.backends.native import library


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-library", metavar="PATH", default=None, help="the compiled library to test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("native_library", None)
    if path is not None:
        file = Path(path).resolve(strict=True)
        library._path = lambda: file
