"""Between torch tensors and the exact reference: decoding, torch's own elementary functions, comparison by encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .scalar import F32, Elementary, from_bits16, from_bits32, to_bits16, to_bits32

# Lists of F32 nested as deep as the tensor's rank; a scalar tensor is one F32.
Nested = Any

_DECODE = {torch.float32: from_bits32, torch.bfloat16: from_bits16}
_ENCODE = {torch.float32: to_bits32, torch.bfloat16: to_bits16}
_INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
_MASK = {torch.float32: 0xFFFFFFFF, torch.bfloat16: 0xFFFF}
_QUIET_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0}


def encodings(t: torch.Tensor) -> list[int]:
    """Unsigned encodings in row-major order, every NaN as its format's canonical quiet NaN."""
    raw = t.detach().contiguous().view(_INTEGER[t.dtype]).flatten().tolist()
    nan = _QUIET_NAN[t.dtype]
    values = [bits & _MASK[t.dtype] for bits in raw]
    spoiled = torch.isnan(t.detach()).flatten().tolist()
    return [nan if is_nan else bits for bits, is_nan in zip(values, spoiled, strict=True)]


def to_exact(t: torch.Tensor) -> Nested:
    """The tensor's values as nested lists of F32."""
    flat = iter([_DECODE[t.dtype](bits) for bits in encodings(t)])

    def build(shape: tuple[int, ...]) -> Nested:
        return next(flat) if not shape else [build(shape[1:]) for _ in range(shape[0])]

    return build(tuple(t.shape))


def flatten(nested: Nested) -> list[F32]:
    return [nested] if isinstance(nested, F32) else [leaf for part in nested for leaf in flatten(part)]


def shape_of(nested: Nested) -> tuple[int, ...]:
    if isinstance(nested, F32):
        return ()
    return (len(nested), *shape_of(nested[0])) if nested else (0,)


def from_bits(bits: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A flat tensor with the given unsigned encodings."""
    half = (_MASK[dtype] + 1) // 2
    signed = [b - 2 * half if b >= half else b for b in bits]
    return torch.tensor(signed, dtype=_INTEGER[dtype]).view(dtype)


def assert_encodings(name: str, actual: torch.Tensor, expected: Nested, dtype: torch.dtype = torch.float32) -> None:
    """The tensor has this dtype and, element by element, the reference's encodings (NaN payloads aside)."""
    assert actual.dtype == dtype, f"{name}: dtype {actual.dtype}, want {dtype}"
    leaves = flatten(expected)
    if leaves:
        assert tuple(actual.shape) == shape_of(expected), f"{name}: {tuple(actual.shape)} != {shape_of(expected)}"
    got, want = encodings(actual), [_ENCODE[dtype](leaf) for leaf in leaves]
    assert len(got) == len(want), f"{name}: {len(got)} elements, want {len(want)}"
    wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    if wrong:
        i = wrong[0]
        raise AssertionError(
            f"{name}: {len(wrong)} of {len(want)} elements differ; first at flat index {i}: "
            f"0x{got[i]:x} ({_DECODE[dtype](got[i])}), want 0x{want[i]:x} ({leaves[i]})"
        )


def assert_same_tensor(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Two tensors of one dtype and shape with the same encodings (NaN payloads aside)."""
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, want {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, want {tuple(expected.shape)}"
    pairs = list(zip(encodings(actual), encodings(expected), strict=True))
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
    assert not wrong, f"{name}: {len(wrong)} elements differ, first at flat index {wrong[0]}"


def _scalar(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[F32], F32]:
    """A torch function on one number. One element never fills a vector register: torch takes its scalar path."""

    def evaluate(x: F32) -> F32:
        return from_bits32(encodings(fn(from_bits([to_bits32(x)])))[0])

    return evaluate


TORCH_ELEMENTARY = Elementary(
    exp=_scalar(torch.exp),
    sigmoid=_scalar(torch.sigmoid),
    sqrt=_scalar(torch.sqrt),
    rsqrt=_scalar(torch.rsqrt),
)
