"""The block boundary as a chain over any operator set: pre, norm, (sublayer), post, and back.

The composites here are the canonical ones. They call every part through ``ops``, a provider or the oracle module;
``ops=None`` means the reference operators of the contract's numeric profile. The sublayer is external: its output and
gradients arrive as data, the gradient for its output leaves as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from rl_engine.mhc.capabilities import require_capabilities
from rl_engine.mhc.contract import (
    COMB_SLICE,
    CONTROLLER_RMS,
    P1_RMS,
    POST_SLICE,
    PRE_SLICE,
    GradBoundary,
    LayerContract,
    ResidualBatch,
)
from rl_engine.mhc.operators import OperatorSet, Saved, reference_operators
from rl_engine.mhc.operators.interface import check_arguments, saved_controller_rms
from rl_engine.mhc.operators.reference import need
from rl_engine.mhc.profiles import get_profile
from rl_engine.mhc.reduction import HC_MULT, fixed_sum, widen
from rl_engine.mhc.trace import MHCTrace

Grads = dict[str, torch.Tensor | None]

SUPPORTED_FUSION = ("unfused", "fused-pre-norm")
SUPPORTED_TRAINABILITY = ("full", "mixer-frozen")
SUPPORTED_PLACEMENTS = ("replicated",)
SUPPORTED_CONTROLLER_RMS = CONTROLLER_RMS

CONTROLLER_GRADS = ("d_controller_weight", "d_alpha_pre", "d_alpha_post", "d_alpha_res", "d_bias")
"""The gradients that are ``None`` under ``mixer-frozen``."""

GRAD_KEYS = ("d_r_old", "dy_sublayer", "d_hidden", "d_gamma", "d_c", "d_post", *CONTROLLER_GRADS)
"""The keys of ``mhc_block_backward``."""


def capabilities() -> dict[str, Any]:
    """The modes that the reference serves, in the form in which a provider declares them."""
    return {
        "backend": "reference",
        "geometry": ["one-row", "packed"],
        "devices": ["cpu", "cuda"],
        "fusion_modes": list(SUPPORTED_FUSION),
        "trainability": list(SUPPORTED_TRAINABILITY),
        "placements": list(SUPPORTED_PLACEMENTS),
        "controller_rms": list(SUPPORTED_CONTROLLER_RMS),
    }


@torch.no_grad()
def mhc_pre_fwd(
    batch: ResidualBatch, ops: OperatorSet | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved]:
    """``(hidden[T, D] BF16, pre[T, 4], post[T, 4], c[T, 4, 4], saved)``; all but hidden FP32.

    ``fp32_gemm_rms``, then ``m = r*P`` and ``h = (m*alpha) + bias``, then ``hc_split_sinkhorn`` and
    ``h_aggregate``. saved: ``x_flat, p, r, m, h, pre, post, c`` and the parts' own ``gemm``, ``sinkhorn``.
    """
    contract = batch.contract
    batch.controller.validate(contract)
    _require(ops, batch)
    parts = _parts(ops, contract)
    x_flat = widen("r_old", batch.r_old).reshape(batch.tokens, contract.flat_k)
    # A set that serves P1's formula alone need not know that there is another.
    formula = {} if contract.controller_rms == P1_RMS else {"controller_rms": contract.controller_rms}
    p, r, gemm = parts.fp32_gemm_rms_fwd(x_flat, batch.controller.weight, contract.mhc_eps, **formula)
    m = r[:, None] * p
    h = (m * batch.controller.expanded_alpha(contract)) + batch.controller.bias
    pre, post, c, sinkhorn = parts.hc_split_sinkhorn_fwd(h, contract)
    hidden = parts.h_aggregate_fwd(pre, batch.r_old)
    saved = {"x_flat": x_flat, "p": p, "r": r, "m": m, "h": h, "pre": pre, "post": post, "c": c}
    return hidden, pre, post, c, {**saved, "gemm": gemm, "sinkhorn": sinkhorn, **formula}


@torch.no_grad()
def mhc_pre_bwd(
    dhidden: torch.Tensor,
    dpost: torch.Tensor,
    dc: torch.Tensor,
    batch: ResidualBatch,
    saved: Saved,
    ops: OperatorSet | None = None,
) -> Grads:
    """``d_r_old[T, 4, D]`` and the controller gradients, FP32, of ``dhidden[T, D]`` (BF16 or FP32), ``dpost``, ``dc``.

    Aggregate, then Sinkhorn, then ``dbias = fold_t(dh)``; ``dalpha[n] = fold_t(dh*m)`` and the ascending fold of each
    segment; ``dm = dh*alpha``, ``dp = dm*r``, ``dr = fold_n(dm*P)``; ``fp32_gemm_rms`` backward;
    ``d_r_old = dR_aggregate + dX``. Under ``mixer-frozen`` the controller gradients are ``None``.
    """
    _require(ops, batch)
    check_arguments("mhc_pre_bwd", dhidden=dhidden, dpost=dpost, dc=dc)
    need("mhc_pre_bwd", saved, "x_flat", "p", "r", "m", "pre", "gemm", "sinkhorn")
    require_formula("mhc_pre_bwd", batch, saved)
    contract, controller = batch.contract, batch.controller
    parts = _parts(ops, contract)
    dr_aggregate, dpre = parts.h_aggregate_bwd(dhidden, saved["pre"], batch.r_old)
    dh = parts.hc_split_sinkhorn_bwd(dpre, dpost, dc, saved["sinkhorn"])
    dm = dh * controller.expanded_alpha(contract)
    dp, dr = dm * saved["r"][:, None], fixed_sum(dm * saved["p"])
    dx, dweight = parts.fp32_gemm_rms_bwd(dp, dr, saved["x_flat"], controller.weight, saved["gemm"])
    grads: Grads = {"d_r_old": dr_aggregate + dx.reshape(dr_aggregate.shape)}
    if contract.trainability == "mixer-frozen":
        return grads | dict.fromkeys(CONTROLLER_GRADS)
    dalpha = fixed_sum(dh * saved["m"], dim=0)
    return grads | {
        "d_controller_weight": dweight,
        "d_alpha_pre": fixed_sum(dalpha[PRE_SLICE]).reshape(1),
        "d_alpha_post": fixed_sum(dalpha[POST_SLICE]).reshape(1),
        "d_alpha_res": fixed_sum(dalpha[COMB_SLICE]).reshape(1),
        "d_bias": fixed_sum(dh, dim=0),
    }


def mhc_pre_rmsnorm_fused_fwd(
    batch: ResidualBatch, ops: OperatorSet | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved]:
    """``(hidden, normalized, residual, post, c, saved)``: *defined* as ``mhc_pre`` followed by ``rmsnorm_residual``.

    hidden, normalized and residual are BF16 ``[T, D]``. saved: that of ``mhc_pre`` plus ``hidden`` and ``norm``.
    """
    batch.norm.validate(batch.contract)
    _require(ops, batch)
    pre_fwd = mhc_pre_fwd if ops is None else ops.mhc_pre_fwd
    hidden, _, post, c, saved = pre_fwd(batch)
    parts = _parts(ops, batch.contract)
    normalized, residual, norm = parts.rmsnorm_residual_fwd(hidden, batch.norm.gamma, batch.contract.rmsnorm_eps)
    return hidden, normalized, residual, post, c, {**saved, "hidden": hidden, "norm": norm}


def mhc_block_forward(
    batch: ResidualBatch, trace: MHCTrace | None = None, ops: OperatorSet | None = None
) -> tuple[torch.Tensor, Saved]:
    """``(r_new[T, 4, D] BF16, saved)``: validate the batch, check the capabilities of ``ops``, then pre, norm, post.

    Under ``fused-pre-norm`` the first two are one call of ``mhc_pre_rmsnorm_fused_fwd``. saved: that of ``mhc_pre``
    plus ``hidden, normalized, residual, norm``. Errors: those of ``ResidualBatch.validate``, and
    ``NotImplementedError`` ("fail-closed") for a mode that ``ops`` does not declare, both before any operator runs.
    """
    contract = batch.contract
    batch.validate()
    require_profile(trace, batch)
    _require(ops, batch)
    parts = _parts(ops, contract)
    if contract.fusion_mode == "fused-pre-norm":
        fused = mhc_pre_rmsnorm_fused_fwd if ops is None else ops.mhc_pre_rmsnorm_fused_fwd
        hidden, normalized, residual, post, c, saved = fused(batch)
        norm = saved["norm"]
    else:
        pre_fwd = mhc_pre_fwd if ops is None else ops.mhc_pre_fwd
        hidden, _, post, c, saved = pre_fwd(batch)
        normalized, residual, norm = parts.rmsnorm_residual_fwd(hidden, batch.norm.gamma, contract.rmsnorm_eps)
    r_new = parts.mhc_post_fwd(batch.r_old, batch.y_sublayer, c, post)
    saved = {**saved, "hidden": hidden, "normalized": normalized, "residual": residual, "norm": norm}
    record_forward(trace, batch, saved, r_new)
    return r_new, saved


def mhc_block_backward(
    batch: ResidualBatch,
    saved: Saved,
    grads: GradBoundary,
    trace: MHCTrace | None = None,
    ops: OperatorSet | None = None,
) -> Grads:
    """The gradients ``GRAD_KEYS`` of one block boundary, FP32: post, then norm, then pre.

    ``d_r_old[T, 4, D] = pre's d_r_old + post's dR``; ``dy_sublayer[T, D]`` is the gradient of the sublayer's output,
    ``d_hidden[T, D]`` that of the norm's input. The controller gradients are ``None`` under ``mixer-frozen``.
    """
    contract = batch.contract
    grads.validate(batch)
    require_profile(trace, batch)
    _require(ops, batch)
    need("mhc_block_backward", saved, "c", "post", "hidden", "norm")
    parts = _parts(ops, contract)
    dr_post, dy, d_c, d_post = parts.mhc_post_bwd(
        grads.d_r_new, batch.r_old, batch.y_sublayer, saved["c"], saved["post"]
    )
    d_hidden, d_gamma = parts.rmsnorm_residual_bwd(
        grads.d_normalized, grads.d_residual, saved["hidden"], batch.norm.gamma, saved["norm"]
    )
    pre_bwd = mhc_pre_bwd if ops is None else ops.mhc_pre_bwd
    pre_grads = pre_bwd(d_hidden, d_post, d_c, batch, saved)
    d_r_pre = pre_grads["d_r_old"]
    if d_r_pre is None:
        raise ValueError("mhc_pre_bwd: d_r_old: got None, want an FP32 tensor [T, 4, D]")
    result: Grads = {"d_r_old": d_r_pre + dr_post, "dy_sublayer": dy, "d_hidden": d_hidden, "d_gamma": d_gamma}
    result |= {"d_c": d_c, "d_post": d_post}
    result |= {key: pre_grads[key] for key in CONTROLLER_GRADS}
    record_backward(trace, result)
    return result


def forward_boundaries(saved: Saved, r_new: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors at the forward boundaries, in trace order; ``ValueError`` where ``saved`` lacks one."""
    keys = {"controller.p": "p", "controller.r": "r", "controller.h": "h", "split.pre": "pre", "split.post": "post"}
    keys |= {"split.c": "c", "pre.hidden": "hidden", "norm.normalized": "normalized", "norm.residual": "residual"}
    need("mhc_block_forward", saved, *keys.values())
    return {name: saved[key] for name, key in keys.items()} | {"post.r_new": r_new}


def backward_boundaries(grads: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The tensors at the backward boundaries, in trace order; ``bwd.d_stream{i}`` is ``d_r_old[:, i, :]``."""
    named: dict[str, torch.Tensor] = {}
    for key in ("dy_sublayer", "d_c", "d_post", "d_hidden", "d_gamma", "d_r_old"):
        tensor = grads[key]
        if tensor is None:
            raise ValueError(f"{key}: got None, want a tensor: only controller gradients may be None")
        named[f"bwd.{key}"] = tensor
    streams = named["bwd.d_r_old"]
    return named | {f"bwd.d_stream{i}": streams[:, i, :] for i in range(HC_MULT)}


def _parts(ops: OperatorSet | None, contract: LayerContract) -> Any:
    return reference_operators(contract.numeric_profile) if ops is None else ops


def _require(ops: OperatorSet | None, batch: ResidualBatch) -> None:
    profile = batch.contract.numeric_profile
    reference = SimpleNamespace(name="reference", numeric_profile=profile, capabilities=capabilities)
    require_capabilities(reference if ops is None else ops, batch.contract, batch)


def record_forward(trace: MHCTrace | None, batch: ResidualBatch, saved: Saved, r_new: torch.Tensor) -> None:
    """Record the notes and the forward boundaries of a block; nothing where ``trace`` is ``None``."""
    if trace is None:
        return
    _note(trace, batch)
    for name, tensor in forward_boundaries(saved, r_new).items():
        trace.record(name, tensor)


def record_backward(trace: MHCTrace | None, grads: Mapping[str, torch.Tensor | None]) -> None:
    """Record the backward boundaries of a block; nothing where ``trace`` is ``None``."""
    if trace is None:
        return
    for name, tensor in backward_boundaries(grads).items():
        trace.record(name, tensor)


def require_profile(trace: MHCTrace | None, batch: ResidualBatch) -> None:
    """Raise ``ValueError`` unless a given trace is one of the batch's numeric profile."""
    wanted = batch.contract.numeric_profile
    if trace is not None and trace.numeric_profile != wanted:
        raise ValueError(f"trace.numeric_profile: got {trace.numeric_profile!r}, want {wanted!r} (the contract's)")


def require_formula(operator: str, batch: ResidualBatch, saved: Saved) -> None:
    """Raise ``ValueError`` unless the forward behind ``saved`` ran the ``controller_rms`` of the batch's contract."""
    got, wanted = saved_controller_rms(operator, saved), batch.contract.controller_rms
    if got != wanted:
        raise ValueError(f"{operator}: saved: controller_rms: got {got!r}, want {wanted!r} (the contract's)")


def _note(trace: MHCTrace, batch: ResidualBatch) -> None:
    contract = batch.contract
    profile = get_profile(contract.numeric_profile)
    trace.note("reduction_tree", f"{profile.long_reduction_order}; {profile.stream_tree}")
    trace.note("fma", profile.fma)
    trace.note("rsqrt", profile.elementary)
    trace.note("downcast_points", list(profile.downcast_points))
    trace.note("fusion_mode", contract.fusion_mode)
    trace.note("trainability", contract.trainability)
    if contract.controller_rms != P1_RMS:
        trace.note("controller_rms", contract.controller_rms)
    trace.note("weight_fingerprint", batch.weight_fingerprint or batch.compute_weight_fingerprint())
