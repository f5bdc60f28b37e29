"""The scripted model's KV: token ids in pages, read back through a page table.

Runs on the scripted device's thread, which owns it. What a real model's KV is a function of, the whole
sequence up to a position, stands beside each token as a digest. Invariant: a row is only ever read when each
of its cells was written for the very sequence that is read; any other read raises `IntegrityError`, so that
a page that is freed too early, shared wrongly, not copied or not written cannot stay unseen.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from asyncllm.errors import IntegrityError
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP

if TYPE_CHECKING:
    from asyncllm.scheduler.batch import Batch

__all__ = ["UNWRITTEN", "PagedTokens", "Rows", "digest_weights"]

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]

UNWRITTEN: Final = -1
"""Stands in every cell, table entry and sampled token that nothing was written to (or that was poisoned)."""


def digest_weights(positions: int) -> Digests:
    """Return one odd, well mixed number per position (splitmix64's finalizer): uint64 [positions]."""
    z = np.arange(1, positions + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """What a step's rows hold after its writes.

    Args:
        tokens: int64 [sum of lengths], row after row.
        ends: int64 [rows], where each row's tokens end in `tokens`.
        lengths: int64 [rows], tokens of each row.
        digests: uint64 [rows], digest of each row's whole sequence.
        given: bool [rows], whether the host gave the last token, as it does for prompts.
    """

    tokens: Ints
    ends: Ints
    lengths: Ints
    digests: Digests
    given: npt.NDArray[np.bool_]

    def sequence(self, row: int) -> Ints:
        """The row's whole sequence: int64 [lengths[row]], a view."""
        end = self.ends[row]
        return self.tokens[end - self.lengths[row] : end]


class PagedTokens:
    """Keep token ids in pages.

    Args:
        num_pages: pages of the pool; one more, the padding page, lies behind them and is never legal to use.
        page_size: tokens of a page.
        num_slots: rows of the page table.
        max_pages_per_request: columns of the page table.
    """

    def __init__(self, *, num_pages: int, page_size: int, num_slots: int, max_pages_per_request: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._tokens = np.full((num_pages + 1, page_size), UNWRITTEN, dtype=np.int64)
        self._digests = np.zeros((num_pages + 1, page_size), dtype=np.uint64)
        self._table = np.full((num_slots, max_pages_per_request), UNWRITTEN, dtype=np.int64)
        self._sampled = np.full(num_slots, UNWRITTEN, dtype=np.int64)
        self._sampled_position = np.full(num_slots, UNWRITTEN, dtype=np.int64)
        self._weights = digest_weights(max_pages_per_request * page_size)

    def step(self, batch: Batch) -> Rows:
        """Apply the batch's table writes and page copies, write its query tokens, and read its rows back.

        Raises:
            IntegrityError: the batch names a page, slot or cell that cannot be meant.
        """
        self._apply_table_writes(batch)
        self._apply_page_copies(batch)
        slots = batch.slots.astype(np.int64)
        self._check_slots(batch, slots)
        self._write_queries(batch, slots)
        return self._read(batch, slots, batch.starts.astype(np.int64) + batch.query_lens)

    def keep_sampled(self, slots: Ints, positions: Ints, tokens: Ints) -> None:
        """Remember what each slot sampled and at which position it goes: int64 [samples] each."""
        self._sampled[slots] = tokens
        self._sampled_position[slots] = positions

    def poison_pages(self, pages: Ints) -> None:
        """Forget what these pages hold, so that a read before the next write raises."""
        self._tokens[pages] = UNWRITTEN

    def poison_slots(self, slots: Ints) -> None:
        """Forget these rows of the page table and what was sampled for them."""
        self._table[slots] = UNWRITTEN
        self._sampled[slots] = UNWRITTEN
        self._sampled_position[slots] = UNWRITTEN

    def _apply_table_writes(self, batch: Batch) -> None:
        slots, columns, pages = batch.table_writes
        if not len(slots):
            return
        self._check_range(batch, "table write names page", pages, self._num_pages)
        self._check_range(batch, "table write names slot", slots, len(self._table))
        self._check_range(batch, "table write names column", columns, self._table.shape[1])
        cells = slots.astype(np.int64) * self._table.shape[1] + columns
        self._check_distinct(batch, "table write names a cell twice: cell", cells)
        self._table[slots, columns] = pages

    def _apply_page_copies(self, batch: Batch) -> None:
        sources, targets = batch.page_copies
        if not len(sources):
            return
        self._check_range(batch, "page copy reads page", sources, self._num_pages)
        self._check_range(batch, "page copy writes page", targets, self._num_pages)
        self._check_distinct(batch, "page copy writes a page twice: page", targets)
        if np.isin(sources, targets).any():
            raise IntegrityError(f"step {batch.index}: a page is source and target of page copies at once")
        self._tokens[targets] = self._tokens[sources]
        self._digests[targets] = self._digests[sources]

    def _check_slots(self, batch: Batch, slots: Ints) -> None:
        self._check_range(batch, "a row names slot", slots, len(self._table))
        self._check_distinct(batch, "two rows name one slot: slot", slots)

    def _write_queries(self, batch: Batch, slots: Ints) -> None:
        lengths = batch.query_lens.astype(np.int64)
        rows, offsets = _ragged(lengths)
        positions = offsets + batch.starts[rows]
        tokens = batch.token_ids.astype(np.int64)
        unknown = np.flatnonzero(tokens == SAMPLED_LAST_STEP)
        if len(unknown):
            of = slots[rows[unknown]]
            if (self._sampled_position[of] != positions[unknown]).any():
                slot = of[self._sampled_position[of] != positions[unknown]][0]
                raise IntegrityError(
                    f"step {batch.index}: slot {slot} has no token sampled for the position that asks for it"
                )
            tokens[unknown] = self._sampled[of]
        pages, cells = self._cells(batch, slots[rows], positions)
        self._check_distinct(batch, "two query tokens share a cell: cell", pages * self._page_size + cells)
        self._tokens[pages, cells] = tokens
        before = np.maximum(batch.starts.astype(np.int64) - 1, 0)
        base_pages, base_cells = self._cells(batch, slots, before)
        base = np.where(batch.starts > 0, self._digests[base_pages, base_cells], np.uint64(0))
        self._digests[pages, cells] = self._running(tokens, positions, rows, lengths) + base[rows]

    def _read(self, batch: Batch, slots: Ints, lengths: Ints) -> Rows:
        rows, positions = _ragged(lengths)
        pages, cells = self._cells(batch, slots[rows], positions)
        tokens = self._tokens[pages, cells]
        digests = self._running(tokens, positions, rows, lengths)
        wrong = (tokens < 0) | (self._digests[pages, cells] != digests)
        if wrong.any():
            at = int(np.argmax(wrong))
            what = "nothing was written to" if tokens[at] < 0 else "was written for another sequence"
            raise IntegrityError(
                f"step {batch.index}: slot {slots[rows[at]]} reads position {positions[at]} from page {pages[at]}, "
                f"cell {cells[at]}, which {what}"
            )
        ends = np.cumsum(lengths)
        given = batch.token_ids[np.cumsum(batch.query_lens) - 1] != SAMPLED_LAST_STEP
        return Rows(tokens=tokens, ends=ends, lengths=lengths, digests=digests[ends - 1], given=given)

    def _cells(self, batch: Batch, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Find the page and the place in it of each position."""
        columns, cells = np.divmod(positions, self._page_size)
        if int(columns.max()) >= self._table.shape[1]:
            raise IntegrityError(f"step {batch.index}: position {positions.max()} is behind the end of its row")
        pages = self._table[slots, columns]
        if int(pages.min()) < 0:
            at = int(np.argmin(pages))
            raise IntegrityError(
                f"step {batch.index}: slot {slots[at]} has no page for position {positions[at]} (column {columns[at]})"
            )
        return pages, cells

    def _running(self, tokens: Ints, positions: Ints, rows: Ints, lengths: Ints) -> Digests:
        """Sum the digests' parts along each row, from its first token here: uint64 [tokens], wrapping round."""
        sums = np.cumsum((tokens + 1).astype(np.uint64) * self._weights[positions], dtype=np.uint64)
        before = np.zeros(len(lengths), dtype=np.uint64)
        before[1:] = sums[np.cumsum(lengths)[:-1] - 1]
        return sums - before[rows]

    def _check_range(self, batch: Batch, what: str, values: npt.NDArray[np.signedinteger], below: int) -> None:
        if int(values.min()) < 0 or int(values.max()) >= below:
            wrong = values[(values < 0) | (values >= below)][0]
            raise IntegrityError(f"step {batch.index}: {what} {wrong}, but they are 0..{below - 1}")

    def _check_distinct(self, batch: Batch, what: str, values: npt.NDArray[np.signedinteger]) -> None:
        if len(values) > 1:
            ordered = np.sort(values)
            twice = ordered[1:] == ordered[:-1]
            if twice.any():
                raise IntegrityError(f"step {batch.index}: {what} {ordered[1:][twice][0]}")


def _ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """Number the rows and the places in them of a ragged array: int64 [sum of lengths] each."""
    ends = np.cumsum(lengths)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.arange(int(ends[-1])) - (ends - lengths)[rows]
