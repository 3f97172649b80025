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
from contextlib import suppress

import torch

LARGE = 1 << 16
"""Bytes from which an output comes out of the pool; smaller ones are torch's own."""

KEPT_BYTES = 1 << 30
_HUGE_PAGE = 1 << 21
_SIZES_PER_DOUBLING = 8

_free: dict[int, list[mmap.mmap]] = {}
_lent: dict[int, tuple[weakref.ref[memoryview], mmap.mmap]] = {}
_lock = threading.RLock()  # a tensor may die, and give its pages back, while this thread is inside
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
    with _lock:
        old = dict(_free)
        _free.clear()
        _waiting = 0
    old.clear()


def _take(size: int) -> mmap.mmap:
    global _waiting
    with _lock:
        pages = _free.get(size)
        if pages:
            _waiting -= size
            return pages.pop()
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
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _give_back(lease: weakref.ref[memoryview]) -> None:
    global _waiting
    with _lock:
        pages = _lent.pop(id(lease))[1]
        size = len(pages)
        if size > KEPT_BYTES:
            return
        while _waiting + size > KEPT_BYTES:  # the sizes that have waited longest make room
            stale = next(iter(_free))
            if not _free[stale]:
                del _free[stale]
                continue
            _free[stale].pop()
            _waiting -= stale
        waiting = _free.pop(size, [])
        _free[size] = [*waiting, pages]
        _waiting += size
