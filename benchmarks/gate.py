"""Correctness before speed: a strict implementation has the oracle's bytes, or it has no time.

Whole blocks, forward and backward, are compared on a small case and at the benchmarked width; of the inputs that are
timed, the first rows, since the oracle is slow and no operator mixes rows. Of an implementation that promises no bytes
the largest relative error is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.implementations import FORWARD_OUTPUTS, GRADIENTS, Implementation, Tensors, contract_runs, oracle_ops
from benchmarks.inputs import Inputs
from benchmarks.operator_calls import contract_call, returned_tensors
from rl_engine.mhc.bits import tensor_difference
from rl_engine.mhc.elementary import ORACLE_PROFILE

ROWS = 3
PER_TOKEN = ("d_r_old", "dy_sublayer", "d_hidden", "d_c", "d_post")
"""Gradients whose rows depend on their own token alone."""


@dataclass(frozen=True)
class Finding:
    """What the gate knows of one implementation: ``red`` says why it has no time, ``error`` is of one that may err."""

    implementation: str
    compared: int = 0
    red: str = ""
    error: float | None = None
    worst: str = ""

    def merged(self, other: Finding) -> Finding:
        """Both: the first reason, the larger error."""
        ahead = other if (other.error or -1.0) > (self.error or -1.0) else self
        return replace(
            self,
            compared=self.compared + other.compared,
            red=self.red or other.red,
            error=ahead.error,
            worst=ahead.worst,
        )


def byte_difference(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], where: str) -> str:
    """The first tensor that is not the oracle's, with its first element; empty where there is none."""
    for name, wanted in want.items():
        if name not in got:
            continue
        found = got[name]
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            return f"{where}: {name}: {found.dtype} {tuple(found.shape)}, want {wanted.dtype} {tuple(wanted.shape)}"
        difference = tensor_difference(found, wanted)
        if difference is not None:
            return (
                f"{where}: {name}: {difference.count} of {difference.total} elements differ, first at "
                f"{list(difference.index)}: got {difference.candidate_hex} ({difference.candidate:.9g}), "
                f"want {difference.reference_hex} ({difference.reference:.9g})"
            )
    return ""


def relative_error(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest |got - want| over the largest |want|, and the tensor it is in; NaN counts as infinite."""
    worst, name = 0.0, ""
    for key, wanted in want.items():
        if key in got and wanted.numel():
            scale = float(wanted.double().abs().max()) or 1.0
            error = float((got[key].double() - wanted.double()).abs().max()) / scale
            error = error if error == error else float("inf")
            if error >= worst:
                worst, name = error, key
    return worst, name


def judged(one: Implementation, got: Tensors, want: Tensors, required: Iterable[str], where: str) -> Finding:
    """Compare what an implementation returned with the oracle's."""
    missing = [name for name in required if name not in got]
    if missing:
        return Finding(one.name, red=f"{where}: not returned: {', '.join(missing)}")
    compared = sum(name in want for name in got)
    if one.strict:
        return Finding(one.name, compared, byte_difference(got, want, where))
    error, worst = relative_error(got, want)
    return Finding(one.name, compared, error=error, worst=f"{worst} in {where}")


def oracle_tensors(one: Implementation, inputs: Inputs) -> Tensors:
    """Every tensor of a forward and a backward, by the oracle of the implementation's profile."""
    profile = one.profile or ORACLE_PROFILE
    runs = contract_runs(oracle_ops(profile), inputs.under(profile))
    return runs.both_tensors(runs.both())


def whole_block(one: Implementation, inputs: Inputs) -> Finding:
    """Forward, then forward and backward, every tensor."""
    where = f"T={inputs.tokens}, D={inputs.batch.hidden}"
    want, runs = oracle_tensors(one, inputs), one.make(inputs)
    forward = runs.forward_tensors(runs.forward())
    both = runs.both_tensors(runs.both())
    return judged(one, forward, want, FORWARD_OUTPUTS, f"{where}, forward").merged(
        judged(one, both, want, (*FORWARD_OUTPUTS, *GRADIENTS), where)
    )


def numbered(returned: Any) -> Tensors:
    """The tensors that an operator returned, by their place."""
    return {f"result {i}": t for i, t in enumerate(returned_tensors(returned))}


def single_operators(one: Implementation, inputs: Inputs, names: Iterable[str]) -> Finding:
    """The operators that will be timed alone."""
    found = Finding(one.name)
    if one.operator is None:
        return found
    profile = one.profile or ORACLE_PROFILE
    for name in (name for name in names if name in one.operators):
        wanted = numbered(contract_call(oracle_ops(profile), inputs.under(profile), name)())
        got = numbered(one.operator(inputs, name)())
        found = found.merged(judged(one, got, wanted, wanted, f"T={inputs.tokens}, {name} alone"))
    return found


def gate(one: Implementation, cases: Iterable[Inputs], operators: Iterable[str]) -> Finding:
    """All of the above; whatever is raised makes it red. A compiled peer is judged on the timed inputs only."""
    found, names = Finding(one.name), tuple(operators)
    if one.is_reference or (one.compiled and not one.strict):
        return found
    try:
        for inputs in cases:
            found = found.merged(whole_block(one, inputs)).merged(single_operators(one, inputs, names))
            if found.red:
                break
    except Exception as error:  # no time for what does not run, and the others go on
        return replace(found, red=f"raised {type(error).__name__}: {' '.join(str(error).split())}")
    return found


@dataclass
class FirstRows:
    """The first rows of what timed calls return, against the oracle on those rows alone, which is asked once."""

    full: Inputs
    known: dict[tuple[str, int], Tensors] = field(default_factory=dict)

    def judge(self, one: Implementation, tokens: int, got: Tensors) -> Finding:
        """``got`` are the results of the first ``tokens`` rows of ``full``."""
        if one.is_reference:
            return Finding(one.name)
        rows = min(ROWS, tokens)
        key = (one.profile or ORACLE_PROFILE, rows)
        if key not in self.known:
            self.known[key] = oracle_tensors(one, self.full.first(rows))
        shown = {name: tensor[:rows] for name, tensor in got.items() if name in PER_TOKEN or "." in name}
        where = f"the first {rows} of T={tokens}, D={self.full.batch.hidden}"
        return judged(one, shown, self.known[key], FORWARD_OUTPUTS, where)
