"""Providers: sets of operators with a name, a declaration of what they serve, and a statement of what ran.

A kernel enters here. The shortest way is a subclass of ``ReferenceProvider`` that overrides the operators it has
kernels for: those become its own, the rest stay the reference's, and provenance says which is which, computed from
the class.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch

from rl_engine.mhc import block
from rl_engine.mhc.block import Grads
from rl_engine.mhc.capabilities import declared_names, require_capabilities
from rl_engine.mhc.contract import ORACLE_PROFILE, P1_RMS, LayerContract, ResidualBatch
from rl_engine.mhc.operators import OperatorSet, ReferenceOperators, Saved
from rl_engine.mhc.operators.interface import LEAF_OPERATORS, OPERATORS, parameters_of
from rl_engine.mhc.profiles import get_profile

REFERENCE_BACKEND = "reference"

OWNING_TASKS = {
    "hc_split_sinkhorn": "P1-1 (#14)",
    "fp32_gemm_rms": "P1-2 (#15)",
    "fixed_k_gemm": "P1-2 (#15)",
    "mhc_post": "P1-3 (#16)",
    "mhc_pre": "P1-4 (#17)",
    "h_aggregate": "P1-4 (#17)",
    "mhc_pre_rmsnorm_fused": "P1-4 (#17)",
    "mhc_block": "P1-4 (#17)",
    "rmsnorm_residual": "P1-5 (#18)",
}
"""Which task of the start kit delivers each operator. P1-6..P1-8 (#19..#21) attach to placements."""


@runtime_checkable
class MHCProvider(OperatorSet, Protocol):
    """A set of operators that can be judged: name, profile, declaration, provenance, and the operators themselves.

    ``capabilities()`` returns ``backend`` (a name) and the lists ``geometry, devices, fusion_modes, trainability,
    placements``; optionally ``controller_rms`` (the formulas of the controller's scale; without it P1's), ``hidden``
    (the widths served) and ``operators`` (those that are the provider's own, where the class does not already say
    so). ``provenance()`` returns ``requested_backend, actual_backend, numeric_profile, torch_version``, computed from
    what runs.
    """

    name: str
    numeric_profile: str

    def capabilities(self) -> dict[str, Any]:
        """What the provider serves; anything that is not declared is refused."""
        ...

    def provenance(self) -> dict[str, Any]:
        """What was asked for and what actually runs."""
        ...


class ReferenceProvider(ReferenceOperators):
    """The oracle as a provider, and the base of a provider that replaces some of its operators."""

    name = "reference"

    def __init_subclass__(cls, **kwargs: object) -> None:
        """A subclass that gives itself no name is known by its class's: its operators are not the reference's."""
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls) and cls.name in {base.__name__ for base in cls.__mro__} | {ReferenceProvider.name}:
            cls.name = cls.__name__

    def __init__(self, numeric_profile: str = ORACLE_PROFILE) -> None:
        """The reference of a numeric profile; ``ValueError`` where its id is not known."""
        super().__init__(numeric_profile)

    def capabilities(self) -> dict[str, Any]:
        """The modes of the reference; ``backend`` is this provider's name.

        Of the controller's formulas a subclass declares P1's alone where an operator of its own reads the formula,
        unless its ``fp32_gemm_rms_fwd`` is its own and takes ``controller_rms``. Under a profile with operators of its
        own the reference itself declares nothing (``NotImplementedError``).
        """
        own = get_profile(get_profile(self.numeric_profile).reference).operators
        if own and type(self) is ReferenceProvider:
            raise NotImplementedError(f"reference: {self.numeric_profile!r} is computed by {own} (fail-closed)")
        return {**block.capabilities(), "backend": self.name, "controller_rms": _formulas(self)}

    def provenance(self) -> dict[str, Any]:
        """The four required facts, and the backend that the class binds each leaf operator and own composite to."""
        own = claimed_operators(self)
        backends = {
            op: self.name if op in own else REFERENCE_BACKEND for op in OPERATORS if op in own or op in LEAF_OPERATORS
        }
        return {
            "requested_backend": self.name,
            "actual_backend": combined_backend(backends.values()),
            "numeric_profile": self.numeric_profile,
            "torch_version": str(torch.__version__),
            "operators": backends,
        }

    def mhc_pre_fwd(
        self, batch: ResidualBatch, ops: OperatorSet | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved]:
        """The canonical composition over ``ops`` (default: this provider); see ``block.mhc_pre_fwd``."""
        return block.mhc_pre_fwd(batch, self._gated(batch, ops))

    def mhc_pre_bwd(
        self,
        dhidden: torch.Tensor,
        dpost: torch.Tensor,
        dc: torch.Tensor,
        batch: ResidualBatch,
        saved: Saved,
        ops: OperatorSet | None = None,
    ) -> Grads:
        """The canonical composition over ``ops`` (default: this provider); see ``block.mhc_pre_bwd``."""
        return block.mhc_pre_bwd(dhidden, dpost, dc, batch, saved, self._gated(batch, ops))

    def mhc_pre_rmsnorm_fused_fwd(
        self, batch: ResidualBatch, ops: OperatorSet | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved]:
        """The canonical composition over ``ops`` (default: this provider); see ``block``."""
        return block.mhc_pre_rmsnorm_fused_fwd(batch, self._gated(batch, ops))

    def _gated(self, batch: ResidualBatch, ops: OperatorSet | None) -> OperatorSet:
        check_capability(self, batch.contract, batch)
        return self if ops is None else ops


def owning_task(operator: str) -> str:
    """The task that delivers an operator, for example ``P1-3 (#16)`` for ``mhc_post_bwd``."""
    return OWNING_TASKS[operator.rpartition("_")[0]]


def _unimplemented(operator: str) -> Callable[..., NoReturn]:
    declared = getattr(OperatorSet, operator, None) or getattr(block, operator)

    signature = inspect.signature(declared)
    if "self" not in signature.parameters:
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = signature.replace(parameters=[me, *signature.parameters.values()])

    @functools.wraps(declared)
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{operator}: not implemented, owned by {owning_task(operator)} (fail-closed)")

    refuse.__doc__ = f"Raise ``NotImplementedError`` naming {owning_task(operator)}."
    vars(refuse).update(unimplemented=True, __signature__=signature)
    return refuse


class StubProvider:
    """A provider that implements nothing and declares nothing: the place from which each task starts."""

    name = "stub"
    numeric_profile = ORACLE_PROFILE

    hc_split_sinkhorn_fwd = _unimplemented("hc_split_sinkhorn_fwd")
    hc_split_sinkhorn_bwd = _unimplemented("hc_split_sinkhorn_bwd")
    fp32_gemm_rms_fwd = _unimplemented("fp32_gemm_rms_fwd")
    fp32_gemm_rms_bwd = _unimplemented("fp32_gemm_rms_bwd")
    fixed_k_gemm_fwd = _unimplemented("fixed_k_gemm_fwd")
    fixed_k_gemm_bwd = _unimplemented("fixed_k_gemm_bwd")
    mhc_post_fwd = _unimplemented("mhc_post_fwd")
    mhc_post_bwd = _unimplemented("mhc_post_bwd")
    h_aggregate_fwd = _unimplemented("h_aggregate_fwd")
    h_aggregate_bwd = _unimplemented("h_aggregate_bwd")
    mhc_pre_fwd = _unimplemented("mhc_pre_fwd")
    mhc_pre_bwd = _unimplemented("mhc_pre_bwd")
    mhc_pre_rmsnorm_fused_fwd = _unimplemented("mhc_pre_rmsnorm_fused_fwd")
    rmsnorm_residual_fwd = _unimplemented("rmsnorm_residual_fwd")
    rmsnorm_residual_bwd = _unimplemented("rmsnorm_residual_bwd")
    mhc_block_forward = _unimplemented("mhc_block_forward")
    mhc_block_backward = _unimplemented("mhc_block_backward")

    def capabilities(self) -> dict[str, Any]:
        """A declaration without a single mode."""
        return {
            "backend": self.name,
            "geometry": [],
            "devices": [],
            "fusion_modes": [],
            "trainability": [],
            "placements": [],
        }

    def provenance(self) -> dict[str, Any]:
        """The four required facts; nothing runs, so ``actual_backend`` is ``none``."""
        return {
            "requested_backend": self.name,
            "actual_backend": "none",
            "numeric_profile": self.numeric_profile,
            "torch_version": str(torch.__version__),
        }


ALIASES: dict[str, str] = {
    "native": "rl_engine.mhc.backends.native.provider:NativeProvider",
    "reference": "rl_engine.mhc.provider:ReferenceProvider",
    "stub": "rl_engine.mhc.provider:StubProvider",
}


def resolve_provider(spec: str, numeric_profile: str = "") -> MHCProvider:
    """The provider of an alias or of ``module.path:ClassName``, constructed without arguments.

    With ``numeric_profile``, a class whose constructor has a parameter of that name is given it; any other keeps
    the profile that it declares, and the gate decides.

    ``ValueError``, in one line, where there is no such alias, module or class, where constructing it fails, or
    where the result lacks a part of ``MHCProvider``.
    """
    target = ALIASES.get(spec, spec)
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"provider: got {spec!r}, want one of {', '.join(ALIASES)}, or module.path:ClassName")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        chooses = numeric_profile and "numeric_profile" in inspect.signature(factory).parameters
        provider = factory(numeric_profile=numeric_profile) if chooses else factory()
    except (Exception, SystemExit) as error:  # whatever foreign code raises, there is no such provider
        reason = " ".join(str(error).split()) or "no message"
        raise ValueError(f"provider: cannot load {spec!r}: {type(error).__name__}: {reason}") from error
    missing = [name for name in _PROVIDER_PARTS if not hasattr(provider, name)]
    if missing:
        raise ValueError(f"provider: {spec!r} lacks: {', '.join(missing)}")
    if spec in ALIASES and provider.name != spec:
        raise ValueError(f"provider: asked for {spec!r}, got one that calls itself {provider.name!r}")
    return provider  # type: ignore[no-any-return]


_READ_THE_FORMULA = (
    "fp32_gemm_rms_fwd",
    "fp32_gemm_rms_bwd",
    "mhc_pre_fwd",
    "mhc_pre_bwd",
    "mhc_pre_rmsnorm_fused_fwd",
    "mhc_block_forward",
    "mhc_block_backward",
)
_PROVIDER_PARTS = ("name", "numeric_profile", "capabilities", "provenance", *OPERATORS)


def check_capability(provider: Any, contract: LayerContract, batch: ResidualBatch | None = None) -> None:
    """Raise ``NotImplementedError`` ("fail-closed") unless ``provider`` declares all that ``contract`` asks for.

    With ``batch``, its device and row geometry too. A declaration that is missing or malformed is refused like one
    that says no. Runs no operator; see ``capabilities.require_capabilities``.
    """
    require_capabilities(provider, contract, batch)


def claimed_operators(provider: Any) -> frozenset[str]:
    """The operators that a provider claims as its own.

    Those that ``capabilities()["operators"]`` lists, where it is there; otherwise each one whose binding is not the
    one of ``ReferenceProvider``.
    """
    if getattr(type(provider), "capabilities", None) is not ReferenceProvider.capabilities:
        declared = provider.capabilities()
        if isinstance(declared, dict) and "operators" in declared:
            return declared_names(declared, "operators")
    return frozenset(op for op in OPERATORS if not _is_reference(provider, op))


def unimplemented_operators(provider: Any) -> tuple[str, ...]:
    """The operators that ``provider`` still takes from ``StubProvider``, without calling one."""
    return tuple(op for op in OPERATORS if getattr(getattr(provider, op, None), "unimplemented", False))


def combined_backend(backends: Any) -> str:
    """One name for the backends that ran: joined by ``+``, the reference last; ``none`` where there are none."""
    names = sorted(set(backends), key=lambda name: (name == REFERENCE_BACKEND, name))
    return "+".join(names) or "none"


def _formulas(provider: ReferenceProvider) -> list[str]:
    own = {op for op in _READ_THE_FORMULA if hasattr(provider, op) and not _is_reference(provider, op)}
    knows = "fp32_gemm_rms_fwd" in own and "controller_rms" in parameters_of(provider.fp32_gemm_rms_fwd)
    return list(block.SUPPORTED_CONTROLLER_RMS) if knows or not own else [P1_RMS]


def _is_reference(provider: Any, operator: str) -> bool:
    return inspect.getattr_static(provider, operator, None) is inspect.getattr_static(ReferenceProvider, operator, None)
