"""The published hashes from exact arithmetic alone: no operator of the package runs here, only its fixtures."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from rl_engine.mhc import fixtures
from tests.operators.block_inputs import exact_input, grad_leaves
from tests.reference import exact, exact_block
from tests.reference.bridge import TORCH_ELEMENTARY, flatten, to_exact
from tests.reference.scalar import to_bits16, to_bits32

# The manifest hashes these as BF16, everything else as FP32.
STORED = {"pre.hidden", "norm.normalized", "norm.residual", "post.r_new", "r_new", "y", "residual"}


def digest(name: str, values: Any) -> str:
    leaves = flatten(values)
    if name in STORED:
        raw = b"".join(to_bits16(v).to_bytes(2, "little") for v in leaves)
    else:
        raw = b"".join(to_bits32(v).to_bytes(4, "little") for v in leaves)
    return hashlib.sha256(raw).hexdigest()


def assert_published(case: str, values: dict[str, Any]) -> None:
    want = fixtures.load_manifest()["cases"][case]
    assert {name: digest(name, value) for name, value in values.items()} == want


@pytest.fixture(scope="module")
def one_row() -> dict[str, Any]:
    batch = fixtures.make_batch("one_row")
    grads = fixtures.make_grads("one_row", batch)
    numbers = exact_input(batch)
    out = exact_block.block_fwd(numbers, TORCH_ELEMENTARY)
    back = exact_block.block_bwd(*map(to_exact, grad_leaves(grads)), numbers, out)
    return {"out": out, "back": back}


def test_one_row(one_row: dict[str, Any]) -> None:
    out, back = one_row["out"], one_row["back"]
    pre, controller = out.pre, back.controller
    gradients = {key: getattr(back, key) for key in ("d_r_old", "dy_sublayer", "d_hidden", "d_gamma", "d_c", "d_post")}
    forward = {
        "controller.p": pre.gemm.p,
        "controller.r": pre.gemm.r,
        "controller.h": pre.h,
        **{f"split.{key}": [getattr(split, key) for split in pre.split] for key in ("pre", "post", "c")},
        "pre.hidden": pre.hidden,
        "norm.normalized": out.norm.y,
        "norm.residual": pre.hidden,
        "post.r_new": out.r_new,
        "r_new": out.r_new,
    }
    streams = {f"bwd.d_stream{i}": [token[i] for token in back.d_r_old] for i in range(4)}
    controllers = {
        "grad.d_controller_weight": controller.weight,
        "grad.d_alpha_pre": controller.alpha_pre,
        "grad.d_alpha_post": controller.alpha_post,
        "grad.d_alpha_res": controller.alpha_res,
        "grad.d_bias": controller.bias,
    }
    both = {f"{prefix}.{key}": value for prefix in ("bwd", "grad") for key, value in gradients.items()}
    assert_published("one_row", {**forward, **both, **streams, **controllers})


def test_sinkhorn_edges() -> None:
    h, dpre, dpost, dc = map(to_exact, fixtures.make_sinkhorn_edge_inputs())
    splits = [exact.split_sinkhorn_row(row, TORCH_ELEMENTARY) for row in h]
    rows = zip(dpre, dpost, dc, splits, strict=True)
    outputs = {key: [getattr(split, key) for split in splits] for key in ("pre", "post", "c")}
    dh = [exact.split_sinkhorn_bwd_row(*row) for row in rows]
    assert_published("sinkhorn_edges", {**outputs, "grad.dh": dh})


def test_rms_edges() -> None:
    x, gamma, dy, d_residual = map(to_exact, fixtures.make_rms_edge_inputs())
    out = exact.rmsnorm_fwd(x, gamma, exact.EPS, TORCH_ELEMENTARY)
    dx, dgamma = exact.rmsnorm_bwd(dy, d_residual, x, gamma, out.r)
    assert_published("rms_edges", {"y": out.y, "residual": x, "grad.dx": dx, "grad.dgamma": dgamma})
