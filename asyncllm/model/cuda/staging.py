"""A batch on its way into the block of memory that a padded step reads.

Made and filled on the engine thread; owns the host blocks, and the device copies from them as late as it likes.
Invariant: a block is written again only after the step that reads it is done; three take turns, and at most two
steps are in flight, so that this never waits in practice.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.model.cuda.step_layout import Counts
from asyncllm.model.sampler import is_greedy

if TYPE_CHECKING:
    from asyncllm.model.cuda.step_layout import StepLayout, StepSections
    from asyncllm.scheduler.batch import Batch

__all__ = ["Reader", "Staged", "StepStaging", "query_places"]

Places = npt.NDArray[np.int64]

_BLOCKS: Final = 3


class Reader(Protocol):
    """Whoever reads a staged step: its `LaunchedStep`."""

    def wait(self) -> None:
        """Block until it has read."""


class _Block:
    """Host memory of one step, and who reads it."""

    __slots__ = ("address", "array", "reader", "sections", "steady", "tensor")

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.address = self.tensor.data_ptr()
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()
        self.sections: dict[StepLayout, StepSections[npt.NDArray[np.generic]]] = {}
        self.reader: Reader | None = None
        self.steady: tuple[StepLayout, int] | None = None  # the layout and `Batch.steady` of the rows in it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A step in host memory.

    Args:
        block: int32 [layout.size], to be copied to the device as it is.
        places: int64 [samples]: the row of each of `Batch.sample_rows`.
        late_writes: int32 [3, n]: page-table writes that found no room in the block.
        holder: remembers who reads the block.
    """

    block: torch.Tensor
    places: Places
    late_writes: npt.NDArray[np.int32]
    holder: _Block

    @property
    def address(self) -> int:
        """Where the block is in memory."""
        return self.holder.address

    def read_by(self, reader: Reader) -> None:
        """Keep the block from being written again before `reader` is done."""
        self.holder.reader = reader


class StepStaging:
    """Write batches into host blocks that take turns.

    Args:
        num_slots: rows of the page table; row `num_slots` is for padding.
        size: elements of the largest layout.
        tile_tokens: tokens of a tile of prompt attention.
        all_in_tiles: whether rows of one token are tiles of prompt attention too.
        pinned: whether a GPU copies from the blocks.
    """

    def __init__(self, *, num_slots: int, size: int, tile_tokens: int, all_in_tiles: bool, pinned: bool) -> None:
        self._num_slots = num_slots
        self._tile_tokens = tile_tokens
        self._all_in_tiles = all_in_tiles
        self._blocks = [_Block(size, pinned=pinned) for _ in range(_BLOCKS)]
        self._turn = 0
        self._steady: tuple[int, Places, Places] | None = None  # `Batch.steady`, its order, and places

    def tiles(self, batch: Batch) -> int:
        """Return how many tiles of prompt attention a batch has."""
        if batch.query_tokens == batch.rows:
            return batch.rows if self._all_in_tiles else 0
        lens = batch.query_lens if self._all_in_tiles else batch.query_lens[batch.query_lens > 1]
        return int((-(-lens // self._tile_tokens)).sum())

    def stage(self, batch: Batch, layout: StepLayout) -> Staged:
        """Write a batch that fits the layout to the next block; wait for the block's reader first."""
        block = self._blocks[self._turn]
        self._turn = (self._turn + 1) % len(self._blocks)
        if block.reader is not None:
            block.reader.wait()
            block.reader = None
        sections = block.sections.get(layout)
        if sections is None:
            sections = block.sections[layout] = layout.host(block.array)
        order, places = self._placed(batch)
        steady = None if batch.steady is None or layout.tiles else (layout, batch.steady)
        if steady is None or block.steady != steady:
            block.steady = None
            self._fill(sections, batch, order, places)
            block.steady = steady
        else:
            _advance(sections, batch.starts[order])
        late_writes = _fill_writes(sections, batch, layout)
        return Staged(block=block.tensor[: layout.size], places=places, late_writes=late_writes, holder=block)

    def _placed(self, batch: Batch) -> tuple[Places, Places]:
        """Return the batch's rows in the step's order, and the step's row of each sample."""
        if self._steady is not None and self._steady[0] == batch.steady:
            return self._steady[1:]
        order = _order(batch)
        place_of_row = np.empty_like(order)
        place_of_row[order] = np.arange(len(order))
        places = place_of_row if len(batch.sample_rows) == batch.rows else place_of_row[batch.sample_rows]
        self._steady = None if batch.steady is None else (batch.steady, order, places)
        return order, places

    def _fill(
        self, sections: StepSections[npt.NDArray[np.generic]], batch: Batch, order: Places, places: Places
    ) -> None:
        """Write all but page-table writes."""
        if batch.query_tokens == batch.rows:
            self._fill_decode(sections, batch, order)
        else:
            self._fill_mixed(sections, batch, order)
        _fill_sampling(sections, batch, places)
        sections.counts[Counts.ROWS] = batch.rows

    def _fill_decode(self, to: StepSections[npt.NDArray[np.generic]], batch: Batch, order: Places) -> None:
        """Write rows that have one token each: a row is its token."""
        rows = batch.rows
        slots, starts = batch.slots[order], batch.starts[order]
        to.token_ids[:rows] = batch.token_ids[order]
        to.token_slots[:rows] = to.slots[:rows] = slots
        to.positions[:rows] = starts
        np.add(starts, 1, out=to.kv_lens[:rows], casting="unsafe")
        self._fill_tokens_padding(to, rows)
        self._fill_rows_padding(to, rows)
        to.counts[Counts.DECODE_ROWS] = rows
        to.counts[Counts.TILES] = 0
        if len(to.tile_rows):
            count = np.arange(len(to.query_starts), dtype=np.int32)
            np.minimum(count, rows, out=to.query_starts, casting="unsafe")
            to.last_tokens[:rows] = count[:rows]
            to.last_tokens[rows:] = 0
            self._fill_tiles(to, starts, np.ones_like(starts))

    def _fill_mixed(self, to: StepSections[npt.NDArray[np.generic]], batch: Batch, order: Places) -> None:
        rows, tokens = batch.rows, batch.query_tokens
        slots, starts, lens = batch.slots[order], batch.starts[order], batch.query_lens[order]
        ends = np.cumsum(lens)
        row_starts = ends - lens
        within = np.arange(tokens) - np.repeat(row_starts, lens)
        old_starts = np.cumsum(batch.query_lens) - batch.query_lens
        to.token_ids[:tokens] = batch.token_ids[np.repeat(old_starts[order], lens) + within]
        to.token_slots[:tokens] = np.repeat(slots, lens)
        to.positions[:tokens] = np.repeat(starts, lens) + within
        to.slots[:rows] = slots
        to.kv_lens[:rows] = starts + lens
        to.query_starts[0] = 0
        to.query_starts[1 : rows + 1] = ends
        to.query_starts[rows + 1 :] = tokens
        to.last_tokens[:rows] = ends - 1
        to.last_tokens[rows:] = 0
        self._fill_tokens_padding(to, tokens)
        self._fill_rows_padding(to, rows)
        to.counts[Counts.DECODE_ROWS] = np.count_nonzero(lens == 1)
        self._fill_tiles(to, starts, lens)

    def _fill_tiles(self, to: StepSections[npt.NDArray[np.generic]], starts: npt.NDArray[np.int32],
                    lens: npt.NDArray[np.int32]) -> None:  # fmt: skip
        """List the tiles, those with most keys first: they take longest."""
        count = -(-lens // self._tile_tokens)
        if not self._all_in_tiles:
            count[lens == 1] = 0
        total = int(count.sum())
        rows = np.repeat(np.arange(len(lens), dtype=np.int32), count)
        firsts = (np.arange(total) - np.repeat(np.cumsum(count) - count, count)) * self._tile_tokens
        by_keys = np.argsort(-(starts[rows] + firsts), kind="stable")
        to.tile_rows[:total] = rows[by_keys]
        to.tile_firsts[:total] = firsts[by_keys]
        to.counts[Counts.TILES] = total

    def _fill_tokens_padding(self, to: StepSections[npt.NDArray[np.generic]], tokens: int) -> None:
        to.token_ids[tokens:] = 0
        to.token_slots[tokens:] = self._num_slots
        to.positions[tokens:] = 0

    def _fill_rows_padding(self, to: StepSections[npt.NDArray[np.generic]], rows: int) -> None:
        to.slots[rows:] = self._num_slots
        to.kv_lens[rows:] = 1
        to.temperatures[rows:] = 0.0


def _advance(to: StepSections[npt.NDArray[np.generic]], starts: npt.NDArray[np.int32]) -> None:
    """Write where rows are that had one token each in this block before, and have again."""
    to.positions[: len(starts)] = starts
    np.add(starts, 1, out=to.kv_lens[: len(starts)], casting="unsafe")


def _order(batch: Batch) -> Places:
    """Return the batch's rows in the step's order: of one token, the longest first; then the others as they are.

    So no long row is left to the end of a kernel, where most multiprocessors have nothing to do.
    """
    return np.argsort(np.where(batch.query_lens == 1, -batch.starts, 1), kind="stable")


def query_places(batch: Batch) -> Places:
    """Return the place in the step of each row's first query token: int64 [rows]."""
    order = _order(batch)
    lens = batch.query_lens[order]
    places = np.empty_like(order)
    places[order] = np.cumsum(lens) - lens
    return places


def _fill_sampling(to: StepSections[npt.NDArray[np.generic]], batch: Batch, places: Places) -> None:
    """Write what draws tokens; rows that sample nothing are greedy, and nobody reads their token."""
    temperatures = np.where(is_greedy(batch.temperatures), np.float32(0.0), batch.temperatures)
    if batch.masks or batch.options:
        temperatures[batch.edited] = 0.0  # they are drawn apart
    if len(places) < batch.rows:
        to.temperatures[: batch.rows] = 0.0
    to.temperatures[places] = temperatures
    if temperatures.any():
        to.top_ps[places] = batch.top_ps
        to.top_ks[places] = batch.top_ks
        to.min_ps[places] = batch.min_ps
        to.seeds[places] = batch.seeds


def _fill_writes(to: StepSections[npt.NDArray[np.generic]], batch: Batch, layout: StepLayout) -> npt.NDArray[np.int32]:
    """Write the page-table writes; return those that find no room."""
    writes = batch.table_writes
    count = min(writes.shape[1], layout.writes)
    to.table_writes.reshape(3, -1)[:, :count] = writes[:, :count]
    to.counts[Counts.WRITES] = count
    return writes[:, count:]
