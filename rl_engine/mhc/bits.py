"""Raw bytes, hashes, encodings and ULP distances: the one place where "equal" is defined.

Two tensors are equal here when their *encodings* are: ``-0`` is not ``+0``, and a NaN equals any other NaN
whatever its payload, but never a number. Nothing in this module compares floats with ``==``.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass

import torch

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_bytes(t: torch.Tensor) -> bytes:
    """The elements of ``t`` (any shape, dtype, device, layout) as raw little-endian bytes in row-major order."""
    flat = _packed(t.detach().resolve_conj().resolve_neg().to("cpu")).reshape(-1)
    raw = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big":
        raw = raw.reshape(-1, flat.element_size())[:, ::-1]
    return raw.tobytes()


def tensor_sha256(t: torch.Tensor) -> str:
    """Hex SHA-256 of ``tensor_bytes(t)``: of the element bytes alone, not of shape or dtype."""
    return hashlib.sha256(tensor_bytes(t)).hexdigest()


def _packed(t: torch.Tensor) -> torch.Tensor:
    """``t`` in row-major memory. ``contiguous()`` alone may keep an odd stride on an axis of length 1."""
    if t.is_contiguous() and (t.dim() == 0 or t.stride(-1) == 1):
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def canonical_sha256(t: torch.Tensor) -> str:
    """``tensor_sha256`` with every NaN made the canonical quiet one, as processors differ in the NaN that they make."""
    return tensor_sha256(_one_nan(t))


def _one_nan(t: torch.Tensor) -> torch.Tensor:
    return t.masked_fill(torch.isnan(t), float("nan")) if t.is_floating_point() else t


def encodings(t: torch.Tensor) -> torch.Tensor:
    """The bit patterns of ``t`` as signed integers of the same width and shape, every NaN made the same one."""
    t = t.to(torch.uint8) if t.dtype == torch.bool else _one_nan(t.detach())
    return _packed(t).view(_INT_OF_SIZE[t.element_size()])


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Boolean tensor, true where the encodings of ``a`` and ``b`` (same shape and dtype) differ.

    A NaN payload is not a difference; a NaN against a number, or ``+0`` against ``-0``, is.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"cannot compare encodings: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
    return encodings(a) != encodings(b)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every encoding agree (NaN payloads excepted)."""
    return a.dtype == b.dtype and a.shape == b.shape and not bool(differing(a, b).any())


def ordinals(t: torch.Tensor) -> torch.Tensor:
    """Position of each float on the number line of its format, int64: neighbours differ by one.

    ``+0`` is 0 and ``-0`` is -1, so the two zeros are one apart. NaN has no meaningful position.
    """
    bits = encodings(t).to(torch.int64)
    magnitude = (1 << (8 * t.element_size() - 1)) - 1
    return torch.where(bits < 0, -(bits & magnitude) - 1, bits)


def hex_encoding(t: torch.Tensor) -> str:
    """The encoding of a one-element tensor in hexadecimal, most significant digit first: ``0x3f800000``."""
    return "0x" + tensor_bytes(t)[::-1].hex()


@dataclass(frozen=True)
class TensorDifference:
    """How a candidate tensor differs from a reference of the same shape and dtype.

    ``count`` elements of ``total`` differ, ``nan_mismatches`` of them as NaN against a number. The first one
    (row-major) is at ``index``, with both values as hex encodings and as decimals. ULP figures are over differing
    pairs of numbers: ``signed_bias_ulp`` is the mean of candidate minus reference on the number line,
    ``magnitude_bias_ulp`` the same for the distance from zero (negative: too small), and ``toward_zero`` says that
    every differing pair is the reference moved one ULP toward zero, which is what a truncating store does.
    """

    count: int
    total: int
    nan_mismatches: int
    index: tuple[int, ...]
    candidate_hex: str
    reference_hex: str
    candidate: float
    reference: float
    max_ulp: int
    median_ulp: float
    signed_bias_ulp: float
    magnitude_bias_ulp: float
    toward_zero: bool


def tensor_difference(candidate: torch.Tensor, reference: torch.Tensor) -> TensorDifference | None:
    """Describe the difference of two tensors of equal shape and dtype, or ``None`` where there is none.

    Raises ``ValueError`` on a different shape or dtype: that is not a difference of bytes but of kind.
    """
    mask = differing(candidate, reference)
    count = int(mask.sum())
    if count == 0:
        return None
    where = mask.reshape(-1).nonzero().reshape(-1)
    got, want = candidate.reshape(-1)[where], reference.reshape(-1)[where]
    first = torch.unravel_index(where[0], candidate.shape) if candidate.dim() else ()
    index = tuple(int(i) for i in first)
    if candidate.is_floating_point():
        ordered = ~(torch.isnan(got) | torch.isnan(want))
        signed = (ordinals(got) - ordinals(want))[ordered]
        side = torch.where(ordinals(want)[ordered] < 0, -1, 1)
        inward = -side * (want[ordered] != 0)
    else:
        signed = got.to(torch.int64) - want.to(torch.int64)
        side, inward = want.sign().to(torch.int64), torch.zeros_like(signed)
    distance = signed.abs()
    return TensorDifference(
        count=count,
        total=candidate.numel(),
        nan_mismatches=count - signed.numel(),
        index=index,
        candidate_hex=hex_encoding(got[0]),
        reference_hex=hex_encoding(want[0]),
        candidate=float(got[0]),
        reference=float(want[0]),
        max_ulp=int(distance.max()) if distance.numel() else 0,
        median_ulp=_median(distance),
        signed_bias_ulp=float(signed.double().mean()) if signed.numel() else 0.0,
        magnitude_bias_ulp=float((signed * side).double().mean()) if signed.numel() else 0.0,
        toward_zero=signed.numel() == count and bool((signed == inward).all()),
    )


def _median(distance: torch.Tensor) -> float:
    """The median of a 1-D int64 tensor, between the two middle ones of an even number; 0 for an empty one."""
    if not distance.numel():
        return 0.0
    ordered, middle = distance.sort().values, distance.numel() // 2
    return float(ordered[middle] if distance.numel() % 2 else ordered[middle - 1 : middle + 1].double().mean())
