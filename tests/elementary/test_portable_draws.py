"""The inputs behind the golden hashes of the portable profile: words of Philox through exact arithmetic, no library."""

from __future__ import annotations

import hashlib
from typing import NoReturn

import numpy as np
import pytest
import torch

from rl_engine.mhc import fixtures
from rl_engine.mhc.contract import PORTABLE_PROFILE
from rl_engine.mhc.fixture_inputs import PhiloxDraws
from tests.elementary.golden_process import CASES
from tests.operators.block_inputs import block_leaves, grad_leaves


def no_library(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("a normal number out of a library")


def test_no_input_comes_out_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("randn", "rand", "normal", "linspace", "randint", "Generator"):
        monkeypatch.setattr(torch, name, no_library)
    for name in CASES:
        fixtures.make_grads(name, fixtures.make_batch(name, numeric_profile=PORTABLE_PROFILE))
    fixtures.make_sinkhorn_edge_inputs(PORTABLE_PROFILE)
    fixtures.make_rms_edge_inputs(numeric_profile=PORTABLE_PROFILE)
    with pytest.raises(AssertionError, match="out of a library"):
        fixtures.make_batch("one_row")


def philox(key: int, blocks: int) -> list[int]:
    """Philox4x64 with ten rounds, in Python's integers; the first block has the counter 1, as NumPy's has."""
    mask, words = 2**64 - 1, []
    for counter in range(1, blocks + 1):
        block, low, high = [counter, 0, 0, 0], key & mask, key >> 64
        for _ in range(10):
            a, b = block[0] * 0xD2E7470EE14C6C93, block[2] * 0xCA5A826395121157
            block = [(b >> 64) ^ block[1] ^ low, b & mask, (a >> 64) ^ block[3] ^ high, a & mask]
            low, high = (low + 0x9E3779B97F4A7C15) & mask, (high + 0xBB67AE8584CAA73B) & mask
        words += block
    return words


class Stream:
    """The draws as the contract words them, written again with NumPy."""

    def __init__(self, name: str) -> None:
        digest = hashlib.sha256(name.encode()).digest()
        self.key = sum(byte << (8 * place) for place, byte in enumerate(digest[:16]))
        self.words = np.random.Philox(key=self.key)

    def __call__(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        raw = self.words.random_raw(int(np.prod(shape, dtype=np.int64)))
        parts = raw.astype("<u8").view("<u2").reshape(-1, 4).astype(np.float64)
        values = (parts.sum(axis=1) - 131070.0) * 2.0**-15 * scale
        single = values.astype(np.float32)
        assert (single == values).all(), "a draw is not exact"
        return single.reshape(shape)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The BF16 encodings: nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def assert_drawn(name: str, got: torch.Tensor, want: np.ndarray) -> None:
    assert tuple(got.shape) == want.shape, name
    narrow = got.dtype == torch.bfloat16
    bits = got.contiguous().view(torch.int16 if narrow else torch.int32).numpy()
    encodings = to_bf16(want) if narrow else want.astype(np.float32).view(np.uint32)
    assert np.array_equal(bits.view(encodings.dtype), encodings), name


@pytest.mark.parametrize("name", ["one_row", "pro_width.grad", ""])
def test_the_words_are_those_of_philox(name: str) -> None:
    stream = Stream(name)
    words = philox(stream.key, 16)
    assert words == stream.words.random_raw(64).tolist()
    values = [(sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070) * 2.0**-15 for word in words]
    assert PhiloxDraws(name)(4, 16).flatten().tolist() == values
    assert max(map(abs, values)) <= 4


def edited(name: str, r_old: np.ndarray, y: np.ndarray, bias: np.ndarray) -> None:
    """What the hostile cases change, in place."""
    if name == "zero_row":
        r_old[2] = 0.0
    if name == "extreme_rows":
        for row, scale in ((0, 1e-30), (1, 1e20), (2, 2.0**-130)):
            rounded = (to_bf16(r_old[row]).astype(np.uint32) << 16).view(np.float32)
            r_old[row] = rounded * np.float32(scale)
        r_old[3], y[4] = -0.0, -0.0
    if name == "saturated_comb":
        bias[8:] = np.repeat([80, -80, 0, 7.5, -60, 60, -60, -80], [1, 1, 2, 4, 2, 1, 1, 4])
    if name == "asymmetric_comb":
        bias[8:] = 4 * np.roll(np.eye(4), 1, axis=1).reshape(-1)


@pytest.mark.parametrize("name", CASES)
def test_the_inputs_of_a_case(name: str) -> None:
    tokens, width = CASES[name][:2]
    draw, back = Stream(name), Stream(f"{name}.grad")
    weight_scale = {128: 2.0**-4, 3: 2.0**-2, 100: 2.0**-4, 7168: 2.0**-7}[width]
    r_old, y, weight = draw(tokens, 4, width), draw(tokens, width), draw(24, 4 * width, scale=weight_scale)
    alphas = [draw(1, scale=0.5) for _ in range(3)]
    bias, gamma = draw(24, scale=2.0**-3), 1 + draw(width, scale=2.0**-4)
    edited(name, r_old, y, bias)
    batch = fixtures.make_batch(name, numeric_profile=PORTABLE_PROFILE)
    for (field, got), want in zip(block_leaves(batch).items(), [r_old, y, weight, *alphas, bias, gamma], strict=True):
        assert_drawn(field, got, want)
    wanted = [back(tokens, 4, width), back(tokens, width), back(tokens, width, scale=0.25)]
    for got, want in zip(grad_leaves(fixtures.make_grads(name, batch)), wanted, strict=True):
        assert_drawn("grads", got, want)
    assert batch.token_id.tolist() == [1000 + i for i in range(tokens)]


def test_the_inputs_of_the_edges() -> None:
    back = Stream("sinkhorn_edges.grad")
    h, *gradients = fixtures.make_sinkhorn_edge_inputs(PORTABLE_PROFILE)
    assert h.tolist() == fixtures.make_sinkhorn_edge_inputs()[0].tolist()
    for got, shape in zip(gradients, ((4, 4), (4, 4), (4, 4, 4)), strict=True):
        assert_drawn("sinkhorn", got, back(*shape))
    back, ramp = Stream("rms_edges.grad"), (2 * np.arange(128) - 127) / 16
    for dtype in ("bfloat16", "float32"):
        x, gamma, dy, d_residual = fixtures.make_rms_edge_inputs(dtype, PORTABLE_PROFILE)
        rows = np.stack([np.zeros(128), np.full(128, 2.0**-12), np.full(128, 4.0), ramp])
        assert_drawn("x", x, rows)
        assert_drawn("gamma", gamma, 1 + Stream("rms_edges.gamma")(128, scale=2.0**-4))
    assert_drawn("dy", dy, back(4, 128))
    assert_drawn("d_residual", d_residual, back(4, 128, scale=0.25))


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, -0.5, 1 / 3, float("inf"), float("nan"), 1 + 2.0**-52])
def test_a_scale_that_would_round_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale: got {scale}, want a power of two"):
        PhiloxDraws("scale")(3, scale=scale)


def test_powers_of_two_are_exact() -> None:
    plain = PhiloxDraws("scale")(100)
    for exponent in (-40, -7, 0, 9):
        assert (PhiloxDraws("scale")(100, scale=2.0**exponent) == plain * 2.0**exponent).all()
    assert [PhiloxDraws("w").weight_scale(k) for k in (4, 12, 400, 512, 16384, 28672)] == [
        2.0**-n for n in (1, 2, 4, 4, 7, 7)
    ]
