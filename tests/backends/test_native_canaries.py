"""Canaries around every output, every output poisoned before the call: nothing beside it written, no poison left."""

from __future__ import annotations

import pytest

from rl_engine.mhc.acceptance import operator_cases as cases
from tests.backends.checkers import guarded_outputs
from tests.backends.random_shapes import Shape
from tests.backends.support import (
    PROFILES,
    LeafByLeaf,
    assert_same,
    at_level,
    composed,
    composites,
    drawn,
    levels,
    provider,
    reference_composites,
    reference_ops,
    whole,
)
from tests.threads import on_threads

TOKENS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
HIDDEN = (4, 36, 100, 130)
RUNNERS = ("run_sinkhorn", "run_gemm_rms", "run_post", "run_aggregate", "run_rmsnorm", "run_fixed_gemm")
# Each profile allocates for itself only around the elementary functions; T and the profile take turns.
PLACES = [(tokens, hidden, PROFILES[(i + j) % 2]) for i, tokens in enumerate(TOKENS) for j, hidden in enumerate(HIDDEN)]


@pytest.mark.parametrize(("tokens", "hidden", "profile"), PLACES)
def test_the_whole_block_writes_its_outputs_and_nothing_else(tokens: int, hidden: int, profile: str) -> None:
    batch, grads = drawn(f"canaries {tokens} {hidden}", tokens, hidden, profile)
    want = composed(None, batch, grads)
    for level in levels():
        for threads in (1, 3):
            with at_level(level), on_threads(threads), guarded_outputs() as allocator:
                got = whole(provider(profile), batch, grads)
                assert len(allocator.made) > 20
                assert (allocator.touched(), allocator.unwritten()) == ([], []), level
                assert_same(got, want, f"T={tokens} D={hidden} {level}")


@pytest.mark.parametrize(("tokens", "hidden", "profile"), PLACES)
def test_each_operator_writes_its_outputs_and_nothing_else(tokens: int, hidden: int, profile: str) -> None:
    shape = Shape(0)
    shape.wide, shape.tokens, shape.hidden = True, tokens, hidden
    inputs = shape.operator_inputs()
    for runner in RUNNERS:
        run = getattr(cases, runner)
        want = run(reference_ops(profile), inputs[runner])
        for level in levels():
            with at_level(level), on_threads(1 + tokens % 3), guarded_outputs() as allocator:
                got = run(provider(profile), inputs[runner])
                assert allocator.made
                assert (allocator.touched(), allocator.unwritten()) == ([], []), f"{runner} {level}"
                assert_same(got, want, f"{runner} T={tokens} D={hidden} {level}")


@pytest.mark.parametrize(("tokens", "hidden", "profile"), PLACES[::3])
def test_the_composites_write_nothing_beside_their_outputs(tokens: int, hidden: int, profile: str) -> None:
    batch, grads = drawn(f"canaries {tokens} {hidden}", tokens, hidden, profile, trainability="mixer-frozen")
    want = reference_composites(batch, grads)
    for ops in (provider(profile), LeafByLeaf(profile)):
        for level in levels():
            with at_level(level), guarded_outputs() as allocator:
                got = composites(ops, batch, grads)
                assert allocator.touched() == [], level
                assert_same(got, want, f"T={tokens} D={hidden} {level}")
