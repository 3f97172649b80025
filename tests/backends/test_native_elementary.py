"""The portable functions vectorised in C++ against the recipe that defines them, bit for bit, at every level."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from rl_engine.mhc.backends.native import library
from rl_engine.mhc.backends.native.call import PORTABLE, native
from rl_engine.mhc.bits import tensor_bytes
from rl_engine.mhc.contract import PORTABLE_PROFILE
from rl_engine.mhc.elementary import for_profile
from tests.backends.support import at_level, levels
from tests.elementary.exact_functions import EXP_EDGES, HARDEST, POWERS_OF_FOUR, SPECIALS
from tests.threads import on_threads

FUNCTIONS = ("exp", "sigmoid", "rsqrt", "sqrt")
SAMPLE = 1 << 18


def from_encodings(encodings: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(encodings.astype(np.uint32).view(np.float32).copy())


def hardest() -> np.ndarray:
    lines = HARDEST.read_text(encoding="utf-8").split("\n")
    words = [line.split()[1] for line in lines if line and not line.startswith("#")]
    bits = np.array([int(word, 16) for word in words], dtype=np.uint32)
    return np.concatenate((bits, bits ^ np.uint32(0x80000000)))


def subnormals() -> np.ndarray:
    steps = np.arange(1, 1 << 23, 4099, dtype=np.uint32)
    return np.concatenate((steps, steps | np.uint32(0x80000000), np.arange(300, dtype=np.uint32)))


def sampled() -> np.ndarray:
    return np.random.default_rng(20260101).integers(0, 1 << 32, SAMPLE, dtype=np.uint64)


INPUTS = {
    "specials": np.array([*SPECIALS, *EXP_EDGES, *POWERS_OF_FOUR], dtype=np.uint32),
    "subnormals": subnormals(),
    "the hardest inputs": hardest(),
    "a sample of all encodings": sampled(),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_has_the_bits_of_its_recipe_at_every_level(function: str, name: str) -> None:
    x = from_encodings(INPUTS[name])
    want = tensor_bytes(getattr(for_profile(PORTABLE_PROFILE), function)(x))
    for level in levels():
        for threads in (1, 3):
            with at_level(level), on_threads(threads):
                assert tensor_bytes(getattr(PORTABLE, function)(x)) == want, (level, threads)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_length_offset_and_stride_has_the_same_bits(function: str) -> None:
    whole = from_encodings(np.concatenate((INPUTS["the hardest inputs"], INPUTS["specials"])))[-90:]
    want = getattr(for_profile(PORTABLE_PROFILE), function)(whole)
    run = getattr(PORTABLE, function)
    for level in levels():
        with at_level(level):
            for n in range(41):
                for part in (slice(n), slice(1, 1 + n), slice(90 - n, 90), slice(0, 2 * n, 2)):
                    assert tensor_bytes(run(whole[part])) == tensor_bytes(want[part]), (level, n, part)


@pytest.mark.parametrize("function", range(len(FUNCTIONS)))
def test_nothing_is_written_beside_the_results(function: int) -> None:
    functions = native().functions
    for level in levels():
        for n in range(41):
            x, y = torch.ones(n + 1)[1:], torch.full((n + 64,), 7.0)
            with at_level(level):
                native().run("mhc_elementary", function, n, x.data_ptr(), y.data_ptr() + 4 * 32)
            assert bool((y[:32] == 7).all()) and bool((y[32 + n :] == 7).all()), (level, n)
            assert not bool((y[32 : 32 + n] == 7).any())
    assert functions.mhc_elementary(ctypes.byref(_call()), 99, 0, None, None) != 0


def test_another_dtype_is_refused() -> None:
    for function in FUNCTIONS:
        with pytest.raises(TypeError, match=f"^{function}: got dtype torch.float64"):
            getattr(PORTABLE, function)(torch.ones(3, dtype=torch.float64))


def _call() -> ctypes.Structure:
    return library.Call(library.ABI_VERSION, native()._isa, 1, 0)
