"""Random shapes of every operator and of the block; each T from 0 to 130; the widths of models."""

from __future__ import annotations

import random

import pytest

from tests.backends.random_shapes import MOST_TOKENS, WIDE, Shape, main, shape_differences
from tests.backends.support import (
    PROFILES,
    any_modes,
    assert_same,
    at_level,
    composed,
    drawn,
    levels,
    native_block_runs,
    provider,
    reference_ops,
)
from tests.threads import on_threads

SHAPES, AT_ONCE = 60, 10


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("first", range(0, SHAPES, AT_ONCE))
def test_random_shapes_have_the_reference_bytes_at_every_level(first: int, profile: str) -> None:
    found = [line for n in range(first, first + AT_ONCE) for line in shape_differences(n, profile, levels())]
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("first", range(0, MOST_TOKENS + 1, 22))
def test_each_token_count_has_the_reference_bytes(first: int, profile: str) -> None:
    for tokens in range(first, min(first + 22, MOST_TOKENS + 1)):
        draw = random.Random(f"each T {tokens}")
        hidden = draw.randint(1, 24)
        batch, grads = drawn(f"each T {tokens}", tokens, hidden, profile, **any_modes(draw))
        want = composed(None, batch, grads)
        for level in levels():
            for path, run in native_block_runs(profile).items():
                with at_level(level), on_threads(1 + tokens % 3):
                    assert_same(run(batch, grads), want, f"T={tokens} D={hidden} {level} {path}")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("hidden", WIDE)
def test_the_widths_of_models_have_the_reference_bytes(hidden: int, profile: str) -> None:
    batch, grads = drawn(f"width {hidden}", 1 + hidden % 3, hidden, profile)
    want = composed(None, batch, grads)
    for level in levels():
        for path, run in native_block_runs(profile).items():
            with at_level(level):
                assert_same(run(batch, grads), want, f"D={hidden} {level} {path}")


SIZES = [(m, n, k) for m in (0, 1, 5, 17) for n in (0, 1, 24, 25) for k in (0, 1, 3, 64, 65)]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_gemm_serves_every_size_down_to_zero(profile: str) -> None:
    for m, n, k in SIZES:
        shape = Shape(m * 10000 + n * 100 + k)
        x, w, dy = shape.fp32(m, k), shape.fp32(n, k), shape.fp32(m, n)
        want = dict(zip("xw", reference_ops(profile).fixed_k_gemm_bwd(dy, x, w), strict=True))
        want["out"] = reference_ops(profile).fixed_k_gemm_fwd(x, w)
        for level in levels():
            with at_level(level):
                got = dict(zip("xw", provider(profile).fixed_k_gemm_bwd(dy, x, w), strict=True))
                got["out"] = provider(profile).fixed_k_gemm_fwd(x, w)
            assert_same(got, want, f"M={m} N={n} K={k} {level}")


def test_the_command_line_says_how_many_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(3) == 0
    assert "PASS  3 shapes, both profiles" in capsys.readouterr().out
