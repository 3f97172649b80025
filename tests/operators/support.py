"""Seeded inputs, edge rows, layouts and argument faults that the operator tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.reference.bridge import assert_same_tensor, encodings, from_bits

BF16, FP32 = torch.bfloat16, torch.float32

# Rows that have gone wrong elsewhere, as one value each. Squares of 1e-30 underflow to 0, of 1e-22 to a
# subnormal, of 1e20 overflow; 1e-40 is itself subnormal.
EDGE_VALUES = {
    "zero": 0.0,
    "negative zero": -0.0,
    "underflow": 1e-30,
    "subnormal square": 1e-22,
    "subnormal": 1e-40,
    "overflow": 1e20,
    "largest": 3e38,
    "inf": float("inf"),
    "nan": float("nan"),
}


class Draws:
    """Normal draws whose seed comes from a name, so that no two tests share data by accident."""

    def __init__(self, name: str) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)


def edge_rows(name: str, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width]: each edge value with alternating signs, then rows that mix them with normal numbers."""
    draws = Draws(name)
    signs = torch.tensor([1.0, -1.0]).repeat(width)[:width]
    rows = [torch.full((width,), value) * signs for value in EDGE_VALUES.values()]
    rows.append(torch.zeros(width))
    for value in (1e-30, 1e20, -0.0):
        mixed = draws(width)
        mixed[1] = value
        rows.append(mixed)
    return torch.stack(rows).to(dtype)


def finite_bits(exponent_low: int = 0, exponent_high: int = 254) -> st.SearchStrategy[int]:
    """FP32 encodings with a biased exponent in the given range; 0 brings zeros and subnormals."""
    exponent = st.integers(exponent_low, exponent_high)
    return st.builds(
        lambda sign, e, fraction: (sign << 31) | (e << 23) | fraction,
        st.integers(0, 1),
        exponent,
        st.one_of(st.sampled_from([0, 1, 0x400000, 0x7FFFFF]), st.integers(0, 0x7FFFFF)),
    )


def tensors(*shape: int, dtype: torch.dtype = FP32, low: int = 0, high: int = 254) -> st.SearchStrategy[Tensor]:
    """Tensors of the shape whose encodings hypothesis draws (BF16 takes the upper half of each)."""
    count = 1
    for n in shape:
        count *= n
    bits = st.lists(finite_bits(low, high), min_size=count, max_size=count)
    if dtype == BF16:
        return bits.map(lambda b: from_bits([v >> 16 for v in b], BF16).reshape(shape))
    return bits.map(lambda b: from_bits(b).reshape(shape))


def leaves(value: Any) -> list[Tensor]:
    """Every tensor inside nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for part in value.values() for t in leaves(part)]
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in leaves(part)]
    return []


def assert_fresh(outputs: Any, inputs: Any) -> None:
    """No output shares storage with an input or with another output; empty tensors included."""
    taken = {t.untyped_storage()._cdata for t in leaves(inputs)}
    for t in leaves(outputs):
        identity = t.untyped_storage()._cdata
        assert identity not in taken, f"an output {tuple(t.shape)} shares storage"
        taken.add(identity)


def assert_leaves_unchanged(call: Callable[[], Any], watched: Any) -> None:
    """The call writes into none of the watched tensors."""
    before = [encodings(t) for t in leaves(watched)]
    assert before, "nothing is watched"
    call()
    for index, (t, old) in enumerate(zip(leaves(watched), before, strict=True)):
        assert encodings(t) == old, f"watched tensor {index} {tuple(t.shape)} changed"


def assert_same_leaves(name: str, actual: Any, expected: Any) -> None:
    got, want = leaves(actual), leaves(expected)
    assert len(got) == len(want) > 0, f"{name}: {len(got)} tensors, want {len(want)}"
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_tensor(f"{name}[{index}]", a, b)


def strided(t: Tensor) -> Tensor:
    """The same values at every second place of a wider buffer of NaN."""
    buffer = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype)
    buffer[..., ::2] = t
    return buffer[..., ::2]


def transposed(t: Tensor) -> Tensor:
    """The same values with the dimensions laid out in reverse."""
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def offset(t: Tensor) -> Tensor:
    """The same values one element into a larger buffer: rows are contiguous, alignment is odd."""
    buffer = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype)
    buffer[1:] = t.flatten()
    return buffer[1:].view(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"strided": strided, "transposed": transposed, "offset": offset}


def relaid(args: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """The arguments with every tensor in another layout; each really differs from a contiguous one."""
    moved = {k: LAYOUTS[layout](v) if isinstance(v, Tensor) else v for k, v in args.items()}
    for key, value in moved.items():
        if isinstance(value, Tensor):
            original = args[key]
            assert_same_tensor(key, value, original)
            flat = layout == "transposed" and value.dim() == 1
            assert flat or value.stride() != original.stride() or value.storage_offset() == 1
    return moved


Fault = tuple[type[Exception], Callable[[Tensor], Tensor]]

FAULTS: dict[str, Fault] = {
    "rank": (ValueError, lambda t: t.unsqueeze(0)),
    "flat": (ValueError, lambda t: t.flatten() if t.dim() > 1 else t.reshape(1, -1)),
    "fp64": (TypeError, lambda t: t.to(torch.float64)),
    "fp16": (TypeError, lambda t: t.to(torch.float16)),
    "int": (TypeError, lambda t: t.to(torch.int32)),
    "bf16": (TypeError, lambda t: t.to(BF16)),
    "fp32": (TypeError, lambda t: t.to(FP32)),
    "width": (ValueError, lambda t: torch.cat([t, t[..., :1]], dim=-1)),
    "tokens": (ValueError, lambda t: torch.cat([t, t[:1]], dim=0)),
    "device": (ValueError, lambda t: t.to("meta")),
}
COMMON_FAULTS = ("rank", "flat", "fp64", "fp16", "int", "width", "device")


def faults(fields: Mapping[str, Sequence[str]]) -> list[Any]:
    """pytest parameters (field, fault): the common faults of each field, and the further ones it names."""
    return [
        pytest.param(field, fault, id=f"{field}-{fault}")
        for field, further in fields.items()
        for fault in (*COMMON_FAULTS, *further)
    ]


def assert_fault(
    fn: Callable[..., Any], args: Mapping[str, Any], field: str, fault: str, also: Iterable[str] = ()
) -> None:
    """One bad argument raises its error; the message names the field, or one of `also`, with which it disagrees."""
    error, spoil = FAULTS[fault]
    with pytest.raises(error) as caught:
        fn(*{**args, field: spoil(args[field])}.values())
    message = str(caught.value)
    assert any(name in message for name in (field, *also)), f"{fault} of {field} is not named in: {message}"
