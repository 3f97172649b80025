"""The one registry of what is timed: the native backend, the oracle, and three peers.

An entry says what it promises (``strict``: the oracle's bytes under ``profile``), how many threads it gets, and how
to make the calls. A call that is timed is the call that the gate checks: ``forward_tensors`` and ``both_tensors`` only
name what it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import hf
from benchmarks.eager import EagerBlock
from benchmarks.inputs import Inputs
from benchmarks.operator_calls import EAGER_OPERATORS, contract_call, eager_call
from rl_engine.mhc import block, oracle
from rl_engine.mhc.block import CONTROLLER_GRADS
from rl_engine.mhc.contract import GradBoundary, ResidualBatch
from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.operators.interface import LEAF_OPERATORS
from rl_engine.mhc.provider import ReferenceProvider, resolve_provider

Tensors = dict[str, Tensor]
Call = Callable[[], Any]

FORWARD_KEYS = {
    "p": "controller.p",
    "r": "controller.r",
    "h": "controller.h",
    "pre": "split.pre",
    "post": "split.post",
    "c": "split.c",
    "hidden": "pre.hidden",
    "normalized": "norm.normalized",
    "residual": "norm.residual",
}
"""Boundary of each key of ``saved``."""
FORWARD_OUTPUTS = ("norm.normalized", "norm.residual", "post.r_new")
"""What every implementation returns from a forward."""
GRADIENTS = ("d_r_old", "dy_sublayer", "d_gamma", *CONTROLLER_GRADS)
"""What every implementation returns from a backward, in the order of a peer's leaves."""


@dataclass(frozen=True)
class Runs:
    """The calls to time on fixed inputs, and how to name the tensors that they return."""

    forward: Call
    both: Call
    forward_tensors: Callable[[Any], Tensors]
    both_tensors: Callable[[Any], Tensors]


@dataclass(frozen=True)
class Implementation:
    """One row of the benchmark. ``threads`` of ``None`` means those of the command."""

    name: str
    about: str
    profile: str | None
    strict: bool
    threads: int | None
    make: Callable[[Inputs], Runs]
    unavailable: Callable[[], str]
    operators: tuple[str, ...] = ()
    operator: Callable[[Inputs, str], Call] | None = None
    max_tokens: int | None = None
    compiled: bool = False
    is_reference: bool = False


def contract_runs(ops: Any, inputs: Inputs) -> Runs:
    """Forward and forward + backward of a provider or the oracle module."""
    batch, grads = inputs.batch, inputs.grads

    def both() -> Any:
        r_new, saved = ops.mhc_block_forward(batch)
        return r_new, saved, ops.mhc_block_backward(batch, saved, grads)

    def forward_tensors(returned: Any) -> Tensors:
        r_new, saved = returned
        return {boundary: saved[key] for key, boundary in FORWARD_KEYS.items() if key in saved} | {"post.r_new": r_new}

    def both_tensors(returned: Any) -> Tensors:
        return forward_tensors(returned[:2]) | {k: t for k, t in returned[2].items() if t is not None}

    return Runs(lambda: ops.mhc_block_forward(batch), both, forward_tensors, both_tensors)


class _PortableOracle(ReferenceProvider):
    """The reference operators of a profile with the canonical block over them."""

    def mhc_block_forward(self, batch: ResidualBatch) -> Any:
        return block.mhc_block_forward(batch, ops=self)

    def mhc_block_backward(self, batch: ResidualBatch, saved: Any, grads: GradBoundary) -> Any:
        return block.mhc_block_backward(batch, saved, grads, ops=self)


def oracle_ops(profile: str) -> Any:
    """The oracle of a profile: ``rl_engine.mhc.oracle`` itself, or the reference operators of another profile."""
    return oracle if profile == ORACLE_PROFILE else _PortableOracle(profile)


def native_ops(profile: str) -> Any:
    """The native provider; ``ValueError`` where it cannot be had or has no block."""
    provider: Any = resolve_provider("native", profile)
    missing = [name for name in ("mhc_block_forward", "mhc_block_backward") if not hasattr(provider, name)]
    if missing:
        raise ValueError(f"the native provider lacks {', '.join(missing)}")
    return provider


def peer_runs(module: torch.nn.Module, inputs: Inputs, compiled: bool) -> Runs:
    """Forward without autograd, and forward + backward through it, of an ``nn.Module`` with ``leaves()``."""
    batch, grads = inputs.batch, inputs.grads
    run: Any = torch.compile(module, dynamic=False) if compiled else module
    r_leaf, y_leaf = (t.detach().clone().requires_grad_() for t in (batch.r_old, batch.y_sublayer))
    leaves: Any = module
    weight, alpha, bias, gamma = leaves.leaves()
    arriving = (grads.d_r_new, grads.d_normalized, grads.d_residual)

    def forward() -> Any:
        with torch.no_grad():
            return run(batch.r_old, batch.y_sublayer)

    def both() -> Any:
        outputs = run(r_leaf, y_leaf)
        return outputs, torch.autograd.grad(outputs, (r_leaf, y_leaf, gamma, weight, alpha, bias), arriving)

    def forward_tensors(returned: Any) -> Tensors:
        r_new, normalized, hidden = (t.detach() for t in returned)
        return {"norm.normalized": normalized, "norm.residual": hidden, "post.r_new": r_new}

    def both_tensors(returned: Any) -> Tensors:
        outputs, (d_r_old, dy, d_gamma, d_weight, d_alpha, d_bias) = returned
        found = (d_r_old, dy, d_gamma, d_weight, *d_alpha.split(1), d_bias)
        return forward_tensors(outputs) | dict(zip(GRADIENTS, found, strict=True))

    return Runs(forward, both, forward_tensors, both_tensors)


def _always() -> str:
    return ""


def _native_unavailable(profile: str) -> str:
    try:
        native_ops(profile)
    except Exception as error:  # whatever keeps it from loading is the reason
        return " ".join(str(error).split())
    return ""


def _native(name: str, profile: str, threads: int | None) -> Implementation:
    return Implementation(
        name=name,
        about=f"the native backend, {profile}" + (f", {threads} thread" if threads else ""),
        profile=profile,
        strict=True,
        threads=threads,
        make=lambda inputs: contract_runs(native_ops(profile), inputs.under(profile)),
        unavailable=lambda: _native_unavailable(profile),
        operators=LEAF_OPERATORS if threads is None else (),
        operator=lambda inputs, op: contract_call(native_ops(profile), inputs.under(profile), op),
    )


def _peer(name: str, about: str, module: Any, compiled: bool, unavailable: Callable[[], str]) -> Implementation:
    return Implementation(
        name=name,
        about=about,
        profile=None,
        strict=False,
        threads=None,
        make=lambda inputs: peer_runs(module(inputs.batch), inputs, compiled),
        unavailable=unavailable,
        operators=EAGER_OPERATORS if name == "eager" else (),
        operator=eager_call if name == "eager" else None,
        compiled=compiled,
    )


def _oracle() -> Implementation:
    return Implementation(
        name="oracle",
        about="rl_engine.mhc.oracle, the definition",
        profile=ORACLE_PROFILE,
        strict=True,
        threads=None,
        make=lambda inputs: contract_runs(oracle_ops(ORACLE_PROFILE), inputs),
        unavailable=_always,
        operators=LEAF_OPERATORS,
        operator=lambda inputs, op: contract_call(oracle_ops(ORACLE_PROFILE), inputs, op),
        max_tokens=16,
        is_reference=True,
    )


_ENTRIES = (
    _native("native", ORACLE_PROFILE, None),
    _native("native-portable", PORTABLE_PROFILE, None),
    _native("native-1t", ORACLE_PROFILE, 1),
    _native("native-portable-1t", PORTABLE_PROFILE, 1),
    _peer("eager", "plain PyTorch, autograd", EagerBlock, False, _always),
    _peer("compile", "the same under torch.compile", EagerBlock, True, _always),
    _peer("hf", "HF transformers' DeepSeek-V4 hyper-connection", hf.HFBlock, False, hf.unavailable),
    _peer("hf-compile", "the same under torch.compile", hf.HFBlock, True, hf.unavailable),
    _oracle(),
)
IMPLEMENTATIONS: Mapping[str, Implementation] = {entry.name: entry for entry in _ENTRIES}
