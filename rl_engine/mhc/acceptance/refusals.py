"""Fail-closed: what a provider does not declare must be refused before any operator runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from rl_engine.mhc.acceptance.judge import guarded
from rl_engine.mhc.acceptance.observed import Observed
from rl_engine.mhc.acceptance.verdict import Check, Divergence
from rl_engine.mhc.block import (
    SUPPORTED_CONTROLLER_RMS,
    SUPPORTED_FUSION,
    SUPPORTED_PLACEMENTS,
    SUPPORTED_TRAINABILITY,
    mhc_block_forward,
)
from rl_engine.mhc.capabilities import declared_names
from rl_engine.mhc.contract import (
    CONTROLLER_RMS,
    FUSION_MODES,
    HC_MULT,
    PLACEMENTS,
    ROW_GEOMETRIES,
    TRAINABILITY_MODES,
    ResidualBatch,
)
from rl_engine.mhc.operators.interface import OPERATORS, OperatorSet, parameters_of

GROUP = "fail-closed"

_MODES = {
    "fusion_modes": ("fusion_mode", FUSION_MODES, SUPPORTED_FUSION),
    "trainability": ("trainability", TRAINABILITY_MODES, SUPPORTED_TRAINABILITY),
    "placements": ("placement", PLACEMENTS, SUPPORTED_PLACEMENTS),
    "controller_rms": ("controller_rms", CONTROLLER_RMS, SUPPORTED_CONTROLLER_RMS),
}


def refusal_checks(provider: Any, batch: ResidualBatch) -> list[Check]:
    """Every check of this group; ``batch`` is one that the provider serves."""
    checks = [_declaration(provider), _signatures(provider)]
    forward, _ = guarded(functools.partial(provider.mhc_pre_fwd, batch))
    saved = {} if forward is None else forward[-1]
    for key, (field, vocabulary, _) in _MODES.items():
        declared = declared_names(provider.capabilities(), key)
        for mode in (*vocabulary, f"no-such-{field.replace('_', '-')}"):
            if mode not in declared:
                contract = batch.contract.with_mode(field, mode)
                asked = dataclasses.replace(batch, contract=contract, weight_fingerprint="")
                checks += _refused(provider, f"{field} {mode}", asked, saved)
    return checks + _refused(provider, "a device that is not declared", _on_meta(batch), saved)


def _declaration(provider: Any) -> Check:
    """Nothing may be declared that the vocabulary lacks, or that no reference exists for."""
    declared, wrong = provider.capabilities(), []
    for key, (_, vocabulary, served) in _MODES.items():
        for mode in sorted(declared_names(declared, key) - set(served)):
            known = mode in vocabulary
            wrong.append(
                f"{key}: {mode!r} ({'no reference serves it, so nothing can verify it' if known else 'unknown'})"
            )
    wrong += [f"geometry: {g!r} (unknown)" for g in sorted(declared_names(declared, "geometry") - set(ROW_GEOMETRIES))]
    return _check("declares only what can be verified", wrong, "capabilities")


def _signatures(provider: Any) -> Check:
    """Every operator takes the parameters of the protocol, in its order.

    Who serves P1's formula alone need not take the name of one.
    """
    wrong, formulas = [], len(declared_names(provider.capabilities(), "controller_rms"))
    for operator in OPERATORS:
        wanted = parameters_of(getattr(OperatorSet, operator))
        if formulas < len(CONTROLLER_RMS):
            wanted = tuple(name for name in wanted if name != "controller_rms")
        got, error = guarded(functools.partial(parameters_of, getattr(provider, operator)))
        if error is not None or got[: len(wanted)] != wanted:
            wrong.append(f"{operator}({', '.join(got or ())}), want ({', '.join(wanted)})")
    return _check("signatures", wrong, "signature", len(OPERATORS))


def _refused(provider: Any, what: str, batch: ResidualBatch, saved: Any) -> list[Check]:
    """The block and the composites must raise a typed error for ``batch``, and no operator may have run by then."""
    checks = []
    entries = {
        "block": lambda ops: mhc_block_forward(batch, ops=ops),
        "mhc_pre_fwd": lambda ops: ops.mhc_pre_fwd(batch),
        "mhc_pre_rmsnorm_fused_fwd": lambda ops: ops.mhc_pre_rmsnorm_fused_fwd(batch),
        "mhc_pre_bwd": lambda ops: ops.mhc_pre_bwd(*_arriving(batch), batch, saved),
    }
    for entry, run in entries.items():
        observed = Observed(provider)
        _, error = guarded(functools.partial(run, observed))
        ran = sorted(set(observed.called) - {entry})
        wrong = []
        if error is None:
            wrong.append("accepted")
        elif not error.message.startswith("NotImplementedError") and not _names_the_mode(error.message):
            wrong.append(f"raised {error.message}")
        if ran:
            wrong.append(f"ran {', '.join(ran)} first")
        checks.append(_check(f"{entry} refuses {what}", wrong, entry))
    return checks


def _names_the_mode(message: str) -> bool:
    """A mode that no vocabulary has may be a ``ValueError`` too, if the message is about the mode."""
    return message.startswith("ValueError") and any(field in message for field, _, _ in _MODES.values())


def _arriving(batch: ResidualBatch) -> list[torch.Tensor]:
    """``dhidden, dpost, dc`` of zeros for ``mhc_pre_bwd``."""
    t, d = batch.tokens, batch.hidden
    shapes = ((t, d), (t, HC_MULT), (t, HC_MULT, HC_MULT))
    return [torch.zeros(shape, dtype=torch.float32, device=batch.r_old.device) for shape in shapes]


def _on_meta(batch: ResidualBatch) -> ResidualBatch:
    """The batch on the ``meta`` device, which has no bytes and which no provider serves."""
    return dataclasses.replace(batch, weight_fingerprint="").to(torch.device("meta"))


def _check(name: str, wrong: list[str], boundary: str, comparisons: int = 1) -> Check:
    detail = "; ".join(wrong)
    found = (Divergence(boundary, "refusal", detail),) if wrong else ()
    return Check(GROUP, name, "", "fail" if wrong else "pass", comparisons, detail, found)
