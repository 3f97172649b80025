"""What the contract says of a call: its outputs and the gradients of its inputs, by the reference operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rl_engine.mhc import block
from rl_engine.mhc.bits import differing, same_bytes
from rl_engine.mhc.contract import ControllerParams, GradBoundary, LayerContract, NormParams, ResidualBatch
from rl_engine.mhc.provider import ReferenceProvider
from tests.ops.support import CONTROLLER, Call, Grads, Tensors

Tensor = torch.Tensor


def expected(call: Call, only: tuple[int, ...] | None = None) -> tuple[Tensors, Grads]:
    """Outputs and gradients; the gradients of outputs that are not in ``only`` are zeros."""
    ref = ReferenceProvider(call.settings["numeric_profile"])
    grads = tuple(
        g if only is None or i in only else torch.zeros(g.shape, dtype=g.dtype) for i, g in enumerate(call.grads)
    )
    outputs, found = _EXPECTED[call.name](ref, call, grads, only is None or 4 in only)
    rounded = {name: None if g is None else g.to(call.inputs[name].dtype) for name, g in found.items()}
    return outputs, rounded


def batch_of(call: Call, y: Tensor | None = None) -> ResidualBatch:
    """The batch of a call of a composite."""
    inputs, settings = call.inputs, call.settings
    r, gamma = inputs["r_old"], inputs["gamma"]
    contract = LayerContract(
        hidden=r.shape[2],
        numeric_profile=settings["numeric_profile"],
        controller_rms=settings["controller_rms"],
        gamma_dtype=str(gamma.dtype).removeprefix("torch."),
    )
    controller = ControllerParams(*(inputs[name] for name in CONTROLLER))
    y = inputs["y"] if y is None else y
    return ResidualBatch(r, y, controller, NormParams(gamma), torch.arange(len(r)), contract)


def _sinkhorn(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    *outputs, saved = ref.hc_split_sinkhorn_fwd(call.inputs["h"])
    return tuple(outputs), {"h": ref.hc_split_sinkhorn_bwd(*grads, saved)}


def _gemm_rms(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    x, w = call.inputs.values()
    p, r, saved = ref.fp32_gemm_rms_fwd(x, w, call.settings["eps"], call.settings["controller_rms"])
    dx, dw = ref.fp32_gemm_rms_bwd(*grads, x, w, saved)
    return (p, r), {"x_flat": dx, "weight": dw}


def _aggregate(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    pre, r = call.inputs.values()
    d_r, d_pre = ref.h_aggregate_bwd(grads[0], pre, r)
    return (ref.h_aggregate_fwd(pre, r),), {"pre": d_pre, "r_old": d_r}


def _post(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    gates = list(call.inputs.values())[:4]
    d_r, d_y, d_c, d_post = ref.mhc_post_bwd(grads[0], *gates)
    return (ref.mhc_post_fwd(*gates),), {"r_old": d_r, "y": d_y, "c": d_c, "post": d_post}


def _post_linked(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    outputs, found = _post(ref, call, grads, _)
    return outputs, {**found, "r_old": None, "link": grads[0]}


def _rmsnorm(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    x, gamma = call.inputs.values()
    y, residual, saved = ref.rmsnorm_residual_fwd(x, gamma, call.settings["eps"])
    dx, d_gamma = ref.rmsnorm_residual_bwd(*grads, x, gamma, saved)
    return (y, residual), {"x": dx, "gamma": d_gamma}


def _fixed_gemm(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    x, w = call.inputs.values()
    dx, dw = ref.fixed_k_gemm_bwd(grads[0], x, w)
    return (ref.fixed_k_gemm_fwd(x, w),), {"x": dx, "w": dw}


def _expand(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    x, g = call.inputs["x"], grads[0].float()
    tree = (g[:, 0] + g[:, 1]) + (g[:, 2] + g[:, 3])
    return (torch.stack([x] * 4, dim=1),), {"x": tree}


def _controller(grads: Grads) -> Grads:
    return {name: grads[key] for name, key in zip(CONTROLLER, block.CONTROLLER_GRADS, strict=True)}


def _pre_rmsnorm(ref: Any, call: Call, grads: Tensors, linked: bool) -> tuple[Tensors, Grads]:
    r = call.inputs["r_old"]
    batch = batch_of(call, y=torch.zeros(len(r), r.shape[2], dtype=torch.bfloat16))
    hidden, normalized, residual, post, c, saved = ref.mhc_pre_rmsnorm_fused_fwd(batch)
    dn, skip, d_post, d_c, d_r_new = grads
    d_hidden, d_gamma = ref.rmsnorm_residual_bwd(dn, skip, hidden, batch.norm.gamma, saved["norm"])
    found = ref.mhc_pre_bwd(d_hidden, d_post, d_c, batch, saved)
    d_r = found["d_r_old"]
    if linked:
        d_r = d_r + ref.mhc_post_bwd(d_r_new, r, batch.y_sublayer, c, post)[0]
    link = torch.zeros(r.shape, dtype=r.dtype)
    return (normalized, residual, post, c, link), {"r_old": d_r, **_controller(found), "gamma": d_gamma}


def _block(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    d_r_new, d_normalized, d_residual = grads
    batch = batch_of(call)
    batch = replace(batch, contract=replace(batch.contract, fusion_mode=call.settings["fusion_mode"]))
    r_new, saved = block.mhc_block_forward(batch, ops=ref)
    found = block.mhc_block_backward(batch, saved, GradBoundary(d_r_new, d_normalized, d_residual), ops=ref)
    named = {"r_old": found["d_r_old"], "y": found["dy_sublayer"], **_controller(found), "gamma": found["d_gamma"]}
    return (r_new, saved["normalized"], saved["residual"]), named


def _head(ref: Any, call: Call, grads: Tensors, _: bool) -> tuple[Tensors, Grads]:
    """By the reference's ``mhc_pre`` over a controller whose other rows are zero."""
    r, weight, alpha, bias = call.inputs.values()
    rest = {"alpha_post": torch.zeros(1), "alpha_res": torch.zeros(1), "gamma": torch.ones(r.shape[2]).bfloat16()}
    whole = {
        "weight": torch.cat([weight, torch.zeros(20, weight.shape[1])]),
        "bias": torch.cat([bias, torch.zeros(20)]),
    }
    batch = batch_of(replace(call, inputs={"r_old": r, **whole, "alpha_pre": alpha, **rest}), y=r[:, 0])
    hidden, *_, saved = ref.mhc_pre_fwd(batch)
    found = ref.mhc_pre_bwd(grads[0], torch.zeros(len(r), 4), torch.zeros(len(r), 4, 4), batch, saved)
    named = {"r_old": found["d_r_old"], "alpha": found["d_alpha_pre"]}
    return (hidden,), {**named, "weight": found["d_controller_weight"][:4], "bias": found["d_bias"][:4]}


_EXPECTED = {
    "hc_split_sinkhorn": _sinkhorn,
    "fp32_gemm_rms": _gemm_rms,
    "h_aggregate": _aggregate,
    "mhc_post": _post,
    "mhc_post_linked": _post_linked,
    "rmsnorm_residual": _rmsnorm,
    "fixed_k_gemm": _fixed_gemm,
    "expand_streams": _expand,
    "mhc_pre_rmsnorm": _pre_rmsnorm,
    "mhc_block": _block,
    "mhc_head": _head,
}


def differences(
    got: tuple[Tensors, Grads], want: tuple[Tensors, Grads], wanted: tuple[str, ...] | None = None
) -> list[str]:
    """One line for each output, and each gradient of ``wanted``, of other bytes; NaN payloads are no difference."""
    outputs = {f"output {i}": t for i, t in enumerate(got[0])}, {f"output {i}": t for i, t in enumerate(want[0])}
    names = tuple(want[1]) if wanted is None else wanted
    found: Grads = {**outputs[0], **got[1]}
    sought: Grads = {**outputs[1], **{name: want[1][name] for name in names}}
    lines = [f"{name}: in one of them only" for name in found.keys() ^ sought.keys()]
    for name in found.keys() & sought.keys():
        a, b = found[name], sought[name]
        if a is None or b is None:
            lines += [f"{name}: None in one of them only"] if a is not b else []
        elif a.shape != b.shape or a.dtype != b.dtype:
            lines.append(f"{name}: {a.dtype} {tuple(a.shape)}, want {b.dtype} {tuple(b.shape)}")
        elif not same_bytes(a, b):
            lines.append(f"{name}: {int(differing(a, b).sum())} of {a.numel()} differ")
    return lines
