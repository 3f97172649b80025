"""The cases of the portable manifest, and a process of its own for it: ``python -m tests.elementary.golden_process``.

Prints JSON: which of torch's code paths ran, and the manifest at each number of threads, at 7 from strided inputs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rl_engine.mhc import fixtures
from rl_engine.mhc.acceptance.layouts import laid_out, strided
from rl_engine.mhc.contract import PORTABLE_PROFILE, GradBoundary, ResidualBatch

THREADS = (1, 2, 7)
STRIDED = 7

CASES = {  # T, D, row geometry, fusion mode, trainability, gamma
    "one_row": (1, 128, "one-row", "unfused", "full", "bfloat16"),
    "packed_t16": (16, 128, "packed", "unfused", "full", "bfloat16"),
    "packed_t7_odd": (7, 128, "packed", "unfused", "full", "bfloat16"),
    "fused_pre_norm": (16, 128, "packed", "fused-pre-norm", "full", "bfloat16"),
    "mixer_frozen": (16, 128, "packed", "unfused", "mixer-frozen", "bfloat16"),
    "no_tokens": (0, 128, "packed", "unfused", "full", "bfloat16"),
    "zero_row": (5, 128, "packed", "unfused", "full", "bfloat16"),
    "extreme_rows": (6, 128, "packed", "unfused", "full", "bfloat16"),
    "saturated_comb": (4, 128, "packed", "unfused", "full", "bfloat16"),
    "asymmetric_comb": (4, 128, "packed", "unfused", "full", "bfloat16"),
    "fp32_gamma": (16, 128, "packed", "unfused", "full", "float32"),
    "tiny_hidden": (9, 3, "packed", "unfused", "full", "bfloat16"),
    "odd_hidden": (65, 100, "packed", "unfused", "full", "bfloat16"),
    "pro_width": (2, 7168, "packed", "unfused", "full", "bfloat16"),
}


def avx2_supported() -> bool:
    return bool(torch.cpu._is_avx2_supported())


def avx512_supported() -> bool:
    return bool(torch.cpu._is_avx512_supported())


def contiguous_manifest() -> dict[str, Any]:
    return fixtures.golden_manifest(numeric_profile=PORTABLE_PROFILE)


def strided_manifest() -> dict[str, Any]:
    """The manifest with junk between the elements of every input."""
    batch_of, grads_of = fixtures.make_batch, fixtures.make_grads

    def make_batch(name: str, **options: Any) -> ResidualBatch:
        batch, _ = laid_out(batch_of(name, **options), None, strided)
        assert {t.stride(-1) for t in (batch.r_old, batch.y_sublayer, batch.controller.weight)} == {2}
        return batch

    def make_grads(name: str, batch: ResidualBatch) -> GradBoundary:
        _, grads = laid_out(batch, grads_of(name, batch), strided)
        assert grads is not None and grads.d_r_new.stride(-1) == 2
        return grads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixtures, "make_batch", make_batch)
        patch.setattr(fixtures, "make_grads", make_grads)
        for edges in ("make_sinkhorn_edge_inputs", "make_rms_edge_inputs"):
            drawn = getattr(fixtures, edges)
            patch.setattr(fixtures, edges, lambda *args, drawn=drawn: tuple(map(strided, drawn(*args))))
        return contiguous_manifest()


def main() -> None:
    manifests = {}
    for count in THREADS:
        torch.set_num_threads(count)
        make = strided_manifest if count == STRIDED else contiguous_manifest
        manifests[str(count)] = make()
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "manifests": manifests}))


if __name__ == "__main__":
    main()
