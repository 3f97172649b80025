"""The block cases: published, hostile, production width, freshly drawn, or captured by the user."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_engine.mhc.contract import COMB_SLICE, GradBoundary, LayerContract, ResidualBatch
from rl_engine.mhc.fixtures import BLOCK_CASES, FIXTURE_HIDDEN, draw_batch, make_batch, make_grads

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
        return [*map(_published, BLOCK_CASES), *_hostile_specs()]
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


def _published(name: str) -> CaseSpec:
    def draw(numeric_profile: str) -> tuple[ResidualBatch, GradBoundary]:
        batch = make_batch(name, numeric_profile=numeric_profile)
        return batch, make_grads(name, batch)

    return CaseSpec(name, "published, with golden hashes", draw)


def _drawn(
    name: str,
    about: str,
    tokens: int,
    contract: LayerContract,
    edit: Callable[[ResidualBatch, GradBoundary], tuple[ResidualBatch, GradBoundary]] | None = None,
) -> CaseSpec:
    def draw(numeric_profile: str) -> tuple[ResidualBatch, GradBoundary]:
        batch = draw_batch(name, tokens, dataclasses.replace(contract, numeric_profile=numeric_profile))
        grads = make_grads(name, batch)
        if edit is not None:
            batch, grads = edit(batch, grads)
        return batch.sealed(), grads

    return CaseSpec(name, about, draw)


def _hostile_specs() -> list[CaseSpec]:
    d = FIXTURE_HIDDEN
    return [
        _drawn("no_tokens", "T=0: empty outputs, zero parameter gradients", 0, LayerContract(hidden=d)),
        _drawn("zero_row", "one all-zero row: 0/0 in the RMS backward", 5, LayerContract(hidden=d), _zero_row),
        _drawn(
            "extreme_rows", "rows of 1e-30, 1e20, subnormals and negative zeros", 6, LayerContract(hidden=d), _extreme
        ),
        _drawn(
            "saturated_comb", "Sinkhorn logits near +-80, all equal and one-hot", 4, LayerContract(hidden=d), _saturated
        ),
        _drawn("fp32_gamma", "an FP32 RMSNorm weight", 16, LayerContract(hidden=d, gamma_dtype="float32")),
        _drawn("tiny_hidden", "D=3: no vector width divides it", 9, LayerContract(hidden=3)),
        _drawn("odd_hidden", "D=100: not a power of two", 33, LayerContract(hidden=100)),
    ]


def _zero_row(batch: ResidualBatch, grads: GradBoundary) -> tuple[ResidualBatch, GradBoundary]:
    batch.r_old[2] = 0.0
    return batch, grads


def _extreme(batch: ResidualBatch, grads: GradBoundary) -> tuple[ResidualBatch, GradBoundary]:
    for row, scale in ((0, 1e-30), (1, 1e20), (2, 2.0**-130)):
        batch.r_old[row] = (batch.r_old[row].float() * scale).to(torch.bfloat16)
    batch.r_old[3] = -0.0
    batch.y_sublayer[4] = -0.0
    return batch, grads


def _saturated(batch: ResidualBatch, grads: GradBoundary) -> tuple[ResidualBatch, GradBoundary]:
    bias = batch.controller.bias
    bias[COMB_SLICE] = torch.tensor([80.0, -80.0, 0.0, 0.0] + [7.5] * 4 + [-60.0, -60.0, 60.0, -60.0] + [-80.0] * 4)
    return batch, grads
