"""The pool of KV pages.

Runs on the engine thread; owns which pages are free. Invariant: a page is on the free list at most once, and a
page that is not on it was allocated and not freed since, or waits in a lazy-free region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from asyncllm.errors import IntegrityError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["LazyFreeRegion", "PagePool", "Pages"]

Pages = npt.NDArray[np.int32]
"""Page ids: int32 [n]."""


class PagePool:
    """A stack of free pages: what was freed last is allocated first, so that runs repeat.

    Args:
        num_pages: pages 0 to num_pages - 1 exist; all are free at first.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self._num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free_pages = num_pages
        self._freed = np.ones(num_pages, dtype=np.bool_)  # on the stack, or deferred
        self._deferred: list[Pages] = []
        self._open_regions = 0

    @property
    def num_pages(self) -> int:
        """How many pages exist."""
        return self._num_pages

    @property
    def free_pages(self) -> int:
        """How many pages `allocate` can give; pages in an open lazy-free region are not among them yet."""
        return self._free_pages

    def allocate(self, count: int) -> Pages:
        """Take `count` free pages: int32 [count], distinct.

        Raises:
            RuntimeError: fewer are free; nothing is taken then.
        """
        left = self._free_pages - count
        if left < 0:
            raise RuntimeError(f"{count} pages asked for, {self._free_pages} of {self._num_pages} are free")
        pages = self._stack[left : self._free_pages][::-1].copy()
        self._free_pages = left
        self._freed[pages] = False
        return pages

    def free(self, pages: Pages) -> None:
        """Give pages back: at once, or at the end of the outermost open lazy-free region.

        Args:
            pages: int32 [n], distinct; copied.

        Raises:
            IntegrityError: one of them is free already; none is freed then.
        """
        if not len(pages):
            return
        again = self._freed[pages]
        if again.any():
            raise IntegrityError(f"pages {pages[again].tolist()} are freed a second time")
        self._freed[pages] = True
        if self._open_regions:
            self._deferred.append(pages.copy())
        else:
            self._push(pages)

    def lazy_free(self) -> LazyFreeRegion:
        """Make a region within which freed pages are collected; they join the free list once, at its end."""
        return LazyFreeRegion(self)

    def free_list(self) -> Pages:
        """Copy the free list, the next page to be allocated last: int32 [free_pages]."""
        return self._stack[: self._free_pages].copy()

    def deferred(self) -> Pages:
        """Copy what the open lazy-free regions hold: int32 [n]."""
        return np.concatenate([np.empty(0, dtype=np.int32), *self._deferred])

    def open_region(self) -> None:
        """Begin to defer; for `LazyFreeRegion` alone."""
        self._open_regions += 1

    def close_region(self) -> None:
        """End one region, and with the last one put what was deferred on the free list; for `LazyFreeRegion` alone."""
        self._open_regions -= 1
        if not self._open_regions and self._deferred:
            self._push(self.deferred())
            self._deferred.clear()

    def _push(self, pages: Pages) -> None:
        end = self._free_pages + len(pages)
        self._stack[self._free_pages : end] = pages
        self._free_pages = end


class LazyFreeRegion:
    """A region of code whose freed pages become free together, at the end of the outermost one; entered once."""

    __slots__ = ("_entered", "_pool")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entered = False

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a lazy-free region is entered once")
        self._entered = True
        self._pool.open_region()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.close_region()
