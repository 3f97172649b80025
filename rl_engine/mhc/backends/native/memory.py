"""Memory for outputs, used again when its tensor is gone.

A fresh output costs a fault and a cleared page for each page that is written: for outputs of 96 KB a token, as much
time as the arithmetic. So the pages of an output stay in a pool when the last tensor on them dies, and the next output
of about that size takes them. A tensor that is still held keeps its pages.

At most ``KEPT_BYTES`` wait in the pool; ``release()`` gives them back at once.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from contextlib import suppress

import torch

LARGE = 1 << 16
"""Bytes from which an output comes out of the pool; smaller ones are torch's own."""

KEPT_BYTES = 1 << 30
_HUGE_PAGE = 1 << 21
_SIZES_PER_DOUBLING = 8

_free: dict[int, deque[mmap.mmap]] = {}
_lent: dict[int, tuple[weakref.ref[memoryview], mmap.mmap]] = {}
_returned: deque[mmap.mmap] = deque()
_lock = threading.Lock()
_waiting = 0


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor on the CPU; a large one may lie on pages that were written before."""
    count = 1
    for size in shape:
        count *= size
    wanted = count * dtype.itemsize
    if wanted < LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    pages = _take(size_class(wanted))
    view = memoryview(pages)
    # By its address, as a view of writable memory has no hash. The reference dies with this module, its call with it.
    lease = weakref.ref(view, _give_back)
    _lent[id(lease)] = lease, pages
    # Detached, so that to autograd it is no view of a tensor that nobody else has.
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape).detach()


def size_class(wanted: int) -> int:
    """Bytes of the pages for ``wanted`` bytes: an eighth or a huge page more at most, so close sizes share them."""
    step = max(mmap.PAGESIZE, (1 << (wanted - 1).bit_length()) // (2 * _SIZES_PER_DOUBLING))
    if wanted > _HUGE_PAGE:
        step = max(step, _HUGE_PAGE)
    return -(-wanted // step) * step


def waiting_bytes() -> int:
    """Bytes that wait in the pool for their next use."""
    return _waiting


def release() -> None:
    """Give the pages that wait in the pool back to the operating system."""
    global _waiting
    old: list[mmap.mmap] = []
    with _lock:
        _collect(old)
        for waiting in _free.values():
            old.extend(waiting)
        _free.clear()
        _waiting = 0
    old.clear()


def _take(size: int) -> mmap.mmap:
    global _waiting
    stale: list[mmap.mmap] = []
    # Without waiting: whoever holds the lock may be this very thread, which a signal handler has interrupted.
    if _lock.acquire(blocking=False):
        try:
            _collect(stale)
            if pages := _free.get(size):
                _waiting -= size
                return pages.pop()
        finally:
            _lock.release()
    stale.clear()
    try:
        fresh = _map(size)
    except OSError:
        release()
        try:
            fresh = _map(size)
        except OSError as error:
            raise MemoryError(f"native: no memory for an output of {size} bytes") from error
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            fresh.madvise(mmap.MADV_HUGEPAGE)
    return fresh


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _renew_lock() -> None:
    """In a forked child: the thread that held the lock, if any, is not there to release it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _give_back(lease: weakref.ref[memoryview]) -> None:
    """Called where a tensor dies, which may be anywhere: inside the pool too, in a collection or a signal handler.

    So it takes no lock and touches nothing that the pool's own code is in the middle of; ``_collect`` does the rest.
    """
    _returned.append(_lent.pop(id(lease))[1])
    if _lock.acquire(blocking=False):
        stale: list[mmap.mmap] = []
        try:
            _collect(stale)
        finally:
            _lock.release()


def _collect(stale: list[mmap.mmap]) -> None:
    """Put what was given back into the pool, under the lock; what has no room goes to ``stale``, dropped after it."""
    global _waiting
    while _returned:
        pages = _returned.popleft()
        size = len(pages)
        if size > KEPT_BYTES:
            stale.append(pages)
            continue
        while _waiting + size > KEPT_BYTES:  # the sizes that have waited longest make room
            oldest = next(iter(_free))
            if _free[oldest]:
                stale.append(_free[oldest].pop())
                _waiting -= oldest
            else:
                del _free[oldest]
        _free[size] = _free.pop(size, deque())
        _free[size].append(pages)
        _waiting += size
