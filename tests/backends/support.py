"""What the tests of the native backend share: the runs that are compared, the levels they run at, the comparison."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rl_engine.mhc import block
from rl_engine.mhc.backends.native import library
from rl_engine.mhc.backends.native.call import native
from rl_engine.mhc.backends.native.provider import NativeProvider
from rl_engine.mhc.bits import differing, same_bytes
from rl_engine.mhc.contract import ORACLE_PROFILE, PORTABLE_PROFILE, GradBoundary, LayerContract, ResidualBatch
from rl_engine.mhc.fixture_inputs import draw_batch, draw_grads
from rl_engine.mhc.operators import reference_operators
from rl_engine.mhc.provider import ReferenceProvider

PROFILES = (ORACLE_PROFILE, PORTABLE_PROFILE)
Named = Mapping[str, torch.Tensor | None]


class LeafByLeaf(NativeProvider):
    """The canonical compositions, every leaf a native one: no whole-block path."""

    def mhc_pre_fwd(self, batch: Any, ops: Any = None) -> Any:
        return block.mhc_pre_fwd(batch, self)

    def mhc_pre_bwd(self, dhidden: Any, dpost: Any, dc: Any, batch: Any, saved: Any, ops: Any = None) -> Any:
        return block.mhc_pre_bwd(dhidden, dpost, dc, batch, saved, self)

    def mhc_pre_rmsnorm_fused_fwd(self, batch: Any, ops: Any = None) -> Any:
        return block.mhc_pre_rmsnorm_fused_fwd(batch, self)


@functools.cache
def provider(numeric_profile: str) -> NativeProvider:
    return NativeProvider(numeric_profile)


def levels() -> tuple[str, ...]:
    """The instruction-set levels of this build and processor."""
    return library.available_levels(native().functions)


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """Within the block every call of the process runs at ``level``."""
    before = native()._isa
    native()._isa = library.ISA_LEVELS.index(level)
    try:
        yield
    finally:
        native()._isa = before


def drawn(
    name: str, tokens: int, hidden: int, numeric_profile: str = ORACLE_PROFILE, **modes: str
) -> tuple[ResidualBatch, GradBoundary]:
    """A batch and its gradients from the stream ``name``; ``modes`` are fields of the contract."""
    contract = LayerContract(hidden=hidden, numeric_profile=numeric_profile, **modes)  # type: ignore[arg-type]
    batch = draw_batch(name, tokens, contract)
    return batch, draw_grads(name, batch)


def any_modes(draw: random.Random) -> dict[str, str]:
    return {
        "gamma_dtype": draw.choice(["bfloat16", "float32"]),
        "trainability": draw.choice(["full", "mixer-frozen"]),
        "fusion_mode": draw.choice(["unfused", "fused-pre-norm"]),
    }


# --- the runs ---

BlockRun = Callable[[ResidualBatch, GradBoundary], dict[str, torch.Tensor | None]]


def composed(ops: Any, batch: ResidualBatch, grads: GradBoundary) -> dict[str, torch.Tensor | None]:
    """Every boundary and gradient of the canonical composition over ``ops`` (``None``: the reference)."""
    r_new, saved = block.mhc_block_forward(batch, ops=ops)
    gradients = block.mhc_block_backward(batch, saved, grads, ops=ops)
    return {**block.forward_boundaries(saved, r_new), **gradients}


def whole(ops: NativeProvider, batch: ResidualBatch, grads: GradBoundary) -> dict[str, torch.Tensor | None]:
    """The same from the whole-block path."""
    r_new, saved = ops.mhc_block_forward(batch)
    return {**block.forward_boundaries(saved, r_new), **ops.mhc_block_backward(batch, saved, grads)}


def halves(ops: NativeProvider, batch: ResidualBatch, grads: GradBoundary) -> dict[str, torch.Tensor | None]:
    """The same from the methods that a module has: the pre half with the norm, and the gates of the post half.

    Their BF16 results must be the FP32 ones rounded once, with ``hidden`` saved and without.
    """
    hidden, normalized, residual, post, c, saved = ops.mhc_pre_rmsnorm_fused_fwd(batch)
    r_new = ops.mhc_post_fwd(batch.r_old, batch.y_sublayer, c, post)
    arguments = grads.d_r_new, batch.r_old, batch.y_sublayer, c, post
    _, dy, d_c, d_post = ops.mhc_post_bwd(*arguments)
    gates = dict(zip(("dy", "d_c", "d_post"), ops.mhc_post_gate_bwd(*arguments), strict=True))
    assert_same(gates, {"dy": dy.bfloat16(), "d_c": d_c, "d_post": d_post}, "gates")
    arriving = grads.d_normalized, grads.d_residual, d_post, d_c
    found = ops.mhc_pre_rmsnorm_fused_bwd(*arriving, batch, saved, d_r_new=grads.d_r_new)
    kept = {name: value for name, value in saved.items() if name != "hidden"}
    rounded = ops.mhc_pre_rmsnorm_fused_bwd(*arriving, batch, kept, d_r_new=grads.d_r_new, streams_dtype=torch.bfloat16)
    d_r = found["d_r_old"]
    assert d_r is not None
    assert_same(rounded, {**found, "d_r_old": d_r.bfloat16()}, "storage")
    d_hidden, _ = ops.rmsnorm_residual_bwd(
        grads.d_normalized, grads.d_residual, hidden, batch.norm.gamma, saved["norm"]
    )
    saved |= {"normalized": normalized, "residual": residual}
    gradients = {**found, "dy_sublayer": dy, "d_hidden": d_hidden, "d_c": d_c, "d_post": d_post}
    return {**block.forward_boundaries(saved, r_new), **gradients}


def native_block_runs(numeric_profile: str) -> dict[str, BlockRun]:
    """Every way through the native backend."""
    ops, leaves = provider(numeric_profile), LeafByLeaf(numeric_profile)
    return {
        "whole block": functools.partial(whole, ops),
        "composed over pre and the leaves": functools.partial(composed, ops),
        "composed over leaves alone": functools.partial(composed, leaves),
        "by halves": functools.partial(halves, ops),
    }


def composites(ops: Any, batch: ResidualBatch, grads: GradBoundary) -> dict[str, torch.Tensor | None]:
    """``mhc_pre`` forward and backward, and the fused forward, called by themselves. ``d_normalized`` plays dhidden."""
    hidden, pre, post, c, saved = ops.mhc_pre_fwd(batch)
    found = ops.mhc_pre_bwd(grads.d_normalized, post, c, batch, saved)
    wide = ops.mhc_pre_bwd(grads.d_normalized.float() * 1.1, post, c, batch, saved)
    names = ("hidden", "normalized", "residual", "post", "c")
    fused = dict(zip(names, ops.mhc_pre_rmsnorm_fused_fwd(batch)[:5], strict=True))
    return {
        **{"pre.hidden": hidden, "pre.pre": pre, "pre.post": post, "pre.c": c},
        **{f"pre_bwd.{name}": t for name, t in found.items()},
        **{f"pre_bwd of FP32.{name}": t for name, t in wide.items()},
        **{f"fused.{name}": t for name, t in fused.items()},
    }


def reference_composites(batch: ResidualBatch, grads: GradBoundary) -> dict[str, torch.Tensor | None]:
    return composites(ReferenceProvider(batch.contract.numeric_profile), batch, grads)


def reference_ops(numeric_profile: str) -> Any:
    return reference_operators(numeric_profile)


# --- the comparison ---


def differences(got: Named, want: Named) -> list[str]:
    """One line for each tensor of other bytes, dtype or shape; absent and ``None`` count, NaN payloads do not."""
    lines = [f"{name}: in one of them only" for name in sorted(got.keys() ^ want.keys())]
    for name in want.keys() & got.keys():
        a, b = got[name], want[name]
        if a is None or b is None:
            if a is not b:
                lines.append(f"{name}: None in one of them only")
        elif not same_bytes(a, b):
            lines.append(f"{name}: {_about(a, b)}")
    return lines


def _about(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)}, want {b.dtype} {tuple(b.shape)}"
    where = differing(a, b).nonzero()
    first = tuple(where[0].tolist())
    return f"{len(where)} of {a.numel()} differ, first at {first}: {float(a[first])!r}, want {float(b[first])!r}"


def assert_same(got: Named, want: Named, where: str) -> None:
    found = differences(got, want)
    assert not found, f"{where}: " + "; ".join(found)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested dataclasses, dicts, tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for part in value.values() for t in tensors_of(part)]
    if isinstance(value, tuple | list):
        return [t for part in value for t in tensors_of(part)]
    return (
        [t for part in vars(value).values() for t in tensors_of(part)] if hasattr(value, "__dataclass_fields__") else []
    )
