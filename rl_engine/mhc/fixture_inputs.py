"""The inputs of the fixture cases: which cases there are, and the seeded draws that fill them.

Each name has a stream of numbers of its own, taken in a fixed order. ``TorchDraws`` is what the published hashes of the
oracle profile were made from: its normal numbers come out of a math library, so they are the same only where that is.
``PhiloxDraws`` takes raw words of a counter-based generator through exact arithmetic and is the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from rl_engine.mhc.contract import (
    COMB_SLICE,
    GAMMA_DTYPES,
    HC_MULT,
    ORACLE_PROFILE,
    P1_RMS,
    ControllerParams,
    GradBoundary,
    LayerContract,
    NormParams,
    ResidualBatch,
)

FIXTURE_HIDDEN = 128
LAYER_INDEX = 3


class Draws(Protocol):
    """FP32 numbers on the CPU, about normal, in the order of the calls."""

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """The next numbers of that shape, times ``scale`` (rounded to FP32)."""
        ...

    def weight_scale(self, k: int) -> float:
        """The scale of a controller weight with K columns."""
        ...

    bias_scale: float
    gamma_scale: float


class TorchDraws:
    """``torch.randn(shape) * scale`` from a CPU generator seeded with the name."""

    bias_scale = 0.1
    gamma_scale = 0.05

    def __init__(self, name: str) -> None:
        """Seed with ``2026 + int.from_bytes(sha256(name)[:4], "little")``."""
        seed = 2026 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """The next numbers of that shape, times ``scale`` (rounded to FP32)."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return values * scale

    def weight_scale(self, k: int) -> float:
        """``1 / K^0.5``."""
        return 1 / float(k**0.5)


class PhiloxDraws:
    """Sums of the four 16-bit parts of a raw word of NumPy's Philox, centred, times 2^-15: 18 bits, exact in FP32.

    About normal, with a standard deviation of 1.15 and values in [-4, 4]. Scales must be powers of two, so that every
    number drawn is exact on every machine.
    """

    bias_scale = 2.0**-3
    gamma_scale = 2.0**-4

    def __init__(self, name: str) -> None:
        """Key the generator with the first 16 bytes of ``sha256(name)``, little-endian; the counter starts at 0."""
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
        self._words = np.random.Philox(key=key)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """The next numbers of that shape, times ``scale``; ``ValueError`` where it is not a power of two."""
        if math.frexp(scale)[0] != 0.5:
            raise ValueError(f"scale: got {scale}, want a power of two")
        words = self._words.random_raw(math.prod(shape))
        parts = sum(((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
        values = (parts - 131070).astype(np.float32) * np.float32(2.0**-15 * scale)
        return torch.from_numpy(values).reshape(shape)

    def weight_scale(self, k: int) -> float:
        """The power of two next to ``1 / K^0.5``."""
        return float(2.0 ** -round(math.log2(k) / 2))


def draws_for(numeric_profile: str, name: str) -> Draws:
    """The draws of a profile's fixtures: torch's for the oracle profile, Philox for every other."""
    return TorchDraws(name) if numeric_profile == ORACLE_PROFILE else PhiloxDraws(name)


def bf16(draws: Draws, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """The next draw, rounded to BF16."""
    return draws(*shape, scale=scale).to(torch.bfloat16)


def gamma(draws: Draws, hidden: int, gamma_dtype: str) -> torch.Tensor:
    """``1 + draw[D] * gamma_scale`` in the gamma dtype; ``ValueError`` for another name of one."""
    if gamma_dtype not in GAMMA_DTYPES:
        raise ValueError(f"gamma_dtype: got {gamma_dtype!r}, want one of: {', '.join(GAMMA_DTYPES)}")
    return (1 + draws(hidden, scale=draws.gamma_scale)).to(GAMMA_DTYPES[gamma_dtype])


def draw_batch(name: str, tokens: int, contract: LayerContract, row_geometry: str = "packed") -> ResidualBatch:
    """A sealed batch of T tokens at the contract's width, drawn from the stream ``name`` of the contract's profile."""
    draws, d, k = draws_for(contract.numeric_profile, name), contract.hidden, contract.flat_k
    r_old, y = bf16(draws, tokens, HC_MULT, d), bf16(draws, tokens, d)
    weight = draws(contract.controller_n, k, scale=draws.weight_scale(k))
    alpha_pre, alpha_post, alpha_res = (draws(1, scale=0.5) for _ in range(3))
    bias = draws(contract.controller_n, scale=draws.bias_scale)
    batch = ResidualBatch(
        r_old=r_old,
        y_sublayer=y,
        controller=ControllerParams(weight, alpha_pre, alpha_post, alpha_res, bias),
        norm=NormParams(gamma(draws, d, contract.gamma_dtype)),
        token_id=torch.arange(tokens, dtype=torch.int64, device="cpu") + 1000,
        contract=contract,
        row_geometry=row_geometry,
    )
    return batch.sealed()


def draw_grads(name: str, batch: ResidualBatch) -> GradBoundary:
    """The gradients that arrive at ``batch``, BF16, on its device, from the stream ``name + ".grad"``."""
    draws, t, d = draws_for(batch.contract.numeric_profile, f"{name}.grad"), batch.tokens, batch.hidden
    grads = GradBoundary(bf16(draws, t, HC_MULT, d), bf16(draws, t, d), bf16(draws, t, d, scale=0.25))
    return grads.to(batch.r_old.device)


@dataclass(frozen=True)
class BlockCase:
    """One block case: T, D, the modes, one line on what it is for, and an edit of the drawn batch in place."""

    tokens: int
    about: str = "published, with golden hashes"
    hidden: int = FIXTURE_HIDDEN
    row_geometry: str = "packed"
    fusion_mode: str = "unfused"
    trainability: str = "full"
    gamma_dtype: str = "bfloat16"
    controller_rms: str = P1_RMS
    edit: Callable[[ResidualBatch], None] | None = None

    def contract(self, numeric_profile: str) -> LayerContract:
        """The case's contract under a profile."""
        return LayerContract(
            hidden=self.hidden,
            layer_index=LAYER_INDEX,
            fusion_mode=self.fusion_mode,
            trainability=self.trainability,
            numeric_profile=numeric_profile,
            gamma_dtype=self.gamma_dtype,
            controller_rms=self.controller_rms,
        )

    def batch(self, name: str, numeric_profile: str) -> ResidualBatch:
        """The case's sealed batch, on the CPU."""
        batch = draw_batch(name, self.tokens, self.contract(numeric_profile), self.row_geometry)
        if self.edit is None:
            return batch
        self.edit(batch)
        return replace(batch, weight_fingerprint="").sealed()


def _zero_row(batch: ResidualBatch) -> None:
    batch.r_old[2] = 0.0


def _extreme_rows(batch: ResidualBatch) -> None:
    for row, scale in ((0, 1e-30), (1, 1e20), (2, 2.0**-130)):
        batch.r_old[row] = (batch.r_old[row].float() * scale).to(torch.bfloat16)
    batch.r_old[3] = -0.0
    batch.y_sublayer[4] = -0.0


def _saturated_comb(batch: ResidualBatch) -> None:
    rows = [[80.0, -80.0, 0.0, 0.0], [7.5] * 4, [-60.0, -60.0, 60.0, -60.0], [-80.0] * 4]
    _set_comb(batch, rows)


def _asymmetric_comb(batch: ResidualBatch) -> None:
    _set_comb(batch, [[0.0, 4.0, 0.0, 0.0], [0.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 4.0], [4.0, 0.0, 0.0, 0.0]])


def _set_comb(batch: ResidualBatch, logits: list[list[float]]) -> None:
    batch.controller.bias[COMB_SLICE] = torch.tensor(logits, dtype=torch.float32, device="cpu").reshape(-1)


BLOCK_CASES = {
    "one_row": BlockCase(1, row_geometry="one-row"),
    "packed_t16": BlockCase(16),
    "packed_t7_odd": BlockCase(7),
    "fused_pre_norm": BlockCase(16, fusion_mode="fused-pre-norm"),
    "mixer_frozen": BlockCase(16, trainability="mixer-frozen"),
}
"""The cases whose hashes are published for the oracle profile."""

HOSTILE_CASES = {
    "no_tokens": BlockCase(0, "T=0: empty outputs, zero parameter gradients"),
    "zero_row": BlockCase(5, "one all-zero row: 0/0 in the RMS backward", edit=_zero_row),
    "extreme_rows": BlockCase(6, "rows of 1e-30, 1e20, subnormals and negative zeros", edit=_extreme_rows),
    "saturated_comb": BlockCase(4, "Sinkhorn logits near +-80, all equal and one-hot", edit=_saturated_comb),
    "asymmetric_comb": BlockCase(4, "a C near a cyclic shift, far from its transpose", edit=_asymmetric_comb),
    "fp32_gamma": BlockCase(16, "an FP32 RMSNorm weight", gamma_dtype="float32"),
    "tiny_hidden": BlockCase(9, "D=3: no vector width divides it", hidden=3),
    "odd_hidden": BlockCase(65, "T=65, D=100: neither is a power of two", hidden=100),
}
"""What the published cases lack; part of the portable manifest."""

WIDE_CASES = {"pro_width": BlockCase(2, "D=7168, the width of DeepSeek-V4 Pro", hidden=7168)}
"""In the portable manifest alone; ``--geometry pro`` judges at this width."""
