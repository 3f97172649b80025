"""A provider's own path through the whole block, where it has one: judged beside the composition of its operators.

``block.mhc_block_forward`` always composes operators. A backend may offer the block as one fused call under the same
name; that call is another piece of code, so its bytes are compared on their own.
"""

from __future__ import annotations

from typing import Any

from rl_engine.mhc.acceptance.cases import Case
from rl_engine.mhc.acceptance.judge import Run, changed, compare, copied, guarded, named_grads
from rl_engine.mhc.acceptance.layouts import cloned
from rl_engine.mhc.acceptance.verdict import Check, Divergence
from rl_engine.mhc.block import forward_boundaries
from rl_engine.mhc.operators.reference import reference_calls
from rl_engine.mhc.profiles import NumericProfile

ENTRY_POINTS = ("mhc_block_forward", "mhc_block_backward")


def has_whole_block(provider: Any) -> bool:
    """Whether the provider offers both entry points and has implemented them."""
    functions = [getattr(provider, name, None) for name in ENTRY_POINTS]
    return all(callable(function) and not getattr(function, "unimplemented", False) for function in functions)


def whole_block_check(provider: Any, case: Case, reference: Run, profile: NumericProfile | None, name: str) -> Check:
    """The boundaries of the provider's whole-block path against the oracle's; its inputs must keep their bytes.

    A reference operator that runs inside is a silent fallback, and fails the check.
    """
    batch, grads = cloned(case.batch, case.grads)
    before, heard = copied(batch) + copied(grads), set[str]()

    def run() -> dict[str, Any]:
        r_new, saved = provider.mhc_block_forward(batch)
        tensors: dict[str, Any] = dict(forward_boundaries(saved, r_new))
        if grads is not None:
            tensors |= named_grads(provider.mhc_block_backward(batch, saved, grads))
        return tensors

    with reference_calls(heard.add):
        tensors, error = guarded(run)
    found: tuple[Divergence, ...] = (error,) if error is not None else compare(tensors, reference.tensors, profile)
    if changed(before):
        found = (Divergence("storage", "storage", f"overwrote its inputs: {', '.join(changed(before))}"), *found)
    if heard:
        found = (
            Divergence("provenance", "provenance", f"the reference ran inside: {', '.join(sorted(heard))}"),
            *found,
        )
    detail = f"first at {found[0].boundary}: {found[0].message}" if found else ""
    label = f"the whole-block path {name}"
    return Check("boundaries", label, case.name, "fail" if found else "pass", len(reference.tensors), detail, found)
