"""Watch a provider while its operators run: which were called, and whether the reference ran inside one.

A claimed operator in which a reference operator runs is a silent fallback. An operator that the provider does not claim
may be the reference's, and is reported as such. Both are read off what ran, not off what the provider says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from rl_engine.mhc.acceptance.judge import Snapshot, changed, copied
from rl_engine.mhc.acceptance.verdict import Divergence
from rl_engine.mhc.operators.interface import COMPOSITE_OPERATORS, LEAF_OPERATORS, OPERATORS, parameters_of
from rl_engine.mhc.operators.reference import reference_calls
from rl_engine.mhc.provider import REFERENCE_BACKEND, claimed_operators, combined_backend

RESULT_BOUNDARIES = {
    "fp32_gemm_rms_fwd": ("controller.p", "controller.r"),
    "hc_split_sinkhorn_fwd": ("split.pre", "split.post", "split.c"),
    "h_aggregate_fwd": ("pre.hidden",),
    "rmsnorm_residual_fwd": ("norm.normalized", "norm.residual"),
    "mhc_post_fwd": ("post.r_new",),
    "mhc_post_bwd": ("bwd.d_r_old", "bwd.dy_sublayer", "bwd.d_c", "bwd.d_post"),
    "rmsnorm_residual_bwd": ("bwd.d_hidden", "bwd.d_gamma"),
    "hc_split_sinkhorn_bwd": ("grad.d_bias",),
    "fp32_gemm_rms_bwd": ("bwd.d_r_old", "grad.d_controller_weight"),
    "h_aggregate_bwd": ("bwd.d_r_old",),
    "fixed_k_gemm_fwd": ("fixed_k_gemm_fwd.out",),
    "fixed_k_gemm_bwd": ("fixed_k_gemm_bwd.dX", "fixed_k_gemm_bwd.dW"),
}
"""The boundaries at which the outputs of a leaf operator appear, in their order."""

FORWARD_LEAVES = tuple(op for op in RESULT_BOUNDARIES if op.endswith("_fwd") and op != "fixed_k_gemm_fwd")


class Observed:
    """A provider with its calls observed. It is an operator set itself: ``mhc_block_forward(batch, ops=observed)``."""

    def __init__(self, provider: Any) -> None:
        """Observe ``provider``; its claims are read once, now."""
        self.provider = provider
        self.name = str(provider.name)
        self.numeric_profile = str(provider.numeric_profile)
        self.claimed = claimed_operators(provider)
        self.called: dict[str, int] = {}
        self.watching = False
        self.outputs: dict[str, Any] = {}
        self.misuse: list[Divergence] = []
        self.reference_inside: dict[str, set[str]] = {}
        self._stack: list[str] = []

    def capabilities(self) -> Any:
        """The provider's own declaration."""
        return self.provider.capabilities()

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATORS:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    @property
    def fallbacks(self) -> dict[str, list[str]]:
        """Claimed operator to the reference operators that ran inside it."""
        return {op: sorted(inside) for op, inside in sorted(self.reference_inside.items()) if op in self.claimed}

    def operator_backends(self) -> dict[str, str]:
        """What each leaf operator and own composite that was called actually ran on."""
        own = str(self.capabilities().get("backend", self.name))
        return {
            op: REFERENCE_BACKEND if op in self.reference_inside else own
            for op in OPERATORS
            if op in self.called and (op in LEAF_OPERATORS or op in self.claimed)
        }

    def forward_so_far(self) -> dict[str, Any]:
        """The forward boundaries that the watched leaf calls have produced, for a run that did not end."""
        found: dict[str, Any] = {}
        for operator in FORWARD_LEAVES:
            if operator in self.outputs:
                result = self.outputs[operator]
                found |= zip(
                    RESULT_BOUNDARIES[operator], result if isinstance(result, tuple) else (result,), strict=False
                )
        return found

    def actual_backend(self) -> str:
        """One name for ``operator_backends``."""
        return combined_backend(self.operator_backends().values())

    def _call(self, operator: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.provider, operator)
        if operator in COMPOSITE_OPERATORS and "ops" in parameters_of(function):
            kwargs.setdefault("ops", self)
        self.called[operator] = self.called.get(operator, 0) + 1
        self._stack.append(operator)
        before = copied([args, kwargs]) if self.watching and operator in LEAF_OPERATORS else []
        try:
            with reference_calls(self._heard) if len(self._stack) == 1 else nullcontext():
                result = function(*args, **kwargs)
            if before:
                self._watch(operator, result, before)
            return result
        except BaseException as error:
            vars(error).setdefault("mhc_operator", operator)
            raise
        finally:
            self._stack.pop()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block every leaf call is checked: its arguments keep their bytes, its outputs do not live in them.

        What is wrong is in ``misuse`` afterwards, the latest outputs of each leaf operator in ``outputs``.
        """
        self.watching, self.outputs, self.misuse = True, {}, []
        try:
            yield
        finally:
            self.watching = False

    def _watch(self, operator: str, result: Any, before: Snapshot) -> None:
        self.outputs[operator] = result
        names = RESULT_BOUNDARIES.get(operator, (operator,))
        mutated = changed(before)
        if mutated:
            self.misuse.append(
                Divergence(
                    names[0], "storage", f"{operator} overwrote the storage of its arguments: {', '.join(mutated)}"
                )
            )
        outputs = result if isinstance(result, tuple) else (result,)
        arguments = {tensor.untyped_storage()._cdata for _, tensor, _ in before}
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.untyped_storage()._cdata in arguments:
                where = names[min(position, len(names) - 1)]
                self.misuse.append(
                    Divergence(where, "storage", f"{operator}: an output lives in an argument's storage")
                )

    def _heard(self, reference_operator: str) -> None:
        if self._stack:
            self.reference_inside.setdefault(self._stack[-1], set()).add(reference_operator)
