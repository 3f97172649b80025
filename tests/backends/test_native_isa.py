"""RL_MHC_ISA in a process of its own: the same bytes at each level, the level named, an unknown one refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_engine.mhc.backends.native import library
from tests.backends.support import PROFILES, composed, drawn, levels, provider
from tests.backends.test_native_conduct import digest

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = """
from tests.backends.support import PROFILES, drawn, provider, whole
from tests.backends.test_native_conduct import digest
for profile in PROFILES:
    stated = provider(profile).provenance()
    print(stated["isa"], stated["abi_version"], digest(whole(provider(profile), *drawn("isa", 33, 20, profile))))
"""


def run(level: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, library.ISA_VARIABLE: level}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=60, check=False
    )


@pytest.mark.parametrize("level", levels())
def test_a_forced_level_is_the_one_that_runs_and_moves_no_byte(level: str) -> None:
    result = run(level, CODE)
    wanted = [digest(composed(None, *drawn("isa", 33, 20, profile))) for profile in PROFILES]
    lines = [f"{level} {library.ABI_VERSION} {want}" for want in wanted]
    assert (result.returncode, result.stdout.splitlines()) == (0, lines), result.stderr


def test_an_unknown_level_is_a_value_error_of_one_line() -> None:
    result = run("sse9", "from rl_engine.mhc.backends.native.provider import NativeProvider; NativeProvider()")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == f"ValueError: RL_MHC_ISA: got 'sse9', want one of: {', '.join(levels())}"


def test_without_a_library_the_provider_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_path", lambda: None)
    with pytest.raises(library.NativeBackendUnavailable) as caught:
        library.load.__wrapped__()
    assert "\n" not in str(caught.value)


def test_provenance_names_the_level_and_the_interface() -> None:
    stated = provider(PROFILES[0]).provenance()
    assert stated["isa"] in levels()
    assert stated["abi_version"] == library.ABI_VERSION
