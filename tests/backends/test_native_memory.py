"""The pool behind large outputs: pages come back when nobody holds them, and never before."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from rl_engine.mhc.backends.native import memory
from tests.backends.support import PROFILES, assert_same, composed, drawn, provider, whole

SIZE = memory.LARGE // 4  # FP32 elements of the smallest output that is pooled


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    gc.collect()
    memory.release()
    yield
    gc.collect()
    memory.release()


def test_a_small_output_is_not_pooled() -> None:
    assert memory.new_tensor((SIZE - 1,), torch.float32).untyped_storage().resizable()
    assert memory.waiting_bytes() == 0


def test_pages_are_used_again_when_the_last_view_is_gone() -> None:
    first = memory.new_tensor((SIZE,), torch.float32)
    address, view = first.data_ptr(), first[5:6]
    view.fill_(3.0)
    del first
    second = memory.new_tensor((SIZE,), torch.float32)
    assert second.data_ptr() != address and memory.waiting_bytes() == 0
    assert view.item() == 3.0
    del view
    assert memory.waiting_bytes() == memory.LARGE
    assert memory.new_tensor((2, SIZE), torch.bfloat16).data_ptr() == address


def test_pages_are_taken_by_outputs_of_their_size_alone() -> None:
    del_me = memory.new_tensor((2 * SIZE,), torch.float32)
    address = del_me.data_ptr()
    del del_me
    assert memory.new_tensor((SIZE,), torch.float32).data_ptr() != address
    assert memory.new_tensor((2 * SIZE - 7,), torch.float32).data_ptr() == address


def test_no_more_than_the_limit_waits_and_release_empties_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_BYTES", 2 * memory.LARGE)
    held = [memory.new_tensor((SIZE,), torch.float32) for _ in range(4)]
    held.clear()
    assert memory.waiting_bytes() == 2 * memory.LARGE
    memory.release()
    assert memory.waiting_bytes() == 0


def test_outputs_on_used_pages_have_the_bytes_of_fresh_ones() -> None:
    batch, grads = drawn("pooled", 66, 4096, PROFILES[0])
    want = composed(None, batch, grads)
    for _ in range(3):
        assert_same(whole(provider(PROFILES[0]), batch, grads), want, "used pages")
        gc.collect()
        assert memory.waiting_bytes() > 0
        for pages in memory._free.values():
            for page in pages:
                page[:] = b"\xff" * len(page)  # NaN, wherever an output is not written


def test_two_held_results_never_share_pages() -> None:
    batch, grads = drawn("held", 66, 4096, PROFILES[0])
    first = whole(provider(PROFILES[0]), batch, grads)
    copies = {name: t.clone() for name, t in first.items() if t is not None}
    whole(provider(PROFILES[0]), *drawn("other", 66, 4096, PROFILES[0]))
    assert_same({name: first[name] for name in copies}, copies, "held results")


def test_threads_share_the_pool() -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            t = memory.new_tensor((SIZE,), torch.float32)
            t[:64] = mark
            if not bool((t[:64] == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < memory.waiting_bytes() <= 8 * memory.LARGE  # a thread takes new pages before it drops the old


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_a_thread_holds_the_lock_can_allocate() -> None:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with memory._lock:
            taken.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    pid = os.fork()
    if pid == 0:
        fine = memory.new_tensor((SIZE,), torch.float32).numel() == SIZE
        os._exit(0 if fine else 1)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
