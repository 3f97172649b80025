"""What is within a tolerance: steps of the format or a distance, never NaN or infinity against a number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_engine.mhc.acceptance.judge import compare_tensor
from rl_engine.mhc.profiles import Tolerance

INF, NAN = float("inf"), float("nan")
WIDE = Tolerance(ulp=2**40, rtol=1e30, atol=1e300)
FAR = [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (3e38, INF), (INF, -INF), (-INF, -3e38), (NAN, INF), (INF, NAN), (NAN, 0.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_are_near_themselves_alone(dtype: torch.dtype) -> None:
    for got, want in FAR:
        pair = (torch.tensor([2.0, v], dtype=dtype) for v in (got, want))
        divergence = compare_tensor("x", *pair, WIDE)
        assert divergence is not None and divergence.kind == "bytes", (got, want)
    for value in (NAN, INF, -INF):
        x = torch.tensor([value], dtype=dtype)
        assert compare_tensor("x", x, x.clone(), Tolerance(ulp=1)) is None
    assert compare_tensor("x", torch.tensor([-3e38], dtype=dtype), torch.tensor([3e38], dtype=dtype), WIDE) is None


NEAR_PAIRS: list[tuple[Tolerance, float, float, bool]] = [
    (Tolerance(ulp=1), 1 + 2.0**-7, 1.0, True),
    (Tolerance(ulp=1), 1 + 2.0**-6, 1.0, False),
    (Tolerance(ulp=2), 1 + 2.0**-6, 1.0, True),
    (Tolerance(ulp=1), 1 - 2.0**-8, 1.0, True),
    (Tolerance(ulp=1), -0.0, 0.0, True),
    (Tolerance(atol=1e-30), -0.0, 0.0, True),
    (Tolerance(rtol=1.0), -0.0, 0.0, True),
    (Tolerance(atol=0.25), 1.25, 1.0, True),
    (Tolerance(atol=0.25), 1.25 + 2.0**-7, 1.0, False),
    (Tolerance(rtol=0.125), -9.0, -8.0, True),
    (Tolerance(rtol=0.125), -8.0, -9.25, False),
    (Tolerance(rtol=0.125), 8.0, -8.0, False),
    (Tolerance(rtol=0.5, atol=0.5), 2.0, 1.0, True),
    (Tolerance(rtol=1.0), 1e-30, 0.0, False),
]


@pytest.mark.parametrize(("tolerance", "got", "want", "near"), NEAR_PAIRS, ids=str)
def test_how_near_is_near(tolerance: Tolerance, got: float, want: float, near: bool) -> None:
    a, b = (torch.tensor([3.0, v], dtype=torch.bfloat16) for v in (got, want))
    assert (compare_tensor("x", a, b, tolerance) is None) == near
    assert compare_tensor("x", a, b) is not None


def test_a_tolerance_is_for_values_alone() -> None:
    x: Tensor = torch.ones(2, 3)
    for other, kind in ((x.double(), "dtype"), (x.t(), "shape"), (x.to("meta"), "device"), (None, "presence")):
        divergence = compare_tensor("x", other, x, WIDE)
        assert divergence is not None and divergence.kind == kind
