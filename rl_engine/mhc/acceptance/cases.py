"""The block cases: published, hostile, production width, freshly drawn, or captured by the user."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

from rl_engine.mhc.contract import GradBoundary, LayerContract, ResidualBatch
from rl_engine.mhc.fixture_inputs import (
    BLOCK_CASES,
    FIXTURE_HIDDEN,
    HOSTILE_CASES,
    BlockCase,
    draw_batch,
    draw_grads,
)

GEOMETRIES = {"fixture": FIXTURE_HIDDEN, "production": 4096, "pro": 7168}
"""Geometry name to D: the fixtures, DeepSeek-V4 Flash, DeepSeek-V4 Pro."""

DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """A batch, the gradients that arrive at it (``None``: forward only), and one line on what it is for."""

    name: str
    batch: ResidualBatch
    grads: GradBoundary | None
    about: str


@dataclass(frozen=True)
class CaseSpec:
    """A case that has not been drawn yet."""

    name: str
    about: str
    draw: Callable[[str], tuple[ResidualBatch, GradBoundary]]

    def make(self, numeric_profile: str) -> Case:
        """Draw the case under a numeric profile, on the CPU."""
        batch, grads = self.draw(numeric_profile)
        return Case(self.name, batch, grads, self.about)


def geometry_specs(geometry: str, tokens: int) -> list[CaseSpec]:
    """The cases of a geometry: published and hostile ones at fixture width, one per mode at the model's widths."""
    if geometry == "fixture":
        return [_fixture(name, case) for name, case in (BLOCK_CASES | HOSTILE_CASES).items()]
    hidden = GEOMETRIES[geometry]
    base = LayerContract(hidden=hidden)
    modes = {
        geometry: base,
        f"{geometry}_fused": base.with_mode("fusion_mode", "fused-pre-norm"),
        f"{geometry}_frozen": base.with_mode("trainability", "mixer-frozen"),
    }
    about = f"D={hidden}, T={tokens}"
    return [_drawn(name, about, tokens, contract) for name, contract in modes.items()]


def seeded_specs(seed: int, geometry: str, tokens: int, count: int = 6) -> list[CaseSpec]:
    """``count`` fresh cases: T, modes and gamma's dtype drawn from ``seed``, at fixture geometry D too."""
    draw, specs = random.Random(seed), []
    for number in range(count):
        fixture = geometry == "fixture"
        contract = LayerContract(
            hidden=draw.randint(1, 300) if fixture else GEOMETRIES[geometry],
            fusion_mode=draw.choice(["unfused", "fused-pre-norm"]),
            trainability=draw.choice(["full", "mixer-frozen"]),
            gamma_dtype=draw.choice(["bfloat16", "float32"]),
        )
        t = draw.randint(1, 130 if fixture else tokens)
        about = f"drawn: D={contract.hidden}, T={t}, {contract.fusion_mode}, {contract.trainability}"
        specs.append(_drawn(f"seed{seed}_{number}", about, t, contract))
    return specs


def captured_case(batch: ResidualBatch, grads: GradBoundary | None) -> Case:
    """The user's own tensors as a case named ``captured``."""
    return Case("captured", batch, grads, f"captured: D={batch.hidden}, T={batch.tokens}")


def _fixture(name: str, case: BlockCase) -> CaseSpec:
    def draw(numeric_profile: str) -> tuple[ResidualBatch, GradBoundary]:
        batch = case.batch(name, numeric_profile)
        return batch, draw_grads(name, batch)

    return CaseSpec(name, case.about, draw)


def _drawn(name: str, about: str, tokens: int, contract: LayerContract) -> CaseSpec:
    def draw(numeric_profile: str) -> tuple[ResidualBatch, GradBoundary]:
        batch = draw_batch(name, tokens, dataclasses.replace(contract, numeric_profile=numeric_profile))
        return batch, draw_grads(name, batch)

    return CaseSpec(name, about, draw)
