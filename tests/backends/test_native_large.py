"""Past the 2^31st element: the last row of 131073 is what that row alone is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_engine.mhc.contract import HC_MULT
from tests.backends.random_shapes import Shape
from tests.backends.support import PROFILES, assert_same, provider

TOKENS, HIDDEN = 131073, 4096
ROWS = (0, 1, 65535, 65536, TOKENS - 2, TOKENS - 1)
NEEDED_KIB = 14 << 20

pytestmark = pytest.mark.xdist_group("native large")


def available_kib() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


@pytest.mark.skipif(available_kib() < NEEDED_KIB, reason="needs 14 GiB of memory")
def test_the_rows_around_the_mark_are_what_they_are_alone() -> None:
    shape, ops = Shape(31), provider(PROFILES[1])
    # Pages that nobody writes stay the kernel's one page of zeros.
    r_old, y = torch.empty(TOKENS, HC_MULT, HIDDEN, dtype=torch.bfloat16), shape.bf16(1, HIDDEN).expand(TOKENS, HIDDEN)
    for row in ROWS:
        r_old[row] = shape.bf16(HC_MULT, HIDDEN)
    c, post, pre = (shape.fp32(1, *tail).expand(TOKENS, *tail) for tail in ((HC_MULT, HC_MULT), (HC_MULT,), (HC_MULT,)))
    assert r_old[-1].storage_offset() == 1 << 31
    index = torch.tensor(ROWS)
    hidden = ops.h_aggregate_fwd(pre, r_old)[index]
    r_new = ops.mhc_post_fwd(r_old, y, c, post)[index]
    for i, row in enumerate(ROWS):
        one = slice(row, row + 1)
        want = {
            "hidden": ops.h_aggregate_fwd(pre[one].clone(), r_old[one].clone()),
            "r_new": ops.mhc_post_fwd(r_old[one].clone(), y[one].clone(), c[one].clone(), post[one].clone()),
        }
        assert_same({"hidden": hidden[i : i + 1], "r_new": r_new[i : i + 1]}, want, f"row {row}")
