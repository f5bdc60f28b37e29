"""The host's copy of the page table, and what the device's copy lacks of it.

Runs on the engine thread; owns the slots, their rows and the pending writes. Invariant: the device's table with
`take_writes` applied equals the host's in every column of every live row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from asyncllm.kv.page_pool import Pages

__all__ = ["PageTable"]


class PageTable:
    """One row of pages for each slot.

    A pending write is a cell, not a value: its page is read from the row when the writes are taken. So the last
    one wins, no cell is written twice, and those of a released slot are gone, with no search at the release.

    Args:
        num_slots: rows; as many requests run at once.
        max_pages: columns; as many pages a request may have.
    """

    def __init__(self, num_slots: int, max_pages: int) -> None:
        if num_slots < 1 or max_pages < 1:
            raise ValueError(f"num_slots and max_pages must be at least 1, not {num_slots} and {max_pages}")
        self._max_pages = max_pages
        self._rows = np.zeros((num_slots, max_pages), dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int64)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._pending: list[npt.NDArray[np.int64]] = []  # cells: slot * max_pages + column

    @property
    def max_pages(self) -> int:
        """How many pages a row holds."""
        return self._max_pages

    @property
    def free_slots(self) -> int:
        """How many slots are not taken."""
        return len(self._free_slots)

    def take_slot(self) -> int:
        """Take the slot that was released last; its row is empty."""
        return self._free_slots.pop()

    def release_slot(self, slot: int) -> None:
        """Empty a row, drop its pending writes and make its slot free."""
        self._lengths[slot] = 0
        self._free_slots.append(slot)

    def row(self, slot: int) -> Pages:
        """View a slot's pages: int32 [row length]."""
        return self._rows[slot, : self._lengths[slot]]

    def extend(self, slots: list[int], counts: list[int], pages: Pages) -> None:
        """Append pages to rows.

        Args:
            slots: distinct.
            counts: how many of `pages` each row gets.
            pages: int32 [sum of counts].
        """
        rows = np.asarray(slots, dtype=np.int64)
        added = np.asarray(counts, dtype=np.int64)
        # Row i's pages begin at sum(counts[:i]) in `pages` and at its length in its row.
        offsets = self._lengths[rows] - (np.cumsum(added) - added)
        cells = np.repeat(rows * self._max_pages + offsets, added) + np.arange(len(pages), dtype=np.int64)
        self._rows.reshape(-1)[cells] = pages
        self._lengths[rows] += added
        self._pending.append(cells)

    def rewrite(self, slot: int, first: int, pages: Pages) -> None:
        """Replace the pages of columns `first` and on, which the row has already.

        Args:
            slot: whose row.
            first: the first column.
            pages: int32 [n].
        """
        self._rows[slot, first : first + len(pages)] = pages
        cell = slot * self._max_pages + first
        self._pending.append(np.arange(cell, cell + len(pages), dtype=np.int64))

    def send_again(self) -> None:
        """Make every live row pending: what the device's table holds is not known, since a step failed."""
        live = np.arange(self._max_pages) < self._lengths[:, None]
        self._pending = [np.flatnonzero(live)]

    @property
    def has_writes(self) -> bool:
        """Whether the device's table lacks anything."""
        return bool(self._pending)

    def take_writes(self) -> npt.NDArray[np.int32]:
        """Take what the device's table lacks: int32 [3, n], slots, columns and pages; no cell twice."""
        if not self._pending:
            return np.empty((3, 0), dtype=np.int32)
        one = len(self._pending) == 1  # distinct already, as in most steps
        cells = self._pending[0] if one else np.unique(np.concatenate(self._pending))
        self._pending.clear()
        slots, columns = np.divmod(cells, self._max_pages)
        live = columns < self._lengths[slots]
        writes = np.stack([slots[live], columns[live], self._rows.reshape(-1)[cells[live]]])
        return writes.astype(np.int32)
