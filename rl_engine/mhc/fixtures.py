"""Seeded cases, operator edge inputs, and the golden manifest of published hashes.

Every draw is ``torch.randn`` from a CPU generator seeded with the case name, in a fixed order, so the inputs are
the same wherever that generator is. ``python -m rl_engine.mhc.fixtures`` prints the manifest, ``--write-manifest``
writes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_engine.mhc import oracle
from rl_engine.mhc.bits import tensor_sha256
from rl_engine.mhc.block import GRAD_KEYS
from rl_engine.mhc.contract import (
    GAMMA_DTYPES,
    HC_MULT,
    ORACLE_PROFILE,
    RMSNORM_EPS,
    SCHEMA_VERSION,
    ControllerParams,
    GradBoundary,
    LayerContract,
    NormParams,
    ResidualBatch,
)
from rl_engine.mhc.tensor_file import replace_file
from rl_engine.mhc.trace import MHCTrace

FIXTURE_HIDDEN = 128
LAYER_INDEX = 3


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """One published block case: T, the row geometry, and the modes."""

    tokens: int
    row_geometry: str = "packed"
    fusion_mode: str = "unfused"
    trainability: str = "full"


BLOCK_CASES = {
    "one_row": BlockCase(1, row_geometry="one-row"),
    "packed_t16": BlockCase(16),
    "packed_t7_odd": BlockCase(7),
    "fused_pre_norm": BlockCase(16, fusion_mode="fused-pre-norm"),
    "mixer_frozen": BlockCase(16, trainability="mixer-frozen"),
}
SINKHORN_EDGES = "sinkhorn_edges"
RMS_EDGES = "rms_edges"

Manifest = dict[str, Any]


class Draws:
    """The generator of one name: ``torch.randn(shape) * scale``, FP32, in the order of the calls."""

    def __init__(self, name: str) -> None:
        """Seed with ``2026 + int.from_bytes(sha256(name)[:4], "little")``."""
        seed = 2026 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """The next draw, FP32 on the CPU."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return values * scale

    def bf16(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """The next draw, rounded to BF16."""
        return self(*shape, scale=scale).to(torch.bfloat16)

    def gamma(self, hidden: int, gamma_dtype: str) -> torch.Tensor:
        """``1 + randn[D] * 0.05`` in the gamma dtype."""
        if gamma_dtype not in GAMMA_DTYPES:
            raise ValueError(f"gamma_dtype: got {gamma_dtype!r}, want one of: {', '.join(GAMMA_DTYPES)}")
        return (1 + self(hidden, scale=0.05)).to(GAMMA_DTYPES[gamma_dtype])


def draw_batch(name: str, tokens: int, contract: LayerContract, row_geometry: str = "packed") -> ResidualBatch:
    """A sealed batch of T tokens at the contract's width, drawn from the generator ``name``."""
    draws, d, k = Draws(name), contract.hidden, contract.flat_k
    r_old, y = draws.bf16(tokens, HC_MULT, d), draws.bf16(tokens, d)
    weight = draws(contract.controller_n, k, scale=1 / k**0.5)
    alphas = [draws(1, scale=0.5) for _ in range(3)]
    bias = draws(contract.controller_n, scale=0.1)
    batch = ResidualBatch(
        r_old=r_old,
        y_sublayer=y,
        controller=ControllerParams(weight, alphas[0], alphas[1], alphas[2], bias),
        norm=NormParams(draws.gamma(d, contract.gamma_dtype)),
        token_id=torch.arange(tokens, dtype=torch.int64, device="cpu") + 1000,
        contract=contract,
        row_geometry=row_geometry,
    )
    return batch.sealed()


def make_contract(name: str, *, gamma_dtype: str = "bfloat16", numeric_profile: str = ORACLE_PROFILE) -> LayerContract:
    """The contract of a published block case; ``ValueError`` for an unknown name."""
    case = _block_case(name)
    return LayerContract(
        hidden=FIXTURE_HIDDEN,
        layer_index=LAYER_INDEX,
        fusion_mode=case.fusion_mode,
        trainability=case.trainability,
        gamma_dtype=gamma_dtype,
        numeric_profile=numeric_profile,
    )


def make_batch(name: str, *, gamma_dtype: str = "bfloat16", numeric_profile: str = ORACLE_PROFILE) -> ResidualBatch:
    """The sealed batch of a published block case, on the CPU."""
    case = _block_case(name)
    contract = make_contract(name, gamma_dtype=gamma_dtype, numeric_profile=numeric_profile)
    return draw_batch(name, case.tokens, contract, case.row_geometry)


def make_grads(name: str, batch: ResidualBatch) -> GradBoundary:
    """The gradients that arrive at ``batch``, BF16, drawn from the generator ``name + ".grad"``."""
    draws, t, d = Draws(f"{name}.grad"), batch.tokens, batch.hidden
    grads = GradBoundary(draws.bf16(t, HC_MULT, d), draws.bf16(t, d), draws.bf16(t, d, scale=0.25))
    return grads.to(batch.r_old.device)


def make_sinkhorn_edge_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(h[4, 24], dpre[4, 4], dpost[4, 4], dc[4, 4, 4])``, FP32: saturated, shifted, zero and one-hot logits."""
    mixed = [0.5, -0.5, 2.0, -2.0, 1.0, -1.0, 3.0, -3.0, 40.0, -40.0] + [0.0] * 14
    rows = [[-30.0, -8.0, 8.0, 30.0] * 6, [0.0] * 8 + [0.75] * 16, [0.0] * 24, mixed]
    draws = Draws(f"{SINKHORN_EDGES}.grad")
    return torch.tensor(rows, dtype=torch.float32, device="cpu"), draws(4, 4), draws(4, 4), draws(4, 4, 4)


def make_rms_edge_inputs(
    gamma_dtype: str = "bfloat16",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x[4, 128], gamma[128], dy[4, 128], d_residual[4, 128])``: zero, tiny, constant and ramp rows.

    All BF16; gamma in its own dtype.
    """
    d, ramp = FIXTURE_HIDDEN, torch.linspace(-8, 8, FIXTURE_HIDDEN, dtype=torch.float32, device="cpu")
    rows = [torch.full_like(ramp, value) for value in (0.0, 2.0**-12, 4.0)]
    draws = Draws(f"{RMS_EDGES}.grad")
    x = torch.stack([*rows, ramp]).to(torch.bfloat16)
    return x, Draws(f"{RMS_EDGES}.gamma").gamma(d, gamma_dtype), draws.bf16(4, d), draws.bf16(4, d, scale=0.25)


def slice_batch(batch: ResidualBatch, start: int, stop: int) -> ResidualBatch:
    """Rows ``start`` to ``stop`` with their token ids; geometry ``one-row`` at one row. ``ValueError`` out of range."""
    if not 0 <= start <= stop <= batch.tokens:
        raise ValueError(f"slice: got [{start}, {stop}), want 0 <= start <= stop <= {batch.tokens}")
    return dataclasses.replace(
        batch,
        r_old=batch.r_old[start:stop],
        y_sublayer=batch.y_sublayer[start:stop],
        token_id=batch.token_id[start:stop],
        row_geometry="one-row" if stop - start == 1 else "packed",
    )


def golden_manifest(gamma_dtype: str = "bfloat16") -> Manifest:
    """The hashes of every boundary and gradient of the seven cases: ``{schema_version, numeric_profile, ...}``."""
    cases = {name: _block_hashes(name, gamma_dtype) for name in BLOCK_CASES}
    h, dpre, dpost, dc = make_sinkhorn_edge_inputs()
    pre, post, c, saved = oracle.hc_split_sinkhorn_fwd(h)
    dh = oracle.hc_split_sinkhorn_bwd(dpre, dpost, dc, saved)
    cases[SINKHORN_EDGES] = _hashes(**{"pre": pre, "post": post, "c": c, "grad.dh": dh})
    x, gamma, dy, d_residual = make_rms_edge_inputs(gamma_dtype)
    y, residual, saved = oracle.rmsnorm_residual_fwd(x, gamma, RMSNORM_EPS)
    dx, dgamma = oracle.rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved)
    cases[RMS_EDGES] = _hashes(**{"y": y, "residual": residual, "grad.dx": dx, "grad.dgamma": dgamma})
    return {
        "schema_version": SCHEMA_VERSION,
        "numeric_profile": ORACLE_PROFILE,
        "fixture_hidden": FIXTURE_HIDDEN,
        "cases": cases,
    }


def manifest_path() -> Path:
    """Where the committed manifest is: in the checkout, or beside the package where it is installed from a wheel."""
    package = Path(__file__).resolve().parent
    checkout = package.parent.parent / "tests" / "fixtures" / "p1" / "golden_hashes.json"
    return checkout if checkout.parent.is_dir() else package / "_golden" / "golden_hashes.json"


def load_manifest(path: str | os.PathLike[str] | None = None) -> Manifest:
    """The manifest at ``path`` (default: the committed one); ``ValueError`` where it is not a manifest."""
    source = Path(path) if path is not None else manifest_path()
    try:
        manifest = json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{source}: not a JSON file ({error})") from None
    cases = manifest.get("cases") if isinstance(manifest, dict) else None
    if not isinstance(cases, dict) or not all(isinstance(hashes, dict) for hashes in cases.values()):
        raise ValueError(f"{source}: not a golden manifest: want 'cases', each with its hashes")
    return dict(manifest)


def moved_hashes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``case/key`` of every hash that differs between two manifests, is new or is gone; header fields by name."""
    before, after = _flat(old), _flat(new)
    return [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]


def write_manifest(path: str | os.PathLike[str] | None = None, *, reason: str = "") -> list[str]:
    """Write the manifest to ``path`` (default: the committed one), atomically, and return the hashes that moved.

    Hashes move against the manifest at ``path``, or where there is none against the committed one. If any does, a
    ``reason`` is required; without one, ``ValueError`` and nothing is written.
    """
    target = Path(path) if path is not None else manifest_path()
    manifest = golden_manifest()
    committed = next((p for p in (target, manifest_path()) if p.exists()), None)
    moved = moved_hashes(load_manifest(committed), manifest) if committed is not None else []
    if moved and not reason.strip():
        raise ValueError(f"{target}: {len(moved)} hashes would move and no reason is given: {', '.join(moved)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())
    return moved


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifest, or write it: exit 0, or 1 where it would move hashes without a reason."""
    parser = argparse.ArgumentParser(prog="python -m rl_engine.mhc.fixtures", description=main.__doc__)
    parser.add_argument("--write-manifest", action="store_true", help="write the manifest instead of printing it")
    parser.add_argument("--path", type=Path, default=None, help="where to (default: the committed manifest)")
    parser.add_argument("--reason", default="", help="why hashes may move; required where they do")
    options = parser.parse_args(argv)
    if not options.write_manifest:
        print(json.dumps(golden_manifest(), indent=2, sort_keys=True))
        return 0
    try:
        moved = write_manifest(options.path, reason=options.reason)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        print('give --reason "..." to move hashes on purpose', file=sys.stderr)
        return 1
    for key in moved:
        print(f"moved: {key}")
    print(f"wrote {options.path or manifest_path()}: {len(moved)} hashes moved")
    return 0


def _block_case(name: str) -> BlockCase:
    if name not in BLOCK_CASES:
        raise ValueError(f"case: got {name!r}, want one of: {', '.join(BLOCK_CASES)}")
    return BLOCK_CASES[name]


def _block_hashes(name: str, gamma_dtype: str) -> dict[str, str]:
    batch, trace = make_batch(name, gamma_dtype=gamma_dtype), MHCTrace()
    r_new, saved = oracle.mhc_block_forward(batch, trace)
    grads = oracle.mhc_block_backward(batch, saved, make_grads(name, batch), trace)
    present = {f"grad.{key}": tensor for key in GRAD_KEYS if (tensor := grads[key]) is not None}
    return trace.hashes() | _hashes(**present, r_new=r_new)


def _hashes(**tensors: torch.Tensor) -> dict[str, str]:
    return {name: tensor_sha256(tensor) for name, tensor in tensors.items()}


def _flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in manifest.items() if key != "cases"}
    for case, hashes in manifest["cases"].items():
        flat |= {f"{case}/{key}": value for key, value in hashes.items()}
    return flat


if __name__ == "__main__":
    raise SystemExit(main())
