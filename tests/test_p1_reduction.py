"""The two reduction trees against a scalar loop of NumPy FP32 adds, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.mhc import reduction
from rl_engine.mhc.reduction import fixed_dot, fixed_sum, fixed_sumsq, stream4_max, stream4_sum, stream4_sum_dim
from tests.operators.support import BF16, FP32, LAYOUTS, Draws, tensors
from tests.reference.bridge import assert_same_tensor, from_bits

Array = np.ndarray[Any, np.dtype[np.float32]]
ORDER = torch.tensor([1e8, 1.0, -1e8, 1.0, 3e-3, -7.0, 1e8, 0.5, -1e8, 1e-3, 2.5, -1.0])
STREAM = [1e8, 1.0, -1e8, 1.0]


def fold(terms: Array) -> np.float32:
    acc = np.float32(0)
    with np.errstate(all="ignore"):
        for term in terms:
            acc = np.float32(acc + term)
    return acc


def products(a: Tensor, b: Tensor) -> Array:
    with np.errstate(all="ignore"):
        return np.multiply(a.to(FP32).numpy(), b.to(FP32).numpy(), dtype=np.float32)


def folded_rows(terms: Array) -> Tensor:
    """The serial fold of every row: ``add.accumulate`` adds one element after the other."""
    start = np.zeros((*terms.shape[:-1], 1), dtype=np.float32)
    return torch.from_numpy(np.add.accumulate(np.concatenate([start, terms], axis=-1), axis=-1)[..., -1].copy())


def scalar(value: np.float32) -> Tensor:
    return torch.tensor(np.float32(value))


def descending(a: Array, b: Array) -> np.float32:
    return fold((a * b)[::-1])


def tree(a: Array, b: Array) -> np.float32:
    terms = list(a * b)
    while len(terms) > 1:
        pairs = [np.float32(x + y) for x, y in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
    return np.float32(terms[0])


def fused(a: Array, b: Array) -> np.float32:
    acc = np.float32(0)
    for x, y in zip(a, b, strict=True):
        acc = np.float32(np.float64(x) * np.float64(y) + np.float64(acc))
    return acc


def doubled(a: Array, b: Array) -> np.float32:
    return np.float32(np.dot(a.astype(np.float64), b.astype(np.float64)))


VARIANTS: dict[str, Callable[[Array, Array], np.float32]] = {
    "descending": descending,
    "tree": tree,
    "fma": fused,
    "fp64": doubled,
}


def test_names() -> None:
    assert (reduction.HC_MULT, reduction.LONG_REDUCTION_ORDER) == (4, "serial-ascending-left-fold")
    assert reduction.STREAM4_TREE == "(a0+a1)+(a2+a3)"


@settings(max_examples=150)
@given(st.integers(0, 24).flatmap(lambda n: tensors(n, low=100, high=150)))
def test_sums_are_scalar_loops(x: Tensor) -> None:
    assert_same_tensor("sum", fixed_sum(x), scalar(fold(x.numpy())))
    assert_same_tensor("sumsq", fixed_sumsq(x), scalar(fold(products(x, x))))


@settings(max_examples=80)
@given(tensors(2, 13, low=1), tensors(3, 13, low=1))
def test_dot_is_a_scalar_loop_at_any_exponent(a: Tensor, b: Tensor) -> None:
    want = torch.tensor([[fold(products(x, y)) for y in b] for x in a])
    assert_same_tensor("dot", fixed_dot(a, b), want)


@settings(max_examples=60)
@given(tensors(2, 9, low=0, high=70), tensors(2, 9, dtype=BF16, low=50, high=70))
def test_dot_keeps_subnormals_and_widens_bf16(a: Tensor, b: Tensor) -> None:
    want = torch.tensor([[fold(products(x, y)) for y in b] for x in a])
    assert_same_tensor("dot", fixed_dot(a, b), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_another_order_or_a_fused_product_is_told_apart(variant: str) -> None:
    a, b = Draws("variants a")(64, 37), Draws("variants b")(64, 37)
    got = torch.stack([fixed_dot(x[None], y[None]).reshape(()) for x, y in zip(a, b, strict=True)])
    right = torch.stack([scalar(fold(products(x, y))) for x, y in zip(a, b, strict=True)])
    wrong = torch.stack([scalar(VARIANTS[variant](x.numpy(), y.numpy())) for x, y in zip(a, b, strict=True)])
    assert_same_tensor("dot", got, right)
    assert int((wrong != right).sum()) > 10


@pytest.mark.parametrize("variant", ["descending", "tree", "fp64"])
def test_another_order_of_a_sum_is_told_apart(variant: str) -> None:
    x, one = ORDER.numpy(), np.ones(len(ORDER), dtype=np.float32)
    assert fixed_sum(ORDER).item() == float(fold(x)) != float(VARIANTS[variant](x, one))


def test_a_square_rounds_before_it_is_added() -> None:
    x = Draws("squares")(64, 21)
    got = fixed_sumsq(x)
    wrong = torch.stack([scalar(fused(row, row)) for row in x.numpy()])
    assert_same_tensor("sumsq", got, folded_rows(products(x, x)))
    assert int((got != wrong).sum()) > 10


def test_the_fold_starts_at_plus_zero() -> None:
    zeros = torch.full((3,), -0.0)
    assert_same_tensor("sum", fixed_sum(zeros), torch.tensor(0.0))
    assert_same_tensor("one", fixed_sum(zeros[:1]), torch.tensor(0.0))
    assert_same_tensor("dot", fixed_dot(zeros[None], torch.ones(1, 3)), torch.zeros(1, 1))


@pytest.mark.parametrize("terms", [1, 2, 14, 15, 16, 31])
@pytest.mark.parametrize("lanes", [1, 2, 2047, 2048, 2049, 4097])
def test_a_lane_does_not_know_how_many_there_are(lanes: int, terms: int) -> None:
    x = Draws(f"lanes {terms}")(4097, terms)[:lanes]
    got = fixed_sum(x)
    assert_same_tensor("all", got, folded_rows(x.numpy()))
    for lane in {0, lanes // 2, lanes - 1}:
        assert_same_tensor(f"lane {lane}", fixed_sum(x[lane]), got[lane])


@pytest.mark.parametrize("terms", [32766, 32767, 32768, 65535])
def test_long_folds_across_the_blocks_of_terms(terms: int) -> None:
    x = Draws("long")(3, 65535)[:, :terms].contiguous()
    assert_same_tensor("three", fixed_sum(x), folded_rows(x.numpy()))
    assert_same_tensor("one", fixed_sum(x[1]), folded_rows(x[1].numpy()))
    assert_same_tensor("last", fixed_sumsq(x)[2], folded_rows(products(x[2], x[2])))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 40), (33, 64, 17), (3, 2049, 16), (2049, 1, 3), (65, 32, 1)])
def test_dot_across_the_blocks_of_lanes(m: int, n: int, k: int) -> None:
    a, b = Draws(f"dot a {m}")(m, k), Draws(f"dot b {n}")(n, k)
    got = fixed_dot(a, b)
    assert_same_tensor("dot", got, folded_rows(products(a[:, None], b[None])))
    assert_same_tensor("last", fixed_dot(a[-1:], b[-1:]), got[-1:, -1:])


@pytest.mark.parametrize("fn", [fixed_sum, fixed_sumsq])
def test_every_dim_of_a_tensor(fn: Callable[..., Tensor]) -> None:
    x = Draws("dims")(3, 5, 4)
    terms = x if fn is fixed_sum else x * x
    for dim in range(3):
        want = folded_rows(terms.movedim(dim, -1).numpy())
        assert_same_tensor(f"dim {dim}", fn(x, dim), want)
        assert_same_tensor(f"dim {dim - 3}", fn(x, dim - 3), want)
    assert_same_tensor("default", fn(x), fn(x, 2))


@pytest.mark.parametrize("dim", [3, -4, 100])
def test_a_dim_out_of_range_is_refused(dim: int) -> None:
    for call in (fixed_sum, fixed_sumsq, stream4_sum_dim, stream4_max):
        with pytest.raises(ValueError, match=f"dim {dim} .*\\(4, 4, 4\\)"):
            call(torch.zeros(4, 4, 4), dim)
        with pytest.raises(ValueError, match="dim 0"):
            call(torch.tensor(1.0), 0)


def test_empty_axes() -> None:
    assert_same_tensor("no terms", fixed_sum(torch.empty(3, 0)), torch.zeros(3))
    assert_same_tensor("no lanes", fixed_sum(torch.empty(3, 0), 0), torch.zeros(0))
    assert_same_tensor("0-d", fixed_sum(torch.empty(0)), torch.tensor(0.0))
    assert_same_tensor("two", fixed_sumsq(torch.empty(2, 0, 3), 1), torch.zeros(2, 3))
    assert_same_tensor("no k", fixed_dot(torch.empty(2, 0), torch.empty(3, 0)), torch.zeros(2, 3))
    assert_same_tensor("no rows", fixed_dot(torch.empty(0, 5), torch.ones(3, 5)), torch.zeros(0, 3))
    assert_same_tensor("no columns", fixed_dot(torch.ones(3, 5), torch.empty(0, 5)), torch.zeros(3, 0))
    assert_same_tensor("stream", stream4_sum_dim(torch.empty(0, 4), 1), torch.zeros(0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout: str) -> None:
    x, w = Draws("layout x")(6, 4), Draws("layout w")(3, 4)
    moved, moved_w = LAYOUTS[layout](x), LAYOUTS[layout](w)
    for dim in (0, 1):
        assert_same_tensor(f"sum {dim}", fixed_sum(moved, dim), fixed_sum(x, dim))
        assert_same_tensor(f"sumsq {dim}", fixed_sumsq(moved, dim), fixed_sumsq(x, dim))
    assert_same_tensor("dot", fixed_dot(moved, moved_w), fixed_dot(x, w))
    assert_same_tensor("stream", stream4_sum_dim(moved, 1), stream4_sum_dim(x, 1))
    wide = x[:1].expand(5, 4)
    assert_same_tensor("expanded", fixed_dot(wide, w), fixed_dot(wide.clone(), w))


def test_a_nan_spoils_its_lane_alone() -> None:
    x, w = Draws("nan x")(5, 7), Draws("nan w")(3, 7)
    bad = x.clone()
    bad[2, 3], bad[4, 0] = float("nan"), float("inf")
    rest = [0, 1, 3]
    assert fixed_sum(bad)[2].isnan() and fixed_dot(bad, w)[2].isnan().all()
    assert_same_tensor("sum", fixed_sum(bad)[rest], fixed_sum(x)[rest])
    assert_same_tensor("dot", fixed_dot(bad, w)[rest], fixed_dot(x, w)[rest])
    assert fixed_sum(bad)[4].item() == float("inf")


def test_bf16_is_widened() -> None:
    x, w = Draws("bf16 x")(3, 9, dtype=BF16), Draws("bf16 w")(2, 9, dtype=BF16)
    for got, want in (
        (fixed_sum(x), fixed_sum(x.to(FP32))),
        (fixed_sumsq(x), fixed_sumsq(x.to(FP32))),
        (fixed_dot(x, w), fixed_dot(x.to(FP32), w.to(FP32))),
        (fixed_dot(x, w.to(FP32)), fixed_dot(x.to(FP32), w.to(FP32))),
    ):
        assert_same_tensor("widened", got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["sum", "sumsq", "dot a", "dot b", "stream4_sum", "stream4_sum_dim", "stream4_max"])
def test_other_dtypes_are_refused(name: str, dtype: torch.dtype) -> None:
    x, good = torch.zeros(4, 4).to(dtype), torch.zeros(4, 4)
    calls: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: fixed_sum(x),
        "sumsq": lambda: fixed_sumsq(x),
        "dot a": lambda: fixed_dot(x, good),
        "dot b": lambda: fixed_dot(good, x),
        "stream4_sum": lambda: stream4_sum([good, good, x, good]),
        "stream4_sum_dim": lambda: stream4_sum_dim(x, 0),
        "stream4_max": lambda: stream4_max(x, 0),
    }
    with pytest.raises(TypeError, match=str(dtype)):
        calls[name]()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="K of a is 3, K of b is 4"):
        fixed_dot(torch.zeros(2, 3), torch.zeros(2, 4))
    for a, b in ((torch.zeros(3), torch.zeros(2, 3)), (torch.zeros(2, 3), torch.zeros(1, 2, 3))):
        with pytest.raises(ValueError, match="want \\[M, K\\] and \\[N, K\\]"):
            fixed_dot(a, b)
    for count in (0, 3, 5):
        with pytest.raises(ValueError, match=f"got {count} parts, want 4"):
            stream4_sum([torch.zeros(2)] * count)
        for call in (stream4_sum_dim, stream4_max):
            with pytest.raises(ValueError, match="axis of length 4"):
                call(torch.zeros(2, count), 1)


@settings(max_examples=150)
@given(tensors(4, low=100, high=150))
def test_the_stream_tree(x: Tensor) -> None:
    a0, a1, a2, a3 = x.numpy()
    want = scalar(np.float32(np.float32(a0 + a1) + np.float32(a2 + a3)))
    assert_same_tensor("parts", stream4_sum(list(x)), want)
    assert_same_tensor("dim", stream4_sum_dim(x, 0), want)
    assert_same_tensor("max", stream4_max(x, -1), x.max())


def test_the_stream_tree_is_no_fold() -> None:
    x = torch.tensor(STREAM)
    assert stream4_sum_dim(x, 0).item() == 0.0
    assert fixed_sum(x).item() == 1.0
    assert stream4_sum([x[i : i + 1, None].expand(1, 3) for i in range(4)]).tolist() == [[0.0] * 3]
    columns = Draws("columns")(3, 4, 2)
    parts = list(columns.unbind(1))
    assert_same_tensor("middle", stream4_sum_dim(columns, 1), (parts[0] + parts[1]) + (parts[2] + parts[3]))


def test_a_nan_wins_the_maximum_anywhere() -> None:
    for place in range(4):
        x = torch.tensor([1.0, float("inf"), -2.0, 3.0])
        x[place] = float("nan")
        assert stream4_max(x, 0).isnan()


@pytest.mark.parametrize("signs", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1, 0), (1, 0, 0, 1)])
def test_the_maximum_of_two_zeros_does_not_depend_on_the_size(signs: tuple[int, ...]) -> None:
    """Which zero wins is an answer like any other: the same alone and among many."""
    x = from_bits([sign << 31 for sign in signs])
    alone = stream4_max(x, 0)
    for lanes in (1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 64, 65, 257):
        assert_same_tensor(f"{lanes} lanes", stream4_max(x[:, None].repeat(1, lanes), 0), alone.expand(lanes))
        assert_same_tensor(f"{lanes} rows", stream4_max(x.repeat(lanes, 1), 1), alone.expand(lanes))


def test_a_parameter_builds_no_graph() -> None:
    x = Draws("graph")(4, 4).requires_grad_()
    outputs = [fixed_sum(x), fixed_sumsq(x), fixed_dot(x, x), stream4_sum(list(x)), stream4_sum_dim(x, 0)]
    outputs.append(stream4_max(x, 0))
    assert all(out.grad_fn is None and not out.requires_grad for out in outputs)
    assert_same_tensor("sum", outputs[0], fixed_sum(x.detach()))


def everything(x: Tensor) -> list[Tensor]:
    narrow = x.to(BF16)
    return [fixed_sum(x), fixed_sumsq(x, 0), fixed_dot(x, narrow), stream4_sum_dim(x, 0), stream4_max(x, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    x = Draws("defaults")(4, 4)
    want, before = everything(x), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = everything(x)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert_same_tensor("default dtype", a, b)


def test_the_default_device_does_not_matter() -> None:
    x = Draws("defaults")(4, 4)
    want = everything(x)
    with torch.device("meta"):
        got = everything(x)
    for a, b in zip(got, want, strict=True):
        assert a.device.type == "cpu"
        assert_same_tensor("default device", a, b)
    shapes = [tuple(out.shape) for out in everything(x.to("meta"))]
    assert shapes == [tuple(out.shape) for out in want]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    x = Draws("threads")(300, 700)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = fixed_dot(x[:70], x[70:140])
    finally:
        torch.set_num_threads(before)
    assert_same_tensor("dot", got, folded_rows(products(x[:70, None], x[None, 70:140])))
