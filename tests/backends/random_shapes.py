"""Random shapes, dtypes and modes of every operator and of the whole block, native against reference, byte for byte.

    python -m tests.backends.random_shapes 2000

runs that many shapes in both profiles, the instruction-set level and the thread count taking turns. It exits 1 on the
first shape that differs.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch

from rl_engine.mhc.acceptance import operator_cases as cases
from rl_engine.mhc.contract import HC_MULT, PROD_CONTROLLER_N
from rl_engine.mhc.fixture_inputs import PhiloxDraws
from tests.backends.support import (
    PROFILES,
    any_modes,
    at_level,
    composed,
    differences,
    drawn,
    levels,
    native_block_runs,
    provider,
    reference_ops,
)
from tests.threads import on_threads

MOST_TOKENS, MOST_NARROW = 130, 200
WIDE = (4096, 4100, 5120, 7168, 8192)
ONE_IN_WIDE = 50
EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
THREADS = (1, 2, 3, 7)


class Shape:
    """Shape number ``number``: sizes, dtypes and values, all drawn from the number."""

    def __init__(self, number: int) -> None:
        self.name = f"random_shapes.{number}"
        self.draw, self.values = random.Random(self.name), PhiloxDraws(self.name)
        self.wide = number % ONE_IN_WIDE == ONE_IN_WIDE - 1
        self.hidden = self.draw.choice(WIDE) if self.wide else self.draw.randint(1, MOST_NARROW)
        self.tokens = self.draw.randint(0, 3) if self.wide else self.size(MOST_TOKENS)
        self.modes = any_modes(self.draw)

    def size(self, most: int) -> int:
        """Half of the time one beside a vector width."""
        edges = [edge for edge in EDGES if edge <= most]
        return self.draw.choice(edges) if self.draw.random() < 0.5 else self.draw.randint(0, most)

    def fp32(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """FP32 numbers that use all 24 bits."""
        return self.values(*shape, scale=scale) + self.values(*shape, scale=scale * 2.0**-14)

    def bf16(self, *shape: int) -> torch.Tensor:
        return self.values(*shape).to(torch.bfloat16)

    def either(self, *shape: int) -> torch.Tensor:
        return self.fp32(*shape) if self.draw.random() < 0.5 else self.bf16(*shape)

    def operator_inputs(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """One set of inputs for each runner of the operator cases."""
        t, d, n, four = self.tokens, self.hidden, PROD_CONTROLLER_N, HC_MULT
        k = self.hidden * HC_MULT if self.wide else 1 + self.size(400)
        m, gemm_n, gemm_k = self.size(70), self.size(40), self.size(300)
        return {
            "run_sinkhorn": (
                self.fp32(t, n, scale=4.0),
                self.fp32(t, four),
                self.fp32(t, four),
                self.fp32(t, four, four),
            ),
            "run_gemm_rms": (self.either(t, k), self.fp32(n, k, scale=2.0**-4), self.fp32(t, n), self.fp32(t)),
            "run_post": (
                *(self.bf16(t, four, d), self.bf16(t, d), self.fp32(t, four, four), self.fp32(t, four)),
                self.either(t, four, d),
            ),
            "run_aggregate": (self.fp32(t, four), self.bf16(t, four, d), self.either(t, d)),
            "run_rmsnorm": (self.bf16(t, d), self.either(d), self.either(t, d), self.either(t, d)),
            "run_fixed_gemm": (self.either(m, gemm_k), self.either(gemm_n, gemm_k), self.either(m, gemm_n)),
        }

    def __str__(self) -> str:
        return f"{self.name} T={self.tokens} D={self.hidden} {self.modes}"


def operator_differences(shape: Shape, numeric_profile: str, at: tuple[str, ...]) -> list[str]:
    """What differs at the levels ``at``, over all operators."""
    found: list[str] = []
    reference, ops = reference_ops(numeric_profile), provider(numeric_profile)
    for runner, inputs in shape.operator_inputs().items():
        run: Any = getattr(cases, runner)
        want = run(reference, inputs)
        for level in at:
            with at_level(level):
                lines = differences(run(ops, inputs), want)
            sizes = [tuple(t.shape) for t in inputs]
            found += [f"{shape} {numeric_profile} {level} {runner} {sizes}: {line}" for line in lines]
    return found


def block_differences(shape: Shape, numeric_profile: str, at: tuple[str, ...]) -> list[str]:
    """The same for every way through the whole block."""
    found: list[str] = []
    batch, grads = drawn(shape.name, shape.tokens, shape.hidden, numeric_profile, **shape.modes)
    want = composed(None, batch, grads)
    for level in at:
        for way, run in native_block_runs(numeric_profile).items():
            with at_level(level):
                lines = differences(run(batch, grads), want)
            found += [f"{shape} {numeric_profile} {level} {way}: {line}" for line in lines]
    return found


def shape_differences(number: int, numeric_profile: str, at: tuple[str, ...]) -> list[str]:
    both = operator_differences(Shape(number), numeric_profile, at)
    return both + block_differences(Shape(number), numeric_profile, at)


def main(count: int, first: int = 0) -> int:
    start, every = time.monotonic(), max(1, count // 20)
    for number in range(first, first + count):
        level = levels()[number % len(levels())]
        with on_threads(THREADS[number // len(levels()) % len(THREADS)]):
            found = [line for profile in PROFILES for line in shape_differences(number, profile, (level,))]
        if found:
            print("\n".join(found))
            print(f"FAIL  shape {number}", flush=True)
            return 1
        if (number + 1 - first) % every == 0:
            print(f"{number + 1 - first} of {count} shapes, {time.monotonic() - start:.0f} s", flush=True)
    print(f"PASS  {count} shapes, both profiles, levels {', '.join(levels())}, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
