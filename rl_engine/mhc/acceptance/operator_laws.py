"""The laws of an operator called by itself: the oracle's bytes in any memory, rows alone, arguments untouched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from rl_engine.mhc.acceptance.invariance import poisoned_allocations, sampled
from rl_engine.mhc.acceptance.judge import changed, compare, copied, guarded, storages
from rl_engine.mhc.acceptance.layouts import LAYOUTS, Layout
from rl_engine.mhc.acceptance.observed import Observed
from rl_engine.mhc.acceptance.operator_cases import Inputs, OperatorCase, Outputs
from rl_engine.mhc.acceptance.verdict import Check, Divergence
from rl_engine.mhc.operators import reference_operators
from rl_engine.mhc.profiles import get_profile

GROUP = "operators"
REFUSALS = ("NotImplementedError", "ValueError")

Found = tuple[int, tuple[Divergence, ...]]


class OperatorProber:
    """Runs a candidate's operators on the inputs of one case and turns each comparison into a ``Check``."""

    def __init__(self, ops: Observed, case: OperatorCase, inputs: Inputs, numeric_profile: str) -> None:
        """``inputs`` are on the device of the run."""
        self.ops, self.case, self.inputs = ops, case, inputs
        self.profile = get_profile(numeric_profile)
        self.reference = case.run(reference_operators(numeric_profile), inputs)

    def all_checks(self, standard: str) -> Iterator[Check]:
        """The comparison with the oracle, named ``standard``; where it holds, one check a law."""
        first = self.check(standard, self.equal)
        yield first
        if first.status != "pass" or first.detail:
            return
        yield self.check("poisoned allocations", self.poisoned)
        for name, layout in LAYOUTS.items():
            yield self.check(f"{name} inputs", functools.partial(self.layout, layout))
        if self.case.row_inputs:
            yield self.check("each row alone", self.rows_alone)

    def check(self, name: str, probe: Callable[[], Found]) -> Check:
        """The check of one probe. Where the case allows it, a refusal passes and is said in the detail."""
        outcome, error = guarded(probe)
        if error is not None and self.case.may_refuse and error.message.startswith(REFUSALS):
            return Check(GROUP, name, self.case.name, "pass", 1, f"refused: {error.message}")
        count, found = (0, (error,)) if error is not None else outcome
        detail = "" if not found else f"{found[0].boundary}: {found[0].message}"
        return Check(GROUP, name, self.case.name, "fail" if found else "pass", count, detail, found)

    def run(self, inputs: Inputs) -> Outputs:
        """One run of the candidate."""
        return self.case.run(self.ops, inputs)

    def equal(self) -> Found:
        """The oracle's bytes, with the arguments left as they were and no output in their storage."""
        inputs = tuple(t.clone() for t in self.inputs)
        before = copied(inputs)
        with self.ops.watched():
            found = compare(self.run(inputs), self.reference, self.profile)
        misuse = tuple(self.ops.misuse)
        if changed(before) and not misuse:
            misuse = (Divergence(next(iter(self.reference)), "storage", "an argument was changed"),)
        return len(self.reference), misuse + found

    def poisoned(self) -> Found:
        """With every fresh allocation filled with NaN."""
        with poisoned_allocations():
            return 1, compare(self.run(tuple(t.clone() for t in self.inputs)), self.reference, self.profile)

    def layout(self, layout: Layout) -> Found:
        """Every argument in another memory layout."""
        inputs = tuple(layout(t) for t in self.inputs)
        around = storages(inputs)
        found = compare(self.run(inputs), self.reference, self.profile)
        where = next(iter(self.reference))
        return 1, (*found, *(Divergence(where, "storage", f"memory around input {p} changed") for p in changed(around)))

    def rows_alone(self) -> Found:
        """Each row (a sample of many) by itself, against that row of the whole."""
        whole = self.run(self.inputs)
        chosen = sampled(self.inputs[self.case.row_inputs[0]].shape[0])
        for row in chosen:
            index = torch.tensor([row], dtype=torch.int64, device=self.inputs[0].device)
            alone = self.run(tuple(t[index] if i in self.case.row_inputs else t for i, t in enumerate(self.inputs)))
            names = self.case.row_outputs
            found = compare({n: alone[n] for n in names}, {n: whole[n][index] for n in names})
            if found:
                return len(chosen), found
        return len(chosen), ()
