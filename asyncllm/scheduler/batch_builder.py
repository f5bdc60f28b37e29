"""What goes into a step: one token of every decoding request, then chunks of prompts.

Runs on the engine thread; owns the decoding requests' columns. Invariant: the columns' first rows belong to the
requests that decode, in the order in which they began to, and hold what the next step needs of them; a step
changes them in place, so that its cost does not depend on how the values got there.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from asyncllm.request import RequestState
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP, Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.kv.cache_manager import RequestPages, StepWrites
    from asyncllm.request import Request
    from asyncllm.scheduler.step import PromptChunk

__all__ = ["DecodingRows"]

_Column = TypeVar("_Column", bound=np.generic)


class DecodingRows:
    """The requests that decode, and their columns.

    A request that stops decoding stays until the next `compact`, which drops all such rows at once.

    Args:
        max_rows: most requests that decode at once.
        page_size: tokens of a page.
    """

    def __init__(self, *, max_rows: int, page_size: int) -> None:
        self.requests: list[Request] = []
        self._pages: list[RequestPages] = []
        self._page_size = page_size
        self._slots = np.zeros(max_rows, dtype=np.int32)
        self._starts = np.zeros(max_rows, dtype=np.int32)
        self._room_ends = np.zeros(max_rows, dtype=np.int32)  # the first position for which the row has no page
        self._temperatures = np.zeros(max_rows, dtype=np.float32)
        self._top_ps = np.zeros(max_rows, dtype=np.float32)
        self._top_ks = np.zeros(max_rows, dtype=np.int32)
        self._min_ps = np.zeros(max_rows, dtype=np.float32)
        self._seeds = np.zeros(max_rows, dtype=np.int64)
        self._columns: tuple[npt.NDArray[np.generic], ...] = (
            self._slots,
            self._starts,
            self._room_ends,
            self._temperatures,
            self._top_ps,
            self._top_ks,
            self._min_ps,
            self._seeds,
        )
        self._numbers = np.arange(max_rows, dtype=np.int32)
        self._ones = np.ones(max_rows, dtype=np.int32)
        self._sampled_last_step = np.full(max_rows, SAMPLED_LAST_STEP, dtype=np.int32)
        self._stale = False

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, pages: RequestPages) -> None:
        """Append a request that decodes from the next step on."""
        row = len(self.requests)
        self.requests.append(request)
        self._pages.append(pages)
        sampling = request.sampling
        self._slots[row] = pages.slot
        self._starts[row] = request.computed
        self._room_ends[row] = pages.num_pages * self._page_size
        self._temperatures[row] = sampling.temperature
        self._top_ps[row] = sampling.top_p
        self._top_ks[row] = sampling.top_k
        self._min_ps[row] = sampling.min_p
        self._seeds[row] = sampling.seed

    def mark_stale(self) -> None:
        """Note that at least one of the requests decodes no more."""
        self._stale = True

    def compact(self) -> None:
        """Drop the rows of requests that decode no more."""
        if not self._stale:
            return
        self._stale = False
        decoding = RequestState.DECODING
        keep = [r.state is decoding and r.sampled < r.max_tokens for r in self.requests]
        rows = len(self.requests)
        self.requests = list(itertools.compress(self.requests, keep))
        self._pages = list(itertools.compress(self._pages, keep))
        mask = np.asarray(keep, dtype=np.bool_)
        for column in self._columns:
            column[: len(self.requests)] = column[:rows][mask]

    def page_needs(self) -> list[tuple[RequestPages, int]]:
        """Return the rows whose next position needs a page: their pages, and their length after the step."""
        rows = len(self.requests)
        (short,) = (self._starts[:rows] >= self._room_ends[:rows]).nonzero()
        if not len(short):
            return []
        self._room_ends[short] += self._page_size
        lengths = (self._starts[short] + 1).tolist()
        return [(self._pages[row], length) for row, length in zip(short.tolist(), lengths, strict=True)]

    def batch(self, step: int, chunks: Sequence[PromptChunk], writes: StepWrites) -> Batch:
        """Put a step together: one token of every row, then the chunks.

        Args:
            step: the step's number.
            chunks: parts of different prompts.
            writes: what the device does to page table and pages before the step.
        """
        rows = len(self.requests)
        last = [row for row, chunk in enumerate(chunks, start=rows) if chunk.last]
        sampling = [chunk.request.sampling for chunk in chunks if chunk.last]
        return Batch(
            index=step,
            slots=_join(self._slots[:rows], [chunk.pages.slot for chunk in chunks]),
            starts=_join(self._starts[:rows], [chunk.start for chunk in chunks]),
            query_lens=_join(self._ones[:rows], [len(chunk.token_ids) for chunk in chunks]),
            token_ids=np.concatenate([self._sampled_last_step[:rows], *(chunk.token_ids for chunk in chunks)]),
            sample_rows=_join(self._numbers[:rows], last),
            temperatures=_join(self._temperatures[:rows], [s.temperature for s in sampling]),
            top_ps=_join(self._top_ps[:rows], [s.top_p for s in sampling]),
            top_ks=_join(self._top_ks[:rows], [s.top_k for s in sampling]),
            min_ps=_join(self._min_ps[:rows], [s.min_p for s in sampling]),
            seeds=_join(self._seeds[:rows], [s.seed for s in sampling]),
            table_writes=writes.table_writes,
            page_copies=writes.page_copies,
        )

    def advance(self, step: int) -> None:
        """Note that a step with one token of every row was launched."""
        self._starts[: len(self.requests)] += 1
        for request in self.requests:
            request.computed += 1
            request.sampled += 1
            request.last_step = step
            if request.sampled == request.max_tokens:  # a length finish is known before the token is
                self._stale = True


def _join(column: npt.NDArray[_Column], values: Sequence[float]) -> npt.NDArray[_Column]:
    """Return a new array of the column's dtype: the column, then the values."""
    if not values:
        return column.copy()
    return np.concatenate([column, np.asarray(values, dtype=column.dtype)])
