"""Raw bytes, hashes, encodings and distances, against values that are known without the package."""

from __future__ import annotations

import hashlib
import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.mhc import bits
from rl_engine.mhc.bits import (
    differing,
    encodings,
    hex_encoding,
    ordinals,
    same_bytes,
    tensor_bytes,
    tensor_difference,
    tensor_sha256,
)
from tests.operators.support import BF16, FP32, Draws, tensors
from tests.reference.bridge import from_bits

KNOWN = {
    "fp32": (torch.tensor([1.0, -2.0]), "0000803f000000c0"),
    "bf16": (torch.tensor([1.0, -2.0]).to(BF16), "803f00c0"),
    "fp16": (torch.tensor([1.0]).to(torch.float16), "003c"),
    "fp64": (torch.tensor([1.0], dtype=torch.float64), "000000000000f03f"),
    "int64": (torch.tensor([1, -1]), "0100000000000000" + "ff" * 8),
    "int32": (torch.tensor([258], dtype=torch.int32), "02010000"),
    "int16": (torch.tensor([-2], dtype=torch.int16), "feff"),
    "uint8": (torch.tensor([7, 255], dtype=torch.uint8), "07ff"),
    "int8": (torch.tensor([-128], dtype=torch.int8), "80"),
    "bool": (torch.tensor([True, False, True]), "010001"),
    "0-d": (torch.tensor(1.0), "0000803f"),
    "0-d bool": (torch.tensor(True), "01"),
    "empty": (torch.empty(0), ""),
    "empty axes": (torch.empty(3, 0, 2), ""),
    "signed zero": (torch.tensor([-0.0]), "00000080"),
    "nan payload": (from_bits([0x7FC12345]), "4523c17f"),
    "subnormal": (from_bits([1]), "01000000"),
    "rows": (torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8), "01020304"),
    "columns": (torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t(), "01030204"),
    "strided": (torch.arange(6, dtype=torch.uint8)[::2], "000204"),
    "expanded": (torch.tensor([9], dtype=torch.uint8).expand(3), "090909"),
    "flipped": (torch.arange(3, dtype=torch.uint8).flip(0), "020100"),
    "complex": (torch.tensor([1 - 2j], dtype=torch.complex64), "0000803f000000c0"),
    "conjugate": (torch.tensor([1 + 2j], dtype=torch.complex64).conj(), "0000803f000000c0"),
    "negated view": (torch.tensor([2j], dtype=torch.complex64).conj().imag, "000000c0"),
    "requires grad": (torch.tensor([1.0], requires_grad=True), "0000803f"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_bytes(name: str) -> None:
    tensor, want = KNOWN[name]
    assert tensor_bytes(tensor).hex() == want
    assert tensor_sha256(tensor) == hashlib.sha256(bytes.fromhex(want)).hexdigest()


def test_a_known_hash() -> None:
    assert tensor_sha256(torch.tensor([97, 98, 99], dtype=torch.uint8)) == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


@pytest.mark.parametrize("stride", [(2, 1), (1, 5), (2, 7), (0, 0), (1, 0)])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.int64, torch.bool])
def test_an_axis_of_length_one_may_have_any_stride(dtype: torch.dtype, stride: tuple[int, int]) -> None:
    base = torch.arange(12).to(dtype)
    t = base.as_strided((3, 1), stride)
    want = [base[i * stride[0]] for i in range(3)]
    assert tensor_bytes(t) == b"".join(tensor_bytes(v) for v in want)
    assert encodings(t).shape == (3, 1)
    assert same_bytes(t, torch.stack(want)[:, None])
    assert tensor_bytes(base.as_strided((1, 3), stride[::-1])) == tensor_bytes(t)


@given(tensors(2, 3, 2))
@settings(max_examples=40)
def test_bytes_are_those_of_numpy_in_any_layout(x: Tensor) -> None:
    for t in (x, x.transpose(0, 2), x[:, ::2], x[..., 1:], x.flip(1), x[:0]):
        assert tensor_bytes(t) == np.ascontiguousarray(t.numpy()).astype("<f4").tobytes()


# --- encodings ---


def test_every_nan_has_one_encoding_and_the_zeros_two() -> None:
    t = from_bits([0x7FC00000, 0xFFC00001, 0x7F800001, 0, 0x80000000, 0x7F800000])
    got = encodings(t).tolist()
    assert got[0] == got[1] == got[2]
    assert len(set(got)) == 4
    narrow = encodings(from_bits([0x7FC0, 0xFF81, 0x7FFF, 0x7F80], BF16)).tolist()
    assert narrow[0] == narrow[1] == narrow[2] != narrow[3]
    assert encodings(torch.tensor([True, False])).tolist() == [1, 0]
    assert encodings(torch.tensor([-1, 5])).tolist() == [-1, 5]
    assert encodings(torch.tensor(1.0)).shape == ()


def test_what_differs() -> None:
    nan, other = from_bits([0x7FC00000]), from_bits([0xFFC00001])
    assert same_bytes(nan, other)
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(nan, torch.tensor([1.0]))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, 1))
    assert not same_bytes(torch.zeros(2), torch.zeros(2).to(BF16))
    assert same_bytes(torch.empty(0, 3), torch.empty(0, 3))
    a, b = torch.tensor([[1.0, 0.0], [float("nan"), 2.0]]), torch.tensor([[1.0, -0.0], [float("nan"), 3.0]])
    assert differing(a, b).tolist() == [[False, True], [False, True]]
    for bad in (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="cannot compare"):
            differing(a, bad)
        with pytest.raises(ValueError, match="cannot compare"):
            tensor_difference(a, bad)


def test_hexadecimal() -> None:
    assert hex_encoding(torch.tensor(1.0)) == "0x3f800000"
    assert hex_encoding(torch.tensor([-2.0]).to(BF16)) == "0xc000"
    assert hex_encoding(torch.tensor([[True]])) == "0x01"
    assert hex_encoding(from_bits([0x7FC12345])) == "0x7fc12345"


# --- the number line ---


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_ordinals_of_a_whole_format(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = every[~every.isnan()]
    places = ordinals(numbers)
    order = places.argsort()
    assert (places[order].diff() == 1).all()
    values = numbers[order].to(torch.float64)
    assert (values.diff() >= 0).all()
    assert int((values.diff() == 0).sum()) == 1  # the two zeros
    assert ordinals(torch.tensor([0.0, -0.0]).to(dtype)).tolist() == [0, -1]


@given(tensors(2, low=0, high=254))
@settings(max_examples=200)
def test_ordinals_keep_the_order_of_fp32(pair: Tensor) -> None:
    a, b = pair.tolist()
    first, second = ordinals(pair).tolist()
    if a < b:
        assert first < second
    elif a == b:
        signs = math.copysign(1, a) - math.copysign(1, b)
        assert first - second == signs / 2
    assert first + ordinals(-pair).tolist()[0] == -1


@given(st.integers(-0x7F7FFFFF, 0x7F7FFFFF))
@settings(max_examples=200)
def test_neighbours_are_one_apart(start: int) -> None:
    value = from_bits([abs(start) | (0x80000000 if start < 0 else 0)])
    with np.errstate(over="ignore"):
        up = np.nextafter(np.float32(value.item()), np.float32(np.inf), dtype=np.float32)
    steps = [float(value.item()), float(up)]
    if 0.0 not in steps:  # a step to or from zero passes both zeros
        low, high = ordinals(torch.tensor(steps)).tolist()
        assert high - low == 1


def test_ordinals_at_the_ends() -> None:
    t = torch.tensor([float("-inf"), -3.4028234663852886e38, -0.0, 0.0, 3.4028234663852886e38, float("inf")])
    places = ordinals(t).tolist()
    assert places == [-0x7F800001, -0x7F800000, -1, 0, 0x7F7FFFFF, 0x7F800000]
    assert all(a < b for a, b in pairwise(places))


# --- differences ---


def test_no_difference() -> None:
    x = Draws("bits same")(3, 4)
    assert tensor_difference(x, x.clone()) is None
    assert tensor_difference(from_bits([0x7FC00000]), from_bits([0xFFC00001])) is None
    assert tensor_difference(torch.empty(0), torch.empty(0)) is None


def test_the_figures_of_a_difference() -> None:
    want = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    moved = encodings(want).clone()
    moved[0, 2] += 1
    moved[1, 0] += 5
    moved[1, 2] -= 3
    found = tensor_difference(moved.view(FP32), want)
    assert found is not None
    assert (found.count, found.total, found.nan_mismatches, found.index) == (3, 6, 0, (0, 2))
    assert (found.candidate_hex, found.reference_hex) == ("0x40400001", "0x40400000")
    assert (found.candidate, found.reference) == (struct.unpack("<f", b"\1\0\x40\x40")[0], 3.0)
    assert (found.max_ulp, found.median_ulp, found.signed_bias_ulp, found.toward_zero) == (5, 3.0, 1.0, False)


def test_a_nan_against_a_number() -> None:
    nan = float("nan")
    found = tensor_difference(torch.tensor([nan, 1.0, 2.0]), torch.tensor([1.0, nan, 2.0]))
    assert found is not None
    assert (found.count, found.nan_mismatches, found.max_ulp, found.median_ulp) == (2, 2, 0, 0.0)
    assert math.isnan(found.candidate) and found.reference == 1.0
    assert (found.signed_bias_ulp, found.toward_zero) == (0.0, False)


def test_a_difference_of_other_types_and_ranks() -> None:
    found = tensor_difference(torch.tensor(2), torch.tensor(5))
    assert found is not None
    assert (found.index, found.max_ulp, found.signed_bias_ulp, found.toward_zero) == ((), 3, -3.0, False)
    found = tensor_difference(torch.tensor([True, True]), torch.tensor([True, False]))
    assert found is not None
    assert (found.index, found.candidate_hex, found.reference_hex) == ((1,), "0x01", "0x00")
    layout = torch.zeros(2, 3, 4).permute(2, 0, 1)
    other = layout.clone()
    other[3, 1, 2] = 1
    found = tensor_difference(other, layout)
    assert found is not None and found.index == (3, 1, 2)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_truncation_is_seen(dtype: torch.dtype) -> None:
    want = Draws("truncation")(64).to(dtype)
    inward = (encodings(want) - 1).view(dtype)  # sign and magnitude: one less is nearer to zero on both sides
    found = tensor_difference(inward, want)
    assert found is not None and found.toward_zero and found.max_ulp == 1
    outward = tensor_difference(want, inward)
    assert outward is not None and not outward.toward_zero
    far = tensor_difference((encodings(want) - 2).view(dtype), want)
    assert far is not None and not far.toward_zero
    overflow = tensor_difference(torch.tensor([3.4028234663852886e38]), torch.tensor([float("inf")]))
    assert overflow is not None and overflow.toward_zero


@pytest.mark.parametrize(("candidate", "reference"), [(-0.0, 0.0), (0.0, -0.0)])
def test_the_other_zero_is_no_truncation(candidate: float, reference: float) -> None:
    """A zero cannot move toward zero: a store that truncates keeps its sign."""
    found = tensor_difference(torch.tensor([candidate]), torch.tensor([reference]))
    assert found is not None and found.max_ulp == 1
    assert not found.toward_zero


def test_differences_under_other_defaults() -> None:
    x = Draws("bits defaults")(3, 4)
    y = (encodings(x) + 1).view(FP32)
    want, before = tensor_difference(y, x), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = tensor_difference(y, x)
    finally:
        torch.set_default_dtype(before)
    assert got == want


def test_the_contract_gives_the_same_functions() -> None:
    from rl_engine.mhc import contract

    assert (contract.tensor_bytes, contract.tensor_sha256) == (bits.tensor_bytes, bits.tensor_sha256)
