"""What the pool promises at its edges: outputs that are nobody's view, no memory, no huge pages, who keeps a page."""

from __future__ import annotations

import gc
import itertools
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_engine.mhc.backends.native import memory
from rl_engine.mhc.bits import tensor_bytes
from tests.backends.random_shapes import Shape
from tests.backends.support import PROFILES, assert_same, composed, drawn, provider, tensors_of, whole

SIZE = memory.LARGE // 4  # FP32 elements of the smallest output that is pooled
HUGE = (1 << 21) // 4  # and of one with huge pages


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    gc.collect()
    memory.release()
    yield
    gc.collect()
    memory.release()


def pooled(count: int = SIZE) -> torch.Tensor:
    return memory.new_tensor((count,), torch.float32)


def really_waiting() -> int:
    return sum(len(page) for pages in memory._free.values() for page in pages)


# --- outputs are nobody's views ---


def outputs(profile: str) -> dict[str, torch.Tensor]:
    """What a provider returns for 66 tokens of the production width, without autograd; all of it from the pool."""
    batch, grads = drawn("no views", 66, 4096, profile)
    ops, shape = provider(profile), Shape(8)
    with torch.no_grad():
        r_new, saved = ops.mhc_block_forward(batch)
        results = {"r_new": r_new, **{name: saved[name] for name in ("hidden", "normalized", "residual")}}
        results |= {k: t for k, t in ops.mhc_block_backward(batch, saved, grads).items() if t is not None}
        results["product"] = ops.fixed_k_gemm_fwd(shape.fp32(200, 8), shape.fp32(300, 8))
        results["pre"] = ops.mhc_pre_fwd(batch)[0]
    return {name: t for name, t in results.items() if t.numel() * t.element_size() >= memory.LARGE}


@pytest.mark.parametrize("profile", PROFILES)
def test_an_output_is_no_view_and_takes_what_autograd_does_to_a_leaf(profile: str) -> None:
    """Made without autograd, each can require gradients, gather them, and be written in place by what requires them."""
    results = outputs(profile)
    assert {"r_new", "normalized", "d_r_old", "d_controller_weight", "product", "pre"} <= results.keys()
    for name, t in results.items():
        assert (t._is_view(), t._base, t.is_leaf, t.requires_grad, t._version) == (False, None, True, False, 0), name
        weight = torch.full((1,), 3.0, dtype=t.dtype, requires_grad=True)
        total = t.detach().double().sum()
        t.mul_(weight)  # a view that was made without autograd refuses this
        torch.autograd.backward(t, torch.ones_like(t))
        assert t.requires_grad and t._version == 1, name
        assert weight.grad is not None and torch.isclose(weight.grad.double(), total, rtol=0.05, atol=1.0), name
    for name, t in outputs(profile).items():
        t.requires_grad_()
        torch.autograd.backward(2.0 * t, torch.ones_like(t))
        assert t.grad is not None and bool((t.grad == 2.0).all()), name
        with torch.no_grad():
            t.zero_()
        assert t.requires_grad and not bool(t.any()), name


def test_a_view_in_the_place_of_an_output_is_refused_by_autograd() -> None:
    """The planted defect: what ``detach`` is there for."""
    with torch.no_grad():
        view = torch.frombuffer(bytearray(64), dtype=torch.float32).view(4, 4)
    assert view._is_view()
    with pytest.raises(RuntimeError, match="view"):
        view.mul_(torch.ones(1, requires_grad=True))


# --- who keeps a page ---

HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda t: t[7:8],
    "a detached tensor": lambda t: t.detach(),
    "its storage": lambda t: t.untyped_storage(),
    "a NumPy array": lambda t: t.numpy()[3:4],
    "a DLPack tensor": lambda t: torch.utils.dlpack.from_dlpack(t),
    "a graph that saved it": lambda t: torch.ones(SIZE, requires_grad=True) * t,
    "a cycle": lambda t: cycle_of(t),
}


def cycle_of(t: torch.Tensor) -> list[Any]:
    cycle: list[Any] = [t]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_page_is_taken_again_only_when_the_last_that_holds_it_is_gone(holder: str) -> None:
    first = pooled()
    first.fill_(5.0)
    address, held = first.data_ptr(), HOLDERS[holder](first)
    bytes_there = first[:1].clone()
    del first
    assert memory.waiting_bytes() == really_waiting() == 0
    second = pooled()
    assert second.data_ptr() != address
    second.zero_()
    assert bytes_there.item() == 5.0
    del held
    gc.collect()
    assert memory.waiting_bytes() == really_waiting() == memory.LARGE
    assert pooled().data_ptr() == address


# --- a tensor that dies while the pool is at work ---


class Interrupted(dict):  # type: ignore[type-arg]
    """The pool's table, at whose every access a tensor dies, as in a collection or a signal handler."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.held = held

    def get(self, *arguments: Any) -> Any:
        found = super().get(*arguments)
        self.held[:] = self.held[1:]
        return found

    def pop(self, *arguments: Any) -> Any:
        found = super().pop(*arguments)
        self.held[:] = self.held[1:]
        return found


def test_a_tensor_that_dies_inside_the_pool_gives_its_page_to_one_taker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live outputs never share a page, and the count stays that of the pages."""
    held = [pooled() for _ in range(6)]
    monkeypatch.setattr(memory, "_free", Interrupted(held))
    alive = [pooled() for _ in range(3)]
    held[:] = held[1:]
    alive += [pooled() for _ in range(8)]
    assert len({t.data_ptr() for t in (*alive, *held)}) == len(alive) + len(held)
    held.clear()
    alive.clear()
    memory.release()
    assert memory.waiting_bytes() == really_waiting() == 0


def test_a_taker_that_interrupts_the_pool_does_not_wait_for_it() -> None:
    """As a signal handler would: this thread holds the lock already."""
    dying = pooled()
    with memory._lock:
        taken = pooled()
        del dying
        assert memory.waiting_bytes() == 0
        taken.fill_(1.0)
    again = pooled()
    assert again.data_ptr() != taken.data_ptr() and memory.waiting_bytes() == really_waiting() == 0


# --- how much waits ---


def test_the_pool_keeps_as_much_as_its_document_says() -> None:
    assert memory.KEPT_BYTES == 1 << 30


def test_the_pages_that_have_waited_longest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than the limit; the sizes last used stay; a page beyond the limit never waits."""
    monkeypatch.setattr(memory, "KEPT_BYTES", 6 * memory.LARGE)
    for units in (1, 2, 3):
        pooled(units * SIZE)
    assert memory.waiting_bytes() == really_waiting() == 6 * memory.LARGE
    pooled(SIZE)  # now the smallest is the last used
    pooled(4 * SIZE)
    assert {size for size, pages in memory._free.items() if pages} == {memory.LARGE, 4 * memory.LARGE}
    assert memory.waiting_bytes() == really_waiting() == 5 * memory.LARGE
    pooled(7 * SIZE)
    assert memory.waiting_bytes() == really_waiting() == 5 * memory.LARGE
    memory.release()
    assert memory.waiting_bytes() == really_waiting() == 0


def test_the_limit_holds_through_any_order_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of many sizes, of which a few are held: at most the limit, and as much as it says, waits after each."""
    limit = 20 * memory.LARGE
    monkeypatch.setattr(memory, "KEPT_BYTES", limit)
    held: list[torch.Tensor] = []
    draw, most = Shape(9).draw, 0
    for _ in range(500):
        held.append(pooled(draw.randrange(SIZE, 8 * SIZE)))
        if len(held) > 6:
            held.pop(draw.randrange(6))
        assert memory.waiting_bytes() == really_waiting() <= limit
        most = max(most, memory.waiting_bytes())
    assert len({t.data_ptr() for t in held}) == len(held) and most > limit // 2


# --- what the operating system refuses ---


class Refusing(mmap.mmap):
    """Pages that cannot be huge ones."""

    asked = 0

    def madvise(self, *arguments: int) -> None:
        type(self).asked += 1
        raise OSError(22, "Invalid argument")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_a_kernel_without_huge_pages_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    monkeypatch.setattr(memory, "_map", lambda size: Refusing(-1, size, flags=flags))
    monkeypatch.setattr(Refusing, "asked", 0)
    assert pooled(HUGE // 2).numel() == HUGE // 2 and Refusing.asked == 0  # too small to ask for
    assert pooled(HUGE).fill_(1.0).numel() == HUGE and Refusing.asked == 1
    batch, grads = drawn("no huge pages", 66, 4096, PROFILES[1])
    assert_same(whole(provider(PROFILES[1]), batch, grads), composed(None, batch, grads), "no huge pages")
    assert Refusing.asked > 1


class Failing:
    """``memory._map``, the first calls of which find no memory."""

    def __init__(self, failures: int) -> None:
        self.map, self.failures, self.waited = memory._map, failures, list[int]()

    def __call__(self, size: int) -> mmap.mmap:
        self.waited.append(memory.waiting_bytes())
        if len(self.waited) <= self.failures:
            raise OSError(12, "Cannot allocate memory")
        return self.map(size)


def test_memory_that_is_short_once_is_asked_for_again_without_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pooled()
    assert memory.waiting_bytes() == memory.LARGE
    failing = Failing(1)
    monkeypatch.setattr(memory, "_map", failing)
    t = pooled(2 * SIZE).fill_(1.0)
    assert failing.waited == [memory.LARGE, 0] and float(t.sum()) == 2 * SIZE


def test_memory_that_is_short_twice_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pooled()
    failing = Failing(2)
    monkeypatch.setattr(memory, "_map", failing)
    with pytest.raises(MemoryError, match=f"^native: no memory for an output of {2 * memory.LARGE} bytes$") as caught:
        pooled(2 * SIZE)
    assert failing.waited == [memory.LARGE, 0] and isinstance(caught.value.__cause__, OSError)
    assert memory.waiting_bytes() == really_waiting() == 0
    assert pooled(2 * SIZE).numel() == 2 * SIZE


@pytest.mark.parametrize("profile", PROFILES)
def test_a_block_without_memory_is_a_memory_error_and_the_next_one_is_right(profile: str) -> None:
    """Wherever in the two halves the memory ends: nothing stays lent, the inputs are as they were."""
    batch, grads = drawn("no memory", 66, 1024, profile)
    want, ops, lent = composed(None, batch, grads), provider(profile), len(memory._lent)
    inputs = tensors_of((batch, grads))
    before = [tensor_bytes(t) for t in inputs]
    for available in range(50):
        memory.release()
        try:
            with at_most(available):
                result = whole(ops, batch, grads)
            break
        except MemoryError as error:
            assert str(error).startswith("native: no memory for an output of ")
        assert len(memory._lent) == lent and memory.waiting_bytes() == really_waiting()
    assert available >= 5
    assert_same(result, want, f"on {available} fresh pages")
    assert [tensor_bytes(t) for t in inputs] == before


@contextmanager
def at_most(pages: int) -> Iterator[None]:
    """Within the block the operating system has memory for so many outputs more."""
    real, served = memory._map, itertools.count(1)

    def short(size: int) -> mmap.mmap:
        if next(served) > pages:
            raise OSError(12, "Cannot allocate memory")
        return real(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_map", short)
        yield
