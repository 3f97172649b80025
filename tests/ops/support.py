"""What the tests of the operations share: the calls, their inputs and gradients, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_engine.mhc import ops
from rl_engine.mhc.contract import (
    CONTROLLER_RMS,
    ORACLE_PROFILE,
    PORTABLE_PROFILE,
    GradBoundary,
    LayerContract,
    ResidualBatch,
)
from rl_engine.mhc.fixture_inputs import draw_batch, draw_grads, draws_for
from rl_engine.mhc.provider import ReferenceProvider

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Grads = dict[str, Tensor | None]

PROFILES = (ORACLE_PROFILE, PORTABLE_PROFILE)
FORMULAS = CONTROLLER_RMS
FUSED = "tests.ops.providers:FusedBackward"
BACKENDS = ("native", "reference", FUSED)
CONTROLLER = ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias")
_SETTINGS = ("eps", "controller_rms", "fusion_mode", "numeric_profile")


@contextmanager
def backend(spec: str, numeric_profile: str) -> Iterator[Any]:
    """Within the block ``spec`` computes on the CPU; ``native`` is what is registered anyway."""
    if spec == "native":
        yield ops.backend_for("cpu", numeric_profile)
        return
    with ops.using_backend("cpu", numeric_profile, spec) as provider:
        yield provider


def batch_and_grads(
    name: str, tokens: int, hidden: int, numeric_profile: str, formula: str = FORMULAS[0], **modes: str
) -> tuple[ResidualBatch, GradBoundary]:
    contract = LayerContract(hidden=hidden, numeric_profile=numeric_profile, controller_rms=formula)
    batch = draw_batch(name, tokens, replace(contract, **modes))  # type: ignore[arg-type]
    return batch, draw_grads(name, batch)


def parameters_of(batch: ResidualBatch) -> dict[str, Tensor]:
    return {name: getattr(batch.controller, name) for name in CONTROLLER} | {"gamma": batch.norm.gamma}


def head_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A head's parameters: the rows of PRE."""
    weight, bias = (parameters[name][:4].clone() for name in ("weight", "bias"))
    return {"weight": weight, "alpha": parameters["alpha_pre"], "bias": bias}


@dataclass(frozen=True)
class Call:
    """One public function on one set of inputs, and a gradient for each of its outputs."""

    name: str
    function: Callable[..., Any]
    inputs: dict[str, Tensor]
    settings: dict[str, Any]
    grads: Tensors

    def outputs(self, inputs: Mapping[str, Tensor] | None = None) -> Tensors:
        found = self.function(*(self.inputs if inputs is None else inputs).values(), **self.settings)
        return found if isinstance(found, tuple) else (found,)

    @property
    def op(self) -> Any:
        return getattr(torch.ops.rl_mhc, self.name).default

    def op_arguments(self) -> tuple[Any, ...]:
        """The arguments of the registered operation."""
        return (*self.inputs.values(), *(self.settings[key] for key in _SETTINGS if key in self.settings))


def calls(profile: str, formula: str = FORMULAS[0], tokens: int = 3, hidden: int = 64) -> dict[str, Call]:
    """A call of every public function by its name. Gradients of BF16 outputs are BF16."""
    batch, arriving = batch_and_grads("ops", tokens, hidden, profile, formula)
    draws = draws_for(profile, "ops.draws")
    r, y, p = batch.r_old, batch.y_sublayer, parameters_of(batch)
    h, x_flat = draws(tokens, 24), batch.r_old.flatten(1).clone()
    pre, post, c, _ = ReferenceProvider(profile).hc_split_sinkhorn_fwd(h)
    d_p, d_scale, d_pre, d_post, d_c = (draws(tokens, *shape) for shape in ((24,), (), (4,), (4,), (4, 4)))
    dr, dn, skip = arriving.d_r_new, arriving.d_normalized, arriving.d_residual
    named = {"numeric_profile": profile}
    rms = {**named, "controller_rms": formula}
    gates = {"r_old": r, "y": y, "c": c, "post": post}
    link = torch.zeros((), dtype=torch.bfloat16).expand(r.shape)
    found = [
        Call("hc_split_sinkhorn", ops.hc_split_sinkhorn, {"h": h}, named, (d_pre, d_post, d_c)),
        Call(
            "fp32_gemm_rms",
            ops.fp32_gemm_rms,
            {"x_flat": x_flat, "weight": p["weight"]},
            {"eps": 1e-6, **rms},
            (d_p, d_scale),
        ),
        Call("h_aggregate", ops.h_aggregate, {"pre": pre, "r_old": r}, named, (dn,)),
        Call("mhc_post", ops.mhc_post, gates, named, (dr,)),
        Call("mhc_post_linked", ops.mhc_post_linked, {**gates, "link": link}, named, (dr,)),
        Call(
            "rmsnorm_residual", ops.rmsnorm_residual, {"x": y, "gamma": p["gamma"]}, {"eps": 1e-6, **named}, (dn, skip)
        ),
        Call("fixed_k_gemm", ops.fixed_k_gemm, {"x": x_flat, "w": p["weight"]}, named, (d_p,)),
        Call("expand_streams", ops.expand_streams, {"x": y}, named, (dr,)),
        Call("mhc_pre_rmsnorm", ops.mhc_pre_rmsnorm, {"r_old": r, **p}, rms, (dn, skip, d_post, d_c, dr)),
        Call("mhc_block", ops.mhc_block, {"r_old": r, "y": y, **p}, {**rms, "fusion_mode": "unfused"}, (dr, dn, skip)),
        Call("mhc_head", ops.mhc_head, {"r_old": r, **head_of(p)}, rms, (dn,)),
    ]
    return {call.name: call for call in found}


NAMES = tuple(calls(PROFILES[0], tokens=1, hidden=4))


def training(call: Call, wanted: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """The call's inputs as leaves of a graph, those in ``wanted`` (default: all) with a gradient."""
    names = tuple(call.inputs) if wanted is None else wanted
    return {name: t.detach().clone().requires_grad_(name in names) for name, t in call.inputs.items()}


def run(
    call: Call, wanted: tuple[str, ...] | None = None, only: tuple[int, ...] | None = None
) -> tuple[Tensors, Grads]:
    """Outputs, and gradients of ``wanted`` inputs where some arrive at the outputs ``only``; the default is all."""
    inputs = training(call, wanted)
    outputs = call.outputs(inputs)
    return outputs, gradients_of(inputs, outputs, call.grads, only)


def gradients_of(
    inputs: Mapping[str, Tensor], outputs: Tensors, grads: Tensors, only: tuple[int, ...] | None = None
) -> Grads:
    chosen = range(len(outputs)) if only is None else only
    leaves = {name: t for name, t in inputs.items() if t.requires_grad}
    found = torch.autograd.grad(
        [outputs[i] for i in chosen], list(leaves.values()), [grads[i] for i in chosen], allow_unused=True
    )
    return dict(zip(leaves, found, strict=True))
