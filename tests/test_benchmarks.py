"""The benchmarks measure what they say, at small sizes; nothing here is about speed."""

from __future__ import annotations

import platform
import re

import numpy as np
import pytest
import torch

from benchmarks import elementary_profiles, profile_error
from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES

HOME = (
    platform.machine() == "x86_64"
    and str(torch.__version__).startswith("2.13.")
    and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
)
COUNT = 8192
at_home = pytest.mark.skipif(not HOME, reason="torch's own functions differ elsewhere")


@pytest.fixture(scope="module")
def measured() -> dict[str, elementary_profiles.Measured]:
    return {one.what: one for one in elementary_profiles.measure(COUNT, ())}


def test_the_portable_functions_are_right(measured: dict[str, elementary_profiles.Measured]) -> None:
    for what in ("portable sqrt of FP32 against IEEE 754", "portable exp not the nearest FP32 number"):
        assert (measured[what].moved, measured[what].total) == (0, COUNT)


@at_home
def test_torchs_are_not(measured: dict[str, elementary_profiles.Measured]) -> None:
    def share(what: str) -> float:
        return measured[what].moved / measured[what].total

    assert 0.03 < share("torch.sigmoid, contiguous against strided") < 0.05
    assert 0.02 < share("torch.sigmoid, a copy of h's first 4 columns against the view") < 0.07
    assert 0.1 < share("torch.sqrt of FP32 against IEEE 754") < 0.2
    assert 0.005 < share("torch.exp against portable exp") < 0.02
    assert 0 < share("torch.sigmoid, strided, against portable sigmoid") < 0.001


@at_home
def test_hashes_move_with_the_vector_instructions() -> None:
    found = elementary_profiles.hashes(ORACLE_PROFILE)
    assert found.total == 163
    assert 0 < found.moved < 163


def test_draws_are_the_same_on_every_machine() -> None:
    x = elementary_profiles.uniform("exp", 4, -64.0, 64.0)
    assert x.dtype == torch.float32
    assert [float(v).hex() for v in x] == [
        "0x1.9cd1400000000p+1",
        "0x1.e792880000000p+4",
        "0x1.46c5440000000p+5",
        "0x1.570fb00000000p+3",
    ]
    assert bool((x >= -64).all() and (x < 64).all())


def test_a_root_that_is_not_the_nearest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, x = np.sqrt, np.arange(1, 9, dtype=np.float32)
    assert elementary_profiles.ieee_root(x)[3] == 2.0
    monkeypatch.setattr(np, "sqrt", lambda values: np.nextafter(right(values), np.float32(9)))
    with pytest.raises(RuntimeError, match="not the nearest"):
        elementary_profiles.ieee_root(x)


def test_no_speed_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    assert elementary_profiles.timing(64, 1).threads == torch.get_num_threads()
    monkeypatch.setattr(torch, "exp", lambda x: elementary_profiles.PORTABLE.exp(x) * (1 + 2.0**-20))
    with pytest.raises(RuntimeError, match="no timing"):
        elementary_profiles.timing(64, 1)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert elementary_profiles.main(["--count", "64", "--profiles", "--repeats", "1", "--markdown"]) == 0
    printed = capsys.readouterr()
    assert "| portable exp not the nearest FP32 number | 0 | 64 | 0 % |" in printed.out
    assert "exp of 64 elements" in printed.out
    assert printed.err == ""


def test_the_error_of_every_boundary_is_that_of_its_format() -> None:
    rows = {row.boundary: row for row in profile_error.errors(hidden=8, tokens=3)}
    assert set(rows) == {*FORWARD_BOUNDARIES, *BACKWARD_BOUNDARIES, *profile_error.PARAMETERS}
    for row in rows.values():
        for profile in (ORACLE_PROFILE, PORTABLE_PROFILE):
            admitted = 2.0**-8 if row.dtype == "bfloat16" else 1e-5
            assert row.rms[profile] < admitted, row.boundary
            assert row.largest[profile] < admitted, row.boundary
            if row.boundary in ("controller.p", "split.c", "post.r_new", "bwd.d_r_old", "grad.d_controller_weight"):
                assert row.largest[profile] > 0, row.boundary


def test_a_wrong_boundary_has_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = profile_error.sinkhorn
    monkeypatch.setattr(profile_error, "sinkhorn", lambda logits: right(logits).transpose(1, 2))
    rows = {row.boundary: row for row in profile_error.errors(hidden=8, tokens=3)}
    assert rows["split.c"].largest[PORTABLE_PROFILE] > 0.01
    assert rows["split.pre"].largest[PORTABLE_PROFILE] < 1e-5


def test_the_errors_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_error.main(["--hidden", "4", "--tokens", "2", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("D=4, T=2, ")
    assert len(re.findall(r"^\| `[\w.]+` \| (?:float32|bfloat16)(?: \| \d\.\d\de-?\+?\d\d){4} \|$", out, re.M)) == 25
    with pytest.raises(SystemExit):
        profile_error.main(["--tokens", "0"])
