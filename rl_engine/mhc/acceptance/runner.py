"""The acceptance run: which checks, in which order, on which cases."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_engine.mhc.acceptance import layouts, surroundings
from rl_engine.mhc.acceptance.cases import DEFAULT_TOKENS, GEOMETRIES, Case, geometry_specs, seeded_specs
from rl_engine.mhc.acceptance.invariance import SWEEP_TOKENS, Prober, storage_check, sweep
from rl_engine.mhc.acceptance.judge import Run, changed, compare, copied, guarded, run_block
from rl_engine.mhc.acceptance.observed import Observed
from rl_engine.mhc.acceptance.operator_cases import OPERATOR_CASES, OperatorCase
from rl_engine.mhc.acceptance.operator_laws import OperatorProber
from rl_engine.mhc.acceptance.origin import environment, golden_checks, origin_checks, provenance
from rl_engine.mhc.acceptance.refusals import refusal_checks
from rl_engine.mhc.acceptance.verdict import Check, Divergence, Verdict
from rl_engine.mhc.acceptance.whole_block import has_whole_block, whole_block_check
from rl_engine.mhc.capabilities import declared_names
from rl_engine.mhc.contract import CONTROLLER_RMS, FUSION_MODES, TRAINABILITY_MODES
from rl_engine.mhc.float_mode import require_subnormals
from rl_engine.mhc.operators import reference_operators
from rl_engine.mhc.profiles import NumericProfile, get_profile
from rl_engine.mhc.provider import MHCProvider, check_capability, owning_task, unimplemented_operators

Progress = Callable[[str, int, int], None]
"""``progress(what runs now, steps done, steps in all)``."""

SWEPT_CASE = "packed_t16"


@dataclass(frozen=True)
class Options:
    """What to run: a device, a geometry with its number of tokens, names of cases (empty: all), a seed, repeats.

    ``captured`` is a case of the user's own; with it, only that one is run. ``numeric_profile`` is the profile of
    the cases; empty means the one that the provider declares.
    """

    device: str = "cpu"
    geometry: str = "fixture"
    tokens: int = DEFAULT_TOKENS
    cases: tuple[str, ...] = ()
    seed: int | None = None
    repeat: int = 2
    captured: Case | None = None
    numeric_profile: str = ""


def available_cases(options: Options) -> dict[str, str]:
    """Case name to what it is for: block cases, then operator cases."""
    if options.captured is not None:
        return {options.captured.name: options.captured.about}
    specs = geometry_specs(options.geometry, options.tokens)
    if options.seed is not None:
        specs += seeded_specs(options.seed, options.geometry, options.tokens)
    return {spec.name: spec.about for spec in specs} | {case.name: case.about for case in OPERATOR_CASES}


def judge_provider(provider: MHCProvider, options: Options | None = None, progress: Progress | None = None) -> Verdict:
    """Judge a provider by the oracle of the profile that it declares, on ``options.device``.

    Never raises for what the provider does: exceptions, refusals and differences are findings. ``ValueError`` for
    an option that is wrong (an unknown case or geometry).
    """
    options = options or Options()
    if options.geometry not in GEOMETRIES:
        raise ValueError(f"geometry: got {options.geometry!r}, want one of: {', '.join(GEOMETRIES)}")
    unknown = set(options.cases) - set(available_cases(options))
    if unknown:
        known = ", ".join(available_cases(options))
        raise ValueError(f"cases: got {', '.join(sorted(unknown))}, want some of: {known}")
    started = time.monotonic()
    verdict = _Session(provider, options, progress or (lambda *_: None)).verdict()
    return dataclasses.replace(verdict, seconds=time.monotonic() - started)


class _Session:
    """One run of the judge: it collects checks and refusals as it goes."""

    def __init__(self, provider: MHCProvider, options: Options, progress: Progress) -> None:
        self.provider, self.options, self.progress = provider, options, progress
        self.device = torch.device(options.device)
        self.profile = options.numeric_profile or str(getattr(provider, "numeric_profile", ""))
        self.known: NumericProfile | None = None
        self.checks: list[Check] = []
        self.refusals: dict[str, list[str]] = {}
        self.done = self.total = 0

    def verdict(self) -> Verdict:
        """Run everything that the provider is declared for."""
        observed, stated = None, {}
        sound = not self.refuse("all cases", require_subnormals)
        if sound and not self.refuse("all cases", lambda: reference_operators(self.profile)):
            self.known = get_profile(self.profile)
            base, cases = self.cases()
            served = [case for case in cases if not self.refuse(case.name, functools.partial(self.gate, case))]
            operators = self.operator_cases()
            if operators and not served and self.refuse("operator cases", lambda: self.gate(base)):
                operators = []
            if served or operators:
                observed = Observed(self.provider)
                self.run(observed, served[0] if served else base, served, operators)
                stated = provenance(observed)
        return Verdict(
            provider=str(self.provider.name),
            numeric_profile=self.profile,
            device=str(self.device),
            provenance=stated,
            environment=environment(self.device),
            options=_stated(self.options),
            checks=tuple(self.checks),
            refusals=tuple(f"{_listed(names)}: {reason}" for reason, names in self.refusals.items()),
            pending=_pending(self.provider),
            byte_equality=self.known is None or self.known.strict,
            compared_with="" if self.known is None else self.known.reference,
        )

    def run(self, observed: Observed, base: Case, served: Sequence[Case], operators: Sequence[OperatorCase]) -> None:
        """Golden hashes, block cases, the sweep over T, operator cases, refusals, origin."""
        swept = [case for case in served if case.name == SWEPT_CASE]
        self.total = len(served) + len(operators) + len(swept) * len(SWEEP_TOKENS) + 3
        formulas = declared_names(observed.capabilities(), "controller_rms")
        self.step("golden hashes", lambda: golden_checks(self.device, self.profile, formulas))
        for case in served:
            self.step(case.name, functools.partial(self.block_case, observed, case))
        for case in swept:
            for tokens in SWEEP_TOKENS:
                self.step(f"batch of {tokens}", functools.partial(self.sweep, observed, case, tokens))
        for operator_case in operators:
            self.step(operator_case.name, functools.partial(self.operator_case, observed, operator_case))
        self.step("refusals", lambda: refusal_checks(self.provider, base.batch))
        self.step("provenance", lambda: origin_checks(observed))

    def step(self, label: str, checks: Callable[[], Any]) -> None:
        """Collect the checks of one step and report progress before each."""
        self.progress(label, self.done, self.total)
        before = surroundings.snapshot()
        for check in self.kept(label, before, checks()):
            self.checks.append(check)
            self.progress(f"{label}: {check.name}", self.done, self.total)
        self.done += 1

    def kept(self, label: str, before: dict[str, Any], checks: Iterable[Check]) -> Iterator[Check]:
        """The checks, and a failed one wherever the candidate has changed the process around it; which is put back."""
        for check in checks:
            yield check
            wrong = surroundings.changes(before)
            if wrong:
                surroundings.restore(before)
                found = (Divergence("process", "surroundings", "; ".join(wrong)),)
                yield Check("invariance", "the process is left as it was", label, "fail", 1, "; ".join(wrong), found)

    def standard(self) -> str:
        """What a run is compared with, as the name of the check."""
        known = get_profile(self.profile)
        return "equals the oracle" if known.strict else f"within tolerance of the oracle of {known.reference}"

    def refuse(self, name: str, gate: Callable[[], object]) -> bool:
        """Whether the gate raised; its reason is kept, once, with all the names it applies to."""
        _, error = guarded(gate)
        if error is not None:
            self.refusals.setdefault(error.message.partition(": ")[2], []).append(name)
        return error is not None

    def gate(self, case: Case) -> None:
        """Raise unless the provider declares all that ``case`` needs; runs no operator."""
        case.batch.validate()
        if case.grads is not None:
            case.grads.validate(case.batch)
        named = case.batch.contract.numeric_profile
        if named != self.profile:
            raise NotImplementedError(
                f"numeric_profile: the batch names {named!r}, want {self.profile!r} (fail-closed)"
            )
        check_capability(self.provider, case.batch.contract, case.batch)

    def cases(self) -> tuple[Case, list[Case]]:
        """The first case of the geometry, and the selected ones, drawn, on the device."""
        if self.options.captured is not None:
            case = _on(self.options.captured, self.device)
            return case, [case]
        specs = geometry_specs(self.options.geometry, self.options.tokens)
        if self.options.seed is not None:
            specs += seeded_specs(self.options.seed, self.options.geometry, self.options.tokens)
        chosen = [spec for spec in specs if not self.options.cases or spec.name in self.options.cases]
        drawn = [_on(spec.make(self.profile), self.device) for spec in chosen or specs[:1]]
        return drawn[0], drawn if chosen else []

    def operator_cases(self) -> list[OperatorCase]:
        """The selected operator cases."""
        if self.options.captured is not None:
            return []
        return [case for case in OPERATOR_CASES if not self.options.cases or case.name in self.options.cases]

    def block_case(self, observed: Observed, case: Case) -> Iterator[Check]:
        """Bytes against the oracle; where they agree, the laws and the other modes too."""
        reference = run_block(None, case.batch, case.grads)
        batch, grads = layouts.cloned(case.batch, case.grads)
        inputs = copied(batch) + copied(grads)
        with observed.watched():
            base, error = guarded(lambda: run_block(observed, batch, grads))
        misuse = observed.misuse
        if error is None:
            found = compare(base.tensors, reference.tensors, self.known)
        else:
            reached = observed.forward_so_far()
            found = (*compare(reached, {name: reference.tensors[name] for name in reached}, self.known), error)
        detail = _summary(found) if found else "" if case.grads is not None else "forward only: no gradients were given"
        status = "fail" if found else "pass"
        if found and (changed(inputs) or misuse):
            yield storage_check(case, changed(inputs), misuse)
        yield Check("boundaries", self.standard(), case.name, status, len(reference.tensors), detail, found)
        if has_whole_block(self.provider):
            yield whole_block_check(self.provider, case, reference, self.known, self.standard())
        if not found:
            prober = Prober(observed, case, base)
            yield from prober.all_checks(self.options.repeat)
            yield from self.other_modes(prober, base)

    def other_modes(self, prober: Prober, base: Run) -> Iterator[Check]:
        """The same batch in the other fusion mode and trainability: the same bytes, and ``None`` where due."""
        contract = prober.case.batch.contract
        modes = [("fusion_mode", m) for m in FUSION_MODES if m != contract.fusion_mode]
        modes += [("trainability", m) for m in TRAINABILITY_MODES if m != contract.trainability]
        yield from self.other_formulas(prober)
        for field, mode in modes:
            other = contract.with_mode(field, mode)
            batch = dataclasses.replace(prober.case.batch, contract=other, weight_fingerprint="")
            case = dataclasses.replace(prober.case, batch=batch)
            if guarded(functools.partial(self.gate, case))[1] is None:
                yield _mode_check(prober, case, base, f"{field} {mode}")

    def other_formulas(self, prober: Prober) -> Iterator[Check]:
        """The same batch under the other formula of the controller's scale, where declared: the oracle's bytes."""
        contract = prober.case.batch.contract
        for formula in CONTROLLER_RMS:
            other = contract.with_mode("controller_rms", formula)
            batch = dataclasses.replace(prober.case.batch, contract=other, weight_fingerprint="")
            case = dataclasses.replace(prober.case, batch=batch)
            if formula != contract.controller_rms and guarded(functools.partial(self.gate, case))[1] is None:
                yield _mode_check(prober, case, None, f"controller_rms {formula}")
                if has_whole_block(self.provider):
                    reference = run_block(None, case.batch, case.grads)
                    name = f"{self.standard()} under {formula}"
                    yield whole_block_check(self.provider, case, reference, self.known, name)

    def sweep(self, observed: Observed, case: Case, tokens: int) -> Iterator[Check]:
        """One batch size of the sweep over T."""
        yield sweep(observed, case, tokens)

    def operator_case(self, observed: Observed, case: OperatorCase) -> Iterator[Check]:
        """One operator case, candidate against oracle, and where they agree the laws of an operator."""
        inputs = tuple(t.to(self.device) for t in case.inputs(GEOMETRIES[self.options.geometry], self.profile))
        yield from OperatorProber(observed, case, inputs, self.profile).all_checks(self.standard())


def _mode_check(prober: Prober, case: Case, base: Run | None, mode: str) -> Check:
    """The oracle's bytes in another mode, and those of ``base`` too where the mode may move none."""
    reference, (got, error) = (
        run_block(None, case.batch, case.grads),
        guarded(lambda: run_block(prober.ops, *layouts.cloned(case.batch, case.grads))),
    )
    found: tuple[Divergence, ...] = (
        (error,) if error is not None else compare(got.tensors, reference.tensors, prober.profile)
    )
    if not found and base is not None:
        both = [name for name, t in base.tensors.items() if t is not None and got.tensors[name] is not None]
        found = compare({name: got.tensors[name] for name in both}, {name: base.tensors[name] for name in both})
    status = "fail" if found else "pass"
    name = f"the same under {mode}" if base is not None else f"equals the oracle under {mode}"
    return Check("modes", name, case.name, status, len(reference.tensors), _summary(found), found)


def _stated(options: Options) -> dict[str, Any]:
    """The options as JSON has them; a captured case by its description."""
    plain = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(options) if spec.name != "captured"}
    return plain | {"captured": None if options.captured is None else options.captured.about}


def _on(case: Case, device: torch.device) -> Case:
    grads = None if case.grads is None else case.grads.to(device)
    return dataclasses.replace(case, batch=case.batch.to(device), grads=grads)


def _summary(found: tuple[Divergence, ...]) -> str:
    return "" if not found else f"first at {found[0].boundary}: {found[0].message}"


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} other cases"


def _pending(provider: Any) -> dict[str, list[str]]:
    """Task to the operators that the provider still lacks, by task."""
    pending: dict[str, list[str]] = {}
    for operator in unimplemented_operators(provider):
        pending.setdefault(owning_task(operator), []).append(operator)
    return {task: pending[task] for task in sorted(pending)}
