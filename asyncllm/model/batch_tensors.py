"""A step's inputs on their way from the scheduler's `Batch` to the device.

`BatchTensors` is made and filled on the engine thread and owns the host buffers; the device reads what it staged as
late as it likes. Invariant: a buffer is written again only after the step that reads it is done; two at least take
turns, so that this hardly ever waits.

Rows are put in an order that attention likes: rows of one token first, short before long; then the others. What is
sampled keeps the order of `Batch.sample_rows`, so nobody else sees it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from asyncllm.model.option_tensors import stage_options
from asyncllm.model.sampler import is_filtered, is_greedy, uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.model.option_tensors import StagedOptions
    from asyncllm.scheduler.batch import Batch, Ints

__all__ = ["BatchTensors", "Reader", "StagedBatch", "StepInputs"]

_ALIGNMENT: Final = 64  # bytes: a cache line, and a multiple of every element's size
_LEAST_BUFFERS: Final = 2


class Reader(Protocol):
    """Whoever reads a staged batch: its `LaunchedStep`."""

    def wait(self) -> None:
        """Block until it has read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step's inputs on the device.

    Args:
        slots: int64 [rows].
        query_starts: int32 [rows + 1]: where each row's tokens start, and where the last ones end.
        kv_lens: int32 [rows]: positions of each row after the step.
        token_ids: int64 [tokens]; negative where the token pool has the token.
        slot_of_token: int64 [tokens].
        positions: int64 [tokens].
        sampled: int64 [samples], the token that each sample follows.
        sampled_slots: int64 [samples].
        plain: int64, the samples that are drawn from all tokens.
        filtered: int64, the samples that are drawn under top-k, top-p or min-p; those in neither are greedy, or ask
            for more (`StagedOptions`).
        temperatures: float32 [samples].
        top_ps: float32 [samples].
        top_ks: int64 [samples].
        min_ps: float32 [samples].
        uniforms: float32 [samples], 0 <= u < 1.
        table_writes: int64 [3, writes].
        page_copies: int64 [2, copies].
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    token_ids: torch.Tensor
    slot_of_token: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor
    sampled_slots: torch.Tensor
    plain: torch.Tensor
    filtered: torch.Tensor
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    uniforms: torch.Tensor
    table_writes: torch.Tensor
    page_copies: torch.Tensor


_FLOATS: Final = ("temperatures", "top_ps", "min_ps", "uniforms")
_INT32S: Final = ("query_starts", "kv_lens")
_FIELDS: Final = tuple(field.name for field in dataclasses.fields(StepInputs))


def _dtypes(name: str) -> tuple[np.dtype[np.generic], torch.dtype]:
    if name in _FLOATS:
        return np.dtype(np.float32), torch.float32
    return (np.dtype(np.int32), torch.int32) if name in _INT32S else (np.dtype(np.int64), torch.int64)


_DTYPES: Final = {name: _dtypes(name) for name in _FIELDS}


class _Buffer:
    """Host memory for one step's inputs, and who reads it."""

    __slots__ = ("array", "reader", "tensor")

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()
        self.reader: Reader | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedBatch:
    """A step's inputs in a host buffer, and what the host needs to know of them.

    Args:
        index: the batch's number.
        one_token_rows: how many rows, the first ones, have one token.
        query_lens: int32 [rows].
        kv_lens: int32 [rows]: positions of each row after the step.
        buffer: where the inputs are.
        places: of each of `StepInputs`' fields, the first byte and the shape.
        used: bytes of the buffer.
        options: what single rows ask for, in memory of its own; None where none does.
    """

    index: int
    one_token_rows: int
    query_lens: Ints
    kv_lens: Ints
    buffer: _Buffer
    places: dict[str, tuple[int, tuple[int, ...]]]
    used: int
    options: StagedOptions | None

    def read_by(self, reader: Reader) -> None:
        """Keep the buffer from being written again before `reader` is done."""
        self.buffer.reader = reader

    def on_device(self, device: torch.device) -> StepInputs:
        """Give the inputs as tensors: views of the host buffer on the CPU, one copy on a GPU's current stream."""
        whole = self.buffer.tensor[: self.used].to(device, non_blocking=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, (start, shape) in self.places.items():
            dtype = _DTYPES[name][1]
            size = dtype.itemsize * math.prod(shape)
            tensors[name] = whole[start : start + size].view(dtype).view(shape)
        return StepInputs(**tensors)


class BatchTensors:
    """Stage batches in host buffers that take turns.

    Args:
        num_slots: rows of the page table; row `num_slots` is for padded rows.
        max_pages: columns of the page table.
        max_step_tokens: most tokens of a step, padded ones included.
        vocab_size: a top-k of at least this is none.
        pinned: whether a GPU copies from the buffers.
        buffers: how many take turns.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_pages: int,
        max_step_tokens: int,
        vocab_size: int,
        pinned: bool,
        buffers: int = _LEAST_BUFFERS,
    ) -> None:
        if buffers < _LEAST_BUFFERS:
            raise ValueError(f"buffers={buffers}: a step is staged while another is read, so at least two are needed")
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._pinned = pinned
        # the most that a step can name: every row new, with its whole row of the table and a partial page
        most = 3 * max_step_tokens + 16 * (max_step_tokens + 1) + num_slots * (3 * max_pages + 2)
        size = 8 * most + _ALIGNMENT * len(_DTYPES)
        self._buffers = [_Buffer(size, pinned=pinned) for _ in range(buffers)]
        self._turn = 0

    def stage(self, batch: Batch, *, padded_rows: int = 0) -> StagedBatch:
        """Write a batch, and this many padded rows of one token, to the next buffer; wait for its reader first."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        if buffer.reader is not None:
            buffer.reader.wait()
            buffer.reader = None
        slots, starts, query_lens, order = self._ordered(batch, padded_rows)
        kv_lens = starts + query_lens
        query_starts = np.concatenate([[0], np.cumsum(query_lens)])
        place_of_row = np.argsort(order)
        sampled_rows = place_of_row[batch.sample_rows]  # in the new order
        greedy = is_greedy(batch.temperatures)
        filtered = is_filtered(batch.top_ps, batch.top_ks, batch.min_ps, vocab_size=self._vocab_size)
        greedy[batch.asking] = True  # drawn apart
        within = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1], query_lens)
        values: dict[str, npt.NDArray[np.generic]] = {
            "slots": slots,
            "query_starts": query_starts,
            "kv_lens": kv_lens,
            "token_ids": _reordered_tokens(batch, padded_rows, order, query_lens, within),
            "slot_of_token": np.repeat(slots, query_lens),
            "positions": np.repeat(starts, query_lens) + within,
            "sampled": query_starts[sampled_rows + 1] - 1,
            "sampled_slots": slots[sampled_rows],
            "plain": np.flatnonzero(~greedy & ~filtered),
            "filtered": np.flatnonzero(~greedy & filtered),
            "temperatures": batch.temperatures,
            "top_ps": batch.top_ps,
            "top_ks": batch.top_ks,
            "min_ps": batch.min_ps,
            "uniforms": uniforms(batch.seeds, kv_lens[sampled_rows]),
            "table_writes": batch.table_writes,
            "page_copies": batch.page_copies,
        }
        places, used = _write(buffer.array, values)
        return StagedBatch(
            index=batch.index,
            one_token_rows=int((query_lens == 1).sum()),
            query_lens=query_lens,
            kv_lens=kv_lens,
            buffer=buffer,
            places=places,
            used=used,
            options=stage_options(
                batch,
                places=np.arange(len(batch.sample_rows)),
                row_starts=query_starts[place_of_row],
                vocab_size=self._vocab_size,
                pinned=self._pinned,
            ),
        )

    def _ordered(self, batch: Batch, padded_rows: int) -> tuple[Ints, Ints, Ints, npt.NDArray[np.int64]]:
        """Return slots, starts, query lengths and the batch's row numbers (padded rows after them), in order."""
        slots = np.concatenate([batch.slots, np.full(padded_rows, self._num_slots, dtype=np.int32)])
        starts = np.concatenate([batch.starts, np.zeros(padded_rows, dtype=np.int32)])
        query_lens = np.concatenate([batch.query_lens, np.ones(padded_rows, dtype=np.int32)])
        last = np.iinfo(np.int32).max
        order = np.argsort(np.where(query_lens == 1, starts, last), kind="stable")
        return slots[order], starts[order], query_lens[order], order


def _reordered_tokens(
    batch: Batch, padded_rows: int, order: npt.NDArray[np.int64], query_lens: Ints, within: npt.NDArray[np.int64]
) -> Ints:
    """Return the token ids in the new order of rows; padded rows get token 0."""
    tokens = np.concatenate([batch.token_ids, np.zeros(padded_rows, dtype=np.int32)])
    lens = np.concatenate([batch.query_lens, np.ones(padded_rows, dtype=np.int32)])
    starts = np.cumsum(lens) - lens
    return tokens[np.repeat(starts[order], query_lens) + within]


def _write(
    array: npt.NDArray[np.uint8], values: dict[str, npt.NDArray[np.generic]]
) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Write values one after the other; return where each is and how many bytes are used."""
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    start = 0
    for name, value in values.items():
        dtype = _DTYPES[name][0]
        end = start + value.size * dtype.itemsize
        if end > len(array):
            raise RuntimeError(f"a step of {end} bytes or more does not fit the staging buffers of {len(array)}")
        array[start:end].view(dtype).reshape(value.shape)[...] = value
        places[name] = (start, value.shape)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return places, start
