"""Seeded cases, operator edge inputs, and the golden manifests.

``python -m rl_engine.mhc.fixtures`` prints a manifest, ``--write-manifest`` writes it. The inputs themselves are
described in ``fixture_inputs``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_engine.mhc.bits import canonical_sha256
from rl_engine.mhc.block import GRAD_KEYS, mhc_block_backward, mhc_block_forward
from rl_engine.mhc.contract import (
    CONTROLLER_RMS,
    HC_MULT,
    ORACLE_PROFILE,
    P1_RMS,
    PORTABLE_PROFILE,
    RELEASED_RMS,
    RMSNORM_EPS,
    SCHEMA_VERSION,
    GradBoundary,
    LayerContract,
    ResidualBatch,
)
from rl_engine.mhc.fixture_inputs import (
    BLOCK_CASES,
    FIXTURE_HIDDEN,
    HOSTILE_CASES,
    WIDE_CASES,
    BlockCase,
    bf16,
    draw_grads,
    draws_for,
    gamma,
)
from rl_engine.mhc.operators import reference_operators
from rl_engine.mhc.operators.interface import check_controller_rms
from rl_engine.mhc.tensor_file import replace_file
from rl_engine.mhc.trace import MHCTrace

SINKHORN_EDGES = "sinkhorn_edges"
RMS_EDGES = "rms_edges"

GOLDEN_CASES: dict[str, dict[str, BlockCase]] = {
    ORACLE_PROFILE: BLOCK_CASES,
    PORTABLE_PROFILE: BLOCK_CASES | HOSTILE_CASES | WIDE_CASES,
}
"""Numeric profile to the block cases of its manifest."""

_MANIFEST_FILES = {
    (ORACLE_PROFILE, P1_RMS): "golden_hashes.json",
    (PORTABLE_PROFILE, P1_RMS): "golden_hashes_portable.json",
    (ORACLE_PROFILE, RELEASED_RMS): "golden_hashes_rsqrt_mean.json",
    (PORTABLE_PROFILE, RELEASED_RMS): "golden_hashes_portable_rsqrt_mean.json",
}
"""Each numeric profile has a manifest for each formula of the controller's scale."""

Manifest = dict[str, Any]


def make_contract(
    name: str,
    *,
    gamma_dtype: str | None = None,
    numeric_profile: str = ORACLE_PROFILE,
    controller_rms: str = P1_RMS,
) -> LayerContract:
    """The contract of a block case, its gamma dtype replaced where one is given; ``ValueError`` for an unknown name."""
    return _block_case(name, gamma_dtype, controller_rms).contract(numeric_profile)


def make_batch(
    name: str,
    *,
    gamma_dtype: str | None = None,
    numeric_profile: str = ORACLE_PROFILE,
    controller_rms: str = P1_RMS,
) -> ResidualBatch:
    """The sealed batch of a block case, on the CPU, drawn for the profile; the same draws under either formula."""
    return _block_case(name, gamma_dtype, controller_rms).batch(name, numeric_profile)


def make_grads(name: str, batch: ResidualBatch) -> GradBoundary:
    """The gradients that arrive at ``batch``, BF16, from the stream ``name + ".grad"`` of its profile."""
    return draw_grads(name, batch)


def make_sinkhorn_edge_inputs(
    numeric_profile: str = ORACLE_PROFILE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(h[4, 24], dpre[4, 4], dpost[4, 4], dc[4, 4, 4])``, FP32: saturated, shifted, zero and one-hot logits."""
    mixed = [0.5, -0.5, 2.0, -2.0, 1.0, -1.0, 3.0, -3.0, 40.0, -40.0] + [0.0] * 14
    rows = [[-30.0, -8.0, 8.0, 30.0] * 6, [0.0] * 8 + [0.75] * 16, [0.0] * 24, mixed]
    draws = draws_for(numeric_profile, f"{SINKHORN_EDGES}.grad")
    h = torch.tensor(rows, dtype=torch.float32, device="cpu")
    return h, draws(4, HC_MULT), draws(4, HC_MULT), draws(4, HC_MULT, HC_MULT)


def make_rms_edge_inputs(
    gamma_dtype: str = "bfloat16", numeric_profile: str = ORACLE_PROFILE, hidden: int = FIXTURE_HIDDEN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x[4, D], gamma[D], dy[4, D], d_residual[4, D])``: zero, tiny, constant and ramp rows.

    All BF16; gamma in its own dtype. The published ramp is ``torch.linspace(-8, 8)``; other profiles take one whose
    steps are exact.
    """
    if numeric_profile == ORACLE_PROFILE:
        ramp = torch.linspace(-8, 8, hidden, dtype=torch.float32, device="cpu")
    else:
        ramp = (2 * torch.arange(hidden, dtype=torch.float32, device="cpu") - (hidden - 1)) * 2.0**-4
    rows = [torch.full_like(ramp, value) for value in (0.0, 2.0**-12, 4.0)]
    draws = draws_for(numeric_profile, f"{RMS_EDGES}.grad")
    x = torch.stack([*rows, ramp]).to(torch.bfloat16)
    weight = gamma(draws_for(numeric_profile, f"{RMS_EDGES}.gamma"), hidden, gamma_dtype)
    return x, weight, bf16(draws, 4, hidden), bf16(draws, 4, hidden, scale=0.25)


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


def golden_manifest(
    gamma_dtype: str | None = None, *, numeric_profile: str = ORACLE_PROFILE, controller_rms: str = P1_RMS
) -> Manifest:
    """The hashes of every boundary and gradient of a profile's cases: ``{schema_version, numeric_profile, ...}``.

    ``gamma_dtype`` replaces that of every case. The manifest of the formula that is not P1's names it, and holds the
    blocks alone: the operator edges do not read it. ``ValueError`` for a profile without golden cases.
    """
    names = _golden_cases(numeric_profile, controller_rms)
    cases = {name: _block_hashes(name, gamma_dtype, numeric_profile, controller_rms) for name in names}
    header = {
        "schema_version": SCHEMA_VERSION,
        "numeric_profile": numeric_profile,
        "fixture_hidden": FIXTURE_HIDDEN,
    }
    if controller_rms != P1_RMS:
        return {**header, "controller_rms": controller_rms, "cases": cases}
    return {**header, "cases": cases | _edge_hashes(gamma_dtype, numeric_profile)}


def _edge_hashes(gamma_dtype: str | None, numeric_profile: str) -> dict[str, dict[str, str]]:
    ops, cases = reference_operators(numeric_profile), {}
    h, dpre, dpost, dc = make_sinkhorn_edge_inputs(numeric_profile)
    pre, post, c, saved = ops.hc_split_sinkhorn_fwd(h)
    dh = ops.hc_split_sinkhorn_bwd(dpre, dpost, dc, saved)
    cases[SINKHORN_EDGES] = _hashes(**{"pre": pre, "post": post, "c": c, "grad.dh": dh})
    x, weight, dy, d_residual = make_rms_edge_inputs(gamma_dtype or "bfloat16", numeric_profile)
    y, residual, saved = ops.rmsnorm_residual_fwd(x, weight, RMSNORM_EPS)
    dx, dgamma = ops.rmsnorm_residual_bwd(dy, d_residual, x, weight, saved)
    cases[RMS_EDGES] = _hashes(**{"y": y, "residual": residual, "grad.dx": dx, "grad.dgamma": dgamma})
    return cases


def manifest_path(numeric_profile: str = ORACLE_PROFILE, controller_rms: str = P1_RMS) -> Path:
    """Where a committed manifest is: in the checkout, or beside the package where it is installed from a wheel."""
    _golden_cases(numeric_profile, controller_rms)
    package = Path(__file__).resolve().parent
    checkout = package.parent.parent / "tests" / "fixtures" / "p1"
    return (checkout if checkout.is_dir() else package / "_golden") / _MANIFEST_FILES[numeric_profile, controller_rms]


def load_manifest(
    path: str | os.PathLike[str] | None = None, *, numeric_profile: str = ORACLE_PROFILE, controller_rms: str = P1_RMS
) -> Manifest:
    """The manifest at ``path`` (default: the committed one); ``ValueError`` where it is not a manifest."""
    source = Path(path) if path is not None else manifest_path(numeric_profile, controller_rms)
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


def write_manifest(
    path: str | os.PathLike[str] | None = None,
    *,
    numeric_profile: str = ORACLE_PROFILE,
    controller_rms: str = P1_RMS,
    reason: str = "",
) -> list[str]:
    """Write a manifest to ``path`` (default: its committed place), atomically; return the hashes that moved.

    Hashes move against the manifest at ``path``, or where there is none against the committed one. If any does, a
    ``reason`` is required; without one, ``ValueError`` and nothing is written.
    """
    committed = manifest_path(numeric_profile, controller_rms)
    target = Path(path) if path is not None else committed
    manifest = golden_manifest(numeric_profile=numeric_profile, controller_rms=controller_rms)
    before = next((place for place in (target, committed) if place.exists()), None)
    moved = moved_hashes(load_manifest(before), manifest) if before is not None else []
    if moved and not reason.strip():
        listed = ", ".join(moved)
        raise ValueError(f"{target}: {len(moved)} hashes would move and no reason is given: {listed}")
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())
    return moved


def main(argv: Sequence[str] | None = None) -> int:
    """Print a manifest, or write it: exit 0, or 1 where it would move hashes without a reason."""
    parser = argparse.ArgumentParser(prog="python -m rl_engine.mhc.fixtures", description=main.__doc__)
    parser.add_argument("--write-manifest", action="store_true", help="write the manifest instead of printing it")
    parser.add_argument("--path", type=Path, default=None, help="where to (default: the committed manifest)")
    parser.add_argument("--profile", default=ORACLE_PROFILE, choices=sorted(GOLDEN_CASES), help="the numeric profile")
    parser.add_argument("--controller-rms", default=P1_RMS, choices=CONTROLLER_RMS, help="the controller's formula")
    parser.add_argument("--reason", default="", help="why hashes may move; required where they do")
    options = parser.parse_args(argv)
    chosen = {"numeric_profile": options.profile, "controller_rms": options.controller_rms}
    if not options.write_manifest:
        print(json.dumps(golden_manifest(**chosen), indent=2, sort_keys=True))
        return 0
    try:
        moved = write_manifest(options.path, **chosen, reason=options.reason)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if "no reason is given" in str(error):
            print('give --reason "..." to move hashes on purpose', file=sys.stderr)
        return 1
    for key in moved:
        print(f"moved: {key}")
    print(f"wrote {options.path or manifest_path(**chosen)}: {len(moved)} hashes moved")
    return 0


def _golden_cases(numeric_profile: str, controller_rms: str) -> dict[str, BlockCase]:
    check_controller_rms("fixtures", controller_rms)
    if numeric_profile not in GOLDEN_CASES:
        raise ValueError(
            f"numeric_profile: {numeric_profile!r} has no golden cases, want one of: {', '.join(GOLDEN_CASES)}"
        )
    return GOLDEN_CASES[numeric_profile]


def _block_case(name: str, gamma_dtype: str | None, controller_rms: str) -> BlockCase:
    cases = BLOCK_CASES | HOSTILE_CASES | WIDE_CASES
    if name not in cases:
        raise ValueError(f"case: got {name!r}, want one of: {', '.join(cases)}")
    case = dataclasses.replace(cases[name], controller_rms=controller_rms)
    return case if gamma_dtype is None else dataclasses.replace(case, gamma_dtype=gamma_dtype)


def _block_hashes(name: str, gamma_dtype: str | None, numeric_profile: str, controller_rms: str) -> dict[str, str]:
    batch = _block_case(name, gamma_dtype, controller_rms).batch(name, numeric_profile)
    trace = MHCTrace(numeric_profile)
    r_new, saved = mhc_block_forward(batch, trace)
    grads = mhc_block_backward(batch, saved, make_grads(name, batch), trace)
    present = {f"grad.{key}": tensor for key in GRAD_KEYS if (tensor := grads[key]) is not None}
    return trace.hashes() | _hashes(**present, r_new=r_new)


def _hashes(**tensors: torch.Tensor) -> dict[str, str]:
    return {name: canonical_sha256(tensor) for name, tensor in tensors.items()}


def _flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in manifest.items() if key != "cases"}
    for case, hashes in manifest["cases"].items():
        flat |= {f"{case}/{key}": value for key, value in hashes.items()}
    return flat


if __name__ == "__main__":
    raise SystemExit(main())
