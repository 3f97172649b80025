"""One run of a block boundary, and the comparison of two of them tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_engine.mhc.acceptance.verdict import DATAFLOW, Divergence
from rl_engine.mhc.bits import TensorDifference, differing, ordinals, same_bytes, tensor_difference
from rl_engine.mhc.block import (
    CONTROLLER_GRADS,
    GRAD_KEYS,
    forward_boundaries,
    mhc_block_backward,
    mhc_block_forward,
)
from rl_engine.mhc.contract import HC_MULT, GradBoundary, ResidualBatch
from rl_engine.mhc.operators import OperatorSet
from rl_engine.mhc.profiles import NumericProfile, Tolerance
from rl_engine.mhc.trace import FORWARD_BOUNDARIES

TOKEN_WISE = frozenset(FORWARD_BOUNDARIES) | {
    name for name in DATAFLOW if name.startswith("bwd.") and name != "bwd.d_gamma"
}
"""The boundaries whose first axis is the token; the rest fold over tokens."""

Tensors = dict[str, torch.Tensor | None]
Snapshot = list[tuple[str, torch.Tensor, torch.Tensor]]
"""``(path, tensor, copy)`` of tensors, to see later whether they still have their bytes."""


@dataclass(frozen=True)
class Run:
    """What one forward and backward produced, by boundary name, with the ``saved`` between them."""

    tensors: Tensors
    saved: Any = None


def run_block(ops: OperatorSet | None, batch: ResidualBatch, grads: GradBoundary | None) -> Run:
    """Forward, and backward where ``grads`` is given, through ``ops`` (``None``: the oracle of the profile)."""
    r_new, saved = mhc_block_forward(batch, ops=ops)
    tensors: Tensors = dict(forward_boundaries(saved, r_new))
    if grads is not None:
        result = mhc_block_backward(batch, saved, grads, ops=ops)
        tensors |= named_grads(result)
    return Run({name: tensors[name] for name in DATAFLOW if name in tensors}, saved)


def named_grads(result: Mapping[str, torch.Tensor | None]) -> Tensors:
    """The gradients of a block under their boundary names; one that is missing is ``None``."""
    named: Tensors = {f"bwd.{key}": result.get(key) for key in GRAD_KEYS if key not in CONTROLLER_GRADS}
    streams = named["bwd.d_r_old"]
    if isinstance(streams, torch.Tensor) and streams.dim() == 3 and streams.shape[1] == HC_MULT:
        named |= {f"bwd.d_stream{i}": streams[:, i, :] for i in range(HC_MULT)}
    return named | {f"grad.{key}": result.get(key) for key in CONTROLLER_GRADS}


def compare(
    candidate: Mapping[str, Any], reference: Mapping[str, Any], profile: NumericProfile | None = None
) -> tuple[Divergence, ...]:
    """The divergences of two sets of named tensors, in the order of ``reference``.

    Bytes must be equal, but where ``profile`` is given and has a tolerance for the boundary.
    """
    found = (
        compare_tensor(name, candidate.get(name), want, None if profile is None else profile.allowed(name))
        for name, want in reference.items()
    )
    return tuple(divergence for divergence in found if divergence is not None)


def compare_tensor(name: str, got: object, want: object, tolerance: Tolerance | None = None) -> Divergence | None:
    """The divergence of one tensor from its reference: presence, then dtype, shape, device, bytes or tolerance."""
    if want is None or got is None or not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        if got is None and want is None:
            return None
        return Divergence(name, "presence", f"got {_kind(got)}, want {_kind(want)}")
    if type(got) is not torch.Tensor:
        return Divergence(name, "type", f"got a {type(got).__name__}, want a plain torch.Tensor")
    if got.requires_grad:
        return Divergence(name, "type", "requires grad, want a tensor without autograd history")
    if got.dtype != want.dtype:
        return Divergence(name, "dtype", f"got {got.dtype}, want {want.dtype}")
    if got.shape != want.shape:
        return Divergence(name, "shape", f"got {tuple(got.shape)}, want {tuple(want.shape)}")
    if got.device != want.device:
        return Divergence(name, "device", f"got {got.device}, want {want.device}")
    if tolerance is not None:
        got = torch.where(_near(got, want, tolerance), want, got)
    difference = tensor_difference(got, want)
    if difference is None:
        return None
    message = f"{difference.count} of {difference.total} elements differ"
    return Divergence(name, "bytes", message, difference, _hint(difference, got, want))


def rows(tensors: Tensors, index: torch.Tensor | slice) -> Tensors:
    """The token-wise boundaries of a run, at the rows that ``index`` selects."""
    return {name: None if t is None else t[index] for name, t in tensors.items() if name in TOKEN_WISE}


def same(a: Tensors, b: Tensors) -> bool:
    """Whether two runs agree byte for byte."""
    return not compare(a, b)


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested dicts, lists, tuples and dataclasses, with the path that leads to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value):
        for spec in dataclasses.fields(value):
            yield from tensors_in(getattr(value, spec.name), f"{path}.{spec.name}" if path else spec.name)


def copied(value: Any) -> Snapshot:
    """``(path, tensor, copy)`` of every tensor in ``value``, for ``changed`` to compare later."""
    return [(path, tensor, tensor.detach().clone()) for path, tensor in tensors_in(value)]


def changed(snapshot: Snapshot) -> list[str]:
    """The paths in a snapshot of ``copied`` whose bytes are no longer what they were."""
    return [path for path, tensor, copy in snapshot if not same_bytes(tensor, copy)]


def storages(value: Any) -> Snapshot:
    """Like ``copied``, but of the whole storage that each tensor lives in, as bytes: what lies around it counts too."""
    whole = {}
    for path, tensor in tensors_in(value):
        around = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole[path] = around.set_(tensor.untyped_storage())
    return copied(whole)


def shared_storage(outputs: Mapping[str, torch.Tensor | None], inputs: Any) -> list[str]:
    """``output (shares with input)`` for every output that lives in the storage of an input; empty tensors too."""
    owners = {tensor.untyped_storage()._cdata: path for path, tensor in tensors_in(inputs)}
    return [
        f"{name} (shares the storage of {owners[tensor.untyped_storage()._cdata]})"
        for name, tensor in outputs.items()
        if tensor is not None and tensor.untyped_storage()._cdata in owners
    ]


def guarded(action: Callable[[], Any]) -> tuple[Any, Divergence | None]:
    """Run code of a candidate: its result, or the exception as a divergence.

    Whatever a candidate raises is a finding about the candidate and must not end the judge; a ``KeyboardInterrupt``
    is the user's. The divergence is at the operator that raised, where one was running.
    """
    try:
        return action(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = " ".join(str(error).split()) or "no message"
        where = str(vars(error).get("mhc_operator", "block"))
        return None, Divergence(where, "error", f"{type(error).__name__}: {text}")


def _near(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Which elements are near enough; a NaN is near a NaN alone, an infinity near itself alone."""
    near = ~differing(got, want)
    finite = torch.isfinite(got) & torch.isfinite(want)
    near |= finite & ((ordinals(got) - ordinals(want)).abs() <= tolerance.ulp)
    near |= finite & ((got.double() - want.double()).abs() <= tolerance.atol + tolerance.rtol * want.double().abs())
    return near


_MANY = 16
"""A truncating store moves about half of all inexact values; fewer than 16, or one in 16, is no sign of it."""


def _kind(value: object) -> str:
    return "None" if value is None else "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _hint(difference: TensorDifference, got: torch.Tensor, want: torch.Tensor) -> str:
    many = difference.count >= _MANY and difference.count * _MANY >= difference.total
    if difference.toward_zero and many and got.dtype == torch.bfloat16:
        return (
            "truncation: every differing value is the reference moved one ULP toward zero (a round-toward-zero store)"
        )
    if difference.nan_mismatches == difference.count:
        return "every difference is a NaN against a number"
    mask = differing(got, want)
    if bool(((got[mask] == 0) & (want[mask] == 0)).all()):
        return "every difference is the sign of a zero"
    return ""
