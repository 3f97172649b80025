"""What a single run cannot show: that a row's bytes depend on that row alone, forward and backward.

Every function here runs the candidate again on the same values in other company, another order, other memory or another
environment, and compares with its own first run. Where parameters' gradients fold over other tokens than before, the
oracle runs too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rl_engine.mhc.acceptance import layouts
from rl_engine.mhc.acceptance.cases import Case
from rl_engine.mhc.acceptance.judge import (
    Run,
    Tensors,
    changed,
    compare,
    copied,
    guarded,
    named_grads,
    rows,
    run_block,
    shared_storage,
    storages,
)
from rl_engine.mhc.acceptance.observed import Observed
from rl_engine.mhc.acceptance.verdict import Check, Divergence
from rl_engine.mhc.block import forward_boundaries, mhc_block_backward, mhc_block_forward
from rl_engine.mhc.capabilities import declared_names
from rl_engine.mhc.contract import GradBoundary, ResidualBatch
from rl_engine.mhc.profiles import get_profile

GROUP = "invariance"
SAMPLED_ROWS = 32
THREADS = (1, 2, 7)
SWEEP_TOKENS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 2048, 2049)
"""Every batch size up to 17, and those around the powers of two at which kernels change their launch or split."""

_PRE_RETURNS = ("pre.hidden", "split.pre", "split.post", "split.c")
_FUSED_RETURNS = ("pre.hidden", "norm.normalized", "norm.residual", "split.post", "split.c")

Pair = tuple[ResidualBatch, GradBoundary | None]
Found = tuple[int, tuple[Divergence, ...]]
"""How many runs were compared, and the divergences."""


def sampled(tokens: int) -> list[int]:
    """All rows of a small batch; of a large one ``SAMPLED_ROWS``, evenly spaced, the first and last among them."""
    if tokens <= SAMPLED_ROWS:
        return list(range(tokens))
    return sorted({round(i * (tokens - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)})


class Prober:
    """Runs a candidate on variations of one case and turns each comparison into a ``Check``."""

    def __init__(self, ops: Observed, case: Case, base: Run) -> None:
        """``base`` is the candidate's own first run of ``case``; its tensors are copied, and watched from now on."""
        self.ops, self.case = ops, case
        self.profile = get_profile(case.batch.contract.numeric_profile)
        self.first = copied(base.tensors)
        copies: Tensors = {path: copy for path, _, copy in self.first}
        self.base: Tensors = {name: copies.get(name) for name in base.tensors}

    def check(self, name: str, probe: Callable[[], Found]) -> Check:
        """The check of one probe: how many runs were compared, and the divergences of the first that differs."""
        outcome, error = guarded(probe)
        count, found = (0, (error,)) if error is not None else outcome
        overwritten = changed(self.first)
        if overwritten:
            found = (*_storage(overwritten, "outputs of an earlier run changed under a later one"), *found)
            self.first = [entry for entry in self.first if entry[0] not in overwritten]
        detail = "" if not found else f"{found[0].boundary}: {found[0].message}"
        return Check(GROUP, name, self.case.name, "fail" if found else "pass", count, detail, found)

    def run(self, pair: Pair) -> Tensors:
        """One more run of the candidate."""
        return run_block(self.ops, *pair).tensors

    def again(self) -> Tensors:
        """One more run of the candidate on a copy of the case."""
        return self.run(layouts.cloned(self.case.batch, self.case.grads))

    def all_checks(self, repeat: int) -> Iterator[Check]:
        """Every law, one check each, made when asked for; what explains the most comes first."""
        yield self.check("inputs and saved unchanged", self.untouched)
        yield self.check("repeated runs", functools.partial(self.repeated, repeat))
        laws = {
            "poisoned allocations": self.poisoned,
            "thread counts": self.threads,
            "called as a user calls it": self.unobserved,
            "forwards in between": self.interleaved,
            "labels and zero gradients": self.labels,
            "each row alone": self.rows_alone,
            "other batch sizes": self.resized,
            "permuted rows": self.permuted,
            "expanded inputs": self.expanded,
            "a NaN row moves no other": self.nan_row,
        }
        for name, layout in layouts.LAYOUTS.items():
            yield self.check(f"{name} inputs", functools.partial(self.layout, layout))
        for name, law in laws.items():
            if self.case.batch.tokens:
                yield self.check(name, law)

    def rows_alone(self) -> Found:
        """Each row (a sample of many) as a batch of one, against the row of the first run."""
        chosen = sampled(self.case.batch.tokens)
        for row in chosen:
            alone = self.run(self.pick([row]))
            found = compare(rows(alone, slice(0, 1)), rows(self.base, slice(row, row + 1)))
            if found:
                return len(chosen), _located(found, f"row {row} alone")
        return len(chosen), ()

    def resized(self) -> Found:
        """The rows without the last, and all of them twice and once more: each keeps its bytes."""
        tokens = self.case.batch.tokens
        for order in (list(range(tokens - 1)), [*range(tokens), *range(tokens), 0]):
            index = torch.tensor(order, dtype=torch.int64, device=self.case.batch.r_old.device)
            found = compare(rows(self.run(self.pick(order)), slice(None)), rows(self.base, index))
            if found:
                return 2, _located(found, f"among {len(order)} rows")
        return 2, ()

    def permuted(self) -> Found:
        """Rows reversed and shuffled: each keeps its bytes, what folds over tokens is the oracle's for that order."""
        tokens = self.case.batch.tokens
        shuffle = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)).tolist()
        for label, order in (("reversed", list(range(tokens))[::-1]), ("shuffled", shuffle)):
            pair = self.pick(order)
            moved = self.run(pair)
            index = torch.tensor(order, device=self.case.batch.r_old.device)
            found = compare(rows(moved, slice(None)), rows(self.base, index))
            found = found or compare(moved, run_block(None, *pair).tensors, self.profile)
            if found:
                return 2, _located(found, label)
        return 2, ()

    def layout(self, layout: layouts.Layout) -> Found:
        """Every tensor of the batch in another memory layout."""
        pair = layouts.laid_out(self.case.batch, self.case.grads, layout)
        around = storages(pair[0]) + storages(pair[1])
        found = compare(self.run(pair), self.base)
        return 1, found + _storage(changed(around), "memory around the inputs changed")

    def expanded(self) -> Found:
        """Row 0 repeated by a zero stride, against its contiguous copy and the first run's row 0."""
        pair = layouts.expanded(self.case.batch, self.case.grads, 5)
        moved, plain = self.run(pair), self.run(layouts.cloned(*pair))
        first = torch.zeros(5, dtype=torch.int64, device=self.case.batch.r_old.device)
        return 2, compare(moved, plain) or compare(rows(moved, slice(None)), rows(self.base, first))

    def poisoned(self) -> Found:
        """With every fresh allocation filled with NaN: nothing may read what it did not write."""
        with poisoned_allocations():
            moved = self.again()
        return 1, compare(moved, self.base)

    def repeated(self, repeat: int) -> Found:
        """``repeat`` more runs on the same values."""
        for number in range(repeat):
            found = compare(self.again(), self.base)
            if found:
                return repeat, _located(found, f"run {number + 2}")
        return repeat, ()

    def threads(self) -> Found:
        """The same bytes at 1, 2 and 7 intra-op threads."""
        before = torch.get_num_threads()
        try:
            for count in THREADS:
                torch.set_num_threads(count)
                found = compare(self.again(), self.base)
                if found:
                    return len(THREADS), _located(found, f"{count} threads")
        finally:
            torch.set_num_threads(before)
        return len(THREADS), ()

    def nan_row(self) -> Found:
        """With the middle row NaN, every other row keeps its bytes, and that row is NaN where the oracle's is."""
        batch, grads = layouts.cloned(self.case.batch, self.case.grads)
        middle = batch.tokens // 2
        batch.r_old[middle] = float("nan")
        others = torch.tensor([i for i in range(batch.tokens) if i != middle], dtype=torch.int64)
        index = others.to(batch.r_old.device)
        moved = self.run((batch, grads))
        found = compare(rows(moved, index), rows(self.base, index))
        return 2, found or compare(moved, run_block(None, batch, grads).tensors, self.profile)

    def unobserved(self) -> Found:
        """The provider itself, without ``ops`` handed down: the same block, and composites return what they save."""
        batch, grads = layouts.cloned(self.case.batch, self.case.grads)
        provider = self.ops.provider
        found = compare(run_block(provider, batch, grads).tensors, self.base)
        returned: list[tuple[Any, tuple[str, ...]]] = [(provider.mhc_pre_fwd(batch), _PRE_RETURNS)]
        if "fused-pre-norm" in declared_names(provider.capabilities(), "fusion_modes"):
            returned.append((provider.mhc_pre_rmsnorm_fused_fwd(batch), _FUSED_RETURNS))
        for values, names in returned:
            found += compare(dict(zip(names, values, strict=False)), self._only(names))
        return 3, found

    def interleaved(self) -> Found:
        """Another forward between a forward and its backward changes nothing: all state is in ``saved``."""
        batch, grads = layouts.cloned(self.case.batch, self.case.grads)
        if grads is None:
            return 0, ()
        _, saved = mhc_block_forward(batch, ops=self.ops)
        mhc_block_forward(self.pick([*range(batch.tokens), 0])[0], ops=self.ops)
        result = named_grads(mhc_block_backward(batch, saved, grads, ops=self.ops))
        return 1, compare(result, self._only(tuple(result)))

    def labels(self) -> Found:
        """Token ids and the layer's number change nothing; gradients that are all zero give the oracle's zeros."""
        batch, grads = layouts.cloned(self.case.batch, self.case.grads)
        contract = dataclasses.replace(batch.contract, layer_index=0)
        batch = dataclasses.replace(batch, contract=contract, token_id=torch.full_like(batch.token_id, -1))
        found = compare(self.run((batch, grads)), self.base)
        if grads is None:
            return 1, found
        zeros = torch.zeros_like
        grads = GradBoundary(zeros(grads.d_r_new), zeros(grads.d_normalized), zeros(grads.d_residual))
        return 2, found or compare(self.run((batch, grads)), run_block(None, batch, grads).tensors, self.profile)

    def _only(self, names: Sequence[str]) -> Tensors:
        return {name: self.base[name] for name in names}

    def untouched(self) -> Found:
        """Inputs and ``saved`` keep their bytes, backward can run twice, no output lives in an input's storage."""
        batch, grads = layouts.cloned(self.case.batch, self.case.grads)
        inputs = copied(batch) + copied(grads)
        with self.ops.watched():
            r_new, saved = mhc_block_forward(batch, ops=self.ops)
            outputs: Tensors = dict(forward_boundaries(saved, r_new))
            found = _storage(changed(inputs), "inputs changed by forward")
            between = copied(saved)
            if grads is not None:
                first = mhc_block_backward(batch, saved, grads, ops=self.ops)
                outputs |= named_grads(first)
                found += _storage(changed(between), "saved tensors changed by backward")
                second = mhc_block_backward(batch, saved, grads, ops=self.ops)
                found += _located(compare(named_grads(second), named_grads(first)), "second backward of one forward")
        found += tuple(self.ops.misuse)
        found += _storage(changed(inputs), "inputs changed by backward")
        found += _storage(shared_storage(outputs, [batch, grads]), "outputs share storage with inputs")
        return 4, tuple(sorted(found, key=lambda divergence: divergence.rank))

    def pick(self, order: list[int]) -> Pair:
        """The case's rows in that order."""
        index = torch.tensor(order, dtype=torch.int64, device=self.case.batch.r_old.device)
        return layouts.selected(self.case.batch, self.case.grads, index)


def storage_check(case: Case, paths: list[str], misuse: Sequence[Divergence]) -> Check:
    """The failed check of a candidate that wrote where it must not in its very first run, and has other bytes too."""
    found = (*_storage(paths, "inputs changed"), *misuse)
    return Check(GROUP, "inputs and saved unchanged", case.name, "fail", 1, found[0].message, found)


def sweep(ops: Observed, case: Case, tokens: int) -> Check:
    """A batch of ``tokens`` rows, the case's over and over: all bytes are the oracle's."""
    order = [i % case.batch.tokens for i in range(tokens)]
    index = torch.tensor(order, dtype=torch.int64, device=case.batch.r_old.device)
    pair = layouts.selected(case.batch, case.grads, index)
    profile = get_profile(case.batch.contract.numeric_profile)
    outcome, error = guarded(lambda: compare(run_block(ops, *pair).tensors, run_block(None, *pair).tensors, profile))
    found = (error,) if error is not None else outcome
    detail = "" if not found else f"{found[0].boundary} at T={tokens}: {found[0].message}"
    return Check(GROUP, f"batch of {tokens}", case.name, "fail" if found else "pass", 1, detail, tuple(found))


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within the block torch fills every uninitialised tensor with NaN, or with the largest integer."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _located(found: tuple[Divergence, ...], where: str) -> tuple[Divergence, ...]:
    return tuple(dataclasses.replace(d, message=f"{where}: {d.message}") for d in found)


def _storage(paths: list[str], what: str) -> tuple[Divergence, ...]:
    return (Divergence(paths[0].partition(" ")[0], "storage", f"{what}: {', '.join(paths)}"),) if paths else ()
