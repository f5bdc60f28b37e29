"""The rows of a step on a GPU that ask to have their logits edited: their tokens are chosen by two kernels behind it.

Runs on the engine thread; what it enqueues runs on the engine's CUDA stream. Owns the tables of what requests ask, and
for each padded number of rows the inputs, the edited logits and the graph. Invariant: what a step's rows ask is on the
device once; a step brings a few numbers a row, and masks, which the host makes while the step computes.

Everything is made at its first use: an engine whose requests ask for nothing has none of it.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from asyncllm.model.cuda.option_rows import NO_ROW, AdditionRows, CountRows
from asyncllm.model.cuda.staged_graph import PaddedRows, StagedGraph
from asyncllm.model.cuda.step_kernels import OptionTables
from asyncllm.model.cuda.step_layout import AskedLayout, Counts
from asyncllm.model.sampler import is_greedy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from asyncllm.model.cuda.direct_calls import DirectCalls
    from asyncllm.model.cuda.fused_model import StepBuffers
    from asyncllm.model.cuda.staged_graph import BehindSteps
    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.request import LogitOptions
    from asyncllm.scheduler.batch import Batch

__all__ = ["AskedRows", "launch_asked"]

_NO_IDS: Final = np.zeros(0, dtype=np.int32)


def launch_asked(buffers: StepBuffers, token_pool: torch.Tensor, kernels: StepKernels) -> None:
    """Launch the kernels once, for one row, so that they are compiled; they are the same for any number."""
    layout, vocab_size, device = AskedLayout(rows=1), buffers.logits.shape[1], buffers.logits.device
    asked = layout.device(torch.zeros(layout.size, dtype=torch.int32, device=device))
    edited = torch.zeros((1, vocab_size), dtype=torch.float32, device=device)
    tables = OptionTables(
        masks=torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32, device=device),
        additions=torch.zeros((1, vocab_size), dtype=torch.float32, device=device),
        counts=torch.zeros((1, vocab_size), dtype=torch.int16, device=device),
    )
    kernels.choose_asked(buffers.logits, asked, tables, edited=edited, token_pool=token_pool, results=buffers.output)


class _Slots:
    """What the request in each slot asks, by rows of the tables and by number; all [slots].

    Args:
        num_slots: how many.
        additions: gives and takes rows.
        counts: gives rows.
    """

    def __init__(self, num_slots: int, additions: AdditionRows, counts: CountRows) -> None:
        self._options: dict[int, weakref.ref[LogitOptions] | None] = {}
        self._additions = additions
        self._counts = counts
        self.first_end = np.zeros(num_slots, dtype=np.int32)
        self.early = np.full(num_slots, NO_ROW, dtype=np.int32)  # the row of additions before `first_end`
        self.late = np.full(num_slots, NO_ROW, dtype=np.int32)
        self.counted = np.full(num_slots, NO_ROW, dtype=np.int32)
        self.repetition = np.ones(num_slots, dtype=np.float32)
        self.presence = np.zeros(num_slots, dtype=np.float32)
        self.frequency = np.zeros(num_slots, dtype=np.float32)
        self.kept = np.zeros(num_slots, dtype=np.int32)

    def knows(self, slot: int, asked: LogitOptions | None) -> bool:
        """Whether this is what a slot's request asked before."""
        known = self._options.get(slot)
        return (None if known is None else known()) is asked and (known is None) == (asked is None)

    def set(self, slot: int, asked: LogitOptions | None) -> None:
        """Note what a slot's request asks; all of it, or, if there is no memory for it, nothing."""
        early = late = counted = NO_ROW
        if asked is not None:
            early = self._additions.take(asked, late_ids=asked.late_ids)
            try:
                late = self._additions.take(asked, late_ids=_NO_IDS)
            except BaseException:
                self._additions.give_back(early)
                raise
            if asked.penalizes:
                counted = self._counts.row(slot)
            self.first_end[slot] = asked.first_end
            self.repetition[slot] = asked.repetition_penalty
            self.presence[slot] = asked.presence_penalty
            self.frequency[slot] = asked.frequency_penalty
        for column in (self.early, self.late):
            self._additions.give_back(int(column[slot]))
        self.early[slot], self.late[slot], self.counted[slot] = early, late, counted
        self.kept[slot] = asked is not None and asked.tells
        self._options[slot] = None if asked is None else weakref.ref(asked)


class _Sized:
    """What so many rows need.

    Args:
        layout: how many.
        launch: launches their kernels.
        vocab_size: columns of the logits.
        behind: how they are enqueued.
    """

    def __init__(self, layout: AskedLayout, launch: Callable[[], None], vocab_size: int, behind: BehindSteps) -> None:
        device, shape = behind.device, (layout.rows, -(-vocab_size // 32))
        pinned = device.type == "cuda"
        self.graph = graph = StagedGraph(layout.size, launch, behind)
        self.host = [layout.host(graph.host(turn)) for turn in range(behind.turns)]
        self.asked = layout.device(graph.input)
        with behind.on_stream():
            self.edited = torch.zeros((layout.rows, vocab_size), dtype=torch.float32, device=device)
            self.masks = torch.zeros(shape, dtype=torch.int32, device=device)
        self.host_masks = [
            torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(behind.turns)
        ]


class AskedRows:
    """Choose asking rows' tokens behind a step.

    Args:
        buffers: of the steps: their logits are read, results written.
        token_pool: int32 [num_slots + 1].
        kernels: edit and sample.
        behind: how they are enqueued.
    """

    def __init__(
        self, buffers: StepBuffers, token_pool: torch.Tensor, kernels: StepKernels, behind: BehindSteps
    ) -> None:
        self._buffers = buffers
        self._token_pool = token_pool
        self._kernels = kernels
        self._behind = behind
        self._sizes: PaddedRows[_Sized] = PaddedRows(buffers.output.shape[1])
        self._tables = (0, 0)  # where they were when graphs were captured
        self._vocab_size = buffers.logits.shape[1]
        with behind.on_stream():
            self._additions = AdditionRows(self._vocab_size, behind.device)
            self._counts = CountRows(self._vocab_size, behind.device)
        self._slots = _Slots(len(token_pool), self._additions, self._counts)

    def enqueue(
        self, batch: Batch, places: npt.NDArray[np.integer], *, turn: int, direct: DirectCalls | None
    ) -> torch.Tensor:
        """Enqueue the choice of the edited rows' tokens, behind the step that computes their logits.

        Args:
            batch: the step.
            places: int [samples]: the row of the logits that each sample has.
            turn: which host memory is free.
            direct: makes calls without torch.

        Returns:
            Their logits before temperature, float32 [edited, vocab], there until the next step; undefined for greedy
            rows of which nothing is told.
        """
        samples = batch.edited
        self._note(batch, samples)
        self._drop_graphs_of_moved_tables()
        size = self._sizes.fit(len(samples), self._make)
        self._fill(size, batch, samples, places, turn)
        size.graph.run(turn, direct)
        return size.edited[: len(samples)]

    def close(self) -> None:
        """Give the graphs back. Idempotent; nothing may be running."""
        self._sizes.close()

    def _note(self, batch: Batch, samples: list[int]) -> None:
        """Bring to the device what it does not know of requests."""
        slots = batch.slots[batch.sample_rows[samples]].tolist()
        asks = [(slot, batch.options.get(sample)) for sample, slot in zip(samples, slots, strict=True)]
        unknown = [(slot, asked) for slot, asked in asks if not self._slots.knows(slot, asked)]
        if unknown or batch.histories:
            with self._behind.on_stream():
                for slot, asked in unknown:
                    self._slots.set(slot, asked)
                for sample, tokens in batch.histories.items():
                    asked = batch.options[sample]
                    if asked.penalizes:
                        slot = int(batch.slots[batch.sample_rows[sample]])
                        self._counts.write(slot, tokens, prompt_tokens=asked.prompt_tokens)

    def _drop_graphs_of_moved_tables(self) -> None:
        """Have graphs captured again if tables have moved since; asked in each step: one may fail after the move."""
        tables = (self._additions.values.data_ptr(), self._counts.values.data_ptr())
        if tables != self._tables:
            self._sizes.drop_graphs()
            self._tables = tables

    def _make(self, rows: int) -> _Sized:
        launch = functools.partial(self._run, rows)
        return _Sized(AskedLayout(rows=rows), launch, self._vocab_size, self._behind)

    def _fill(self, size: _Sized, batch: Batch, samples: list[int], places: npt.NDArray[np.integer], turn: int) -> None:
        """Write what the rows ask to host memory, and masks to the device."""
        to, count = size.host[turn], len(samples)
        rows = batch.sample_rows[samples]
        slots, positions = batch.slots[rows], (batch.starts + batch.query_lens)[rows]
        temperatures = batch.temperatures[samples]
        of = self._slots
        to.counts[Counts.ROWS] = count
        to.places[:count] = places[samples]
        to.slots[:count] = slots
        to.kv_lens[:count] = positions
        to.temperatures[:count] = np.where(is_greedy(temperatures), np.float32(0.0), temperatures)
        to.top_ps[:count] = batch.top_ps[samples]
        to.top_ks[:count] = batch.top_ks[samples]
        to.min_ps[:count] = batch.min_ps[samples]
        to.seeds[:count] = batch.seeds[samples]
        to.masks_at[:count] = NO_ROW
        to.additions_at[:count] = np.where(positions < of.first_end[slots], of.early[slots], of.late[slots])
        to.counts_at[:count] = of.counted[slots]
        to.repetitions[:count] = of.repetition[slots]
        to.presences[:count] = of.presence[slots]
        to.frequencies[:count] = of.frequency[slots]
        to.kept[:count] = of.kept[slots]
        if batch.masks:
            host = size.host_masks[turn]
            array: npt.NDArray[np.int32] = host.numpy()
            for row, sample in enumerate(samples):
                if (mask := batch.masks.get(sample)) is not None:
                    to.masks_at[row] = row
                    used = min(len(mask), array.shape[1])
                    array[row, :used] = mask[:used]
                    array[row, used:] = 0
            with self._behind.on_stream():
                size.masks[:count].copy_(host[:count], non_blocking=True)

    def _run(self, rows: int) -> None:
        """Launch the kernels for so many rows."""
        size = self._sizes.fit(rows, self._make)
        tables = OptionTables(size.masks, self._additions.values, self._counts.values)
        self._kernels.choose_asked(
            self._buffers.logits,
            size.asked,
            tables,
            edited=size.edited,
            token_pool=self._token_pool,
            results=self._buffers.output,
        )
