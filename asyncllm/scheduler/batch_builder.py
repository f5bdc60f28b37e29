"""What goes into a step: one token of every decoding request, then chunks of prompts.

Runs on the engine thread; owns the decoding requests' columns. Invariant: the columns' first rows belong to the
requests that decode, in the order in which they began to, and hold what the next step needs of them; a step
changes them in place, so that its cost does not depend on how the values got there.

A request whose next token depends on the last one in a way that only the host can follow (its text must keep to a
structure) cannot be in a step before that token is committed. It is held back then, and the others go on; unless
these are fewer than those held back. A step takes nearly as long for few rows as for many, so all wait then, for the
time between two steps, instead of most being in every other step only.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from asyncllm.request import RequestState
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP, Batch, PromptScores
from asyncllm.scheduler.late_masks import LateMasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncllm.kv.cache_manager import RequestPages, StepWrites
    from asyncllm.request import LogitOptions, Request, RowSampling
    from asyncllm.scheduler.step import PromptChunk

__all__ = ["DecodingRows"]

_Column = TypeVar("_Column", bound=np.generic)


class DecodingRows:
    """The requests that decode, and their columns.

    A request that stops decoding stays until the next `compact`, which drops all such rows at once.

    Args:
        max_rows: most requests that decode at once.
        page_size: tokens of a page.

    Attributes:
        requests: all that decode.
        in_step: those of them that are in the next step; set by `choose`.
        all_wait: whether there should be no step before the next commit; set by `choose`.
    """

    def __init__(self, *, max_rows: int, page_size: int) -> None:
        self.requests: list[Request] = []
        self.in_step: list[Request] = []
        self.all_wait = False
        self._chosen: slice | npt.NDArray[np.int32] = slice(0)  # the rows of `in_step`
        self._needing = 0  # how many rows may have to be held back
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
        self._asking = 0  # rows with options
        self._version = 0  # of the rows: another one whenever a row comes or goes
        self._steady: dict[str, Any] | None = None  # the fields of the first step of these rows alone

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
        self._needing += request.needs_committed_token
        self._asking += sampling.options is not None
        self._changed()

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
        self._asking = sum(request.sampling.options is not None for request in self.requests)
        self._needing = sum(request.needs_committed_token for request in self.requests)
        self._changed()

    def _changed(self) -> None:
        self._version += 1
        self._steady = None

    def choose(self) -> None:
        """Decide who is in the next step: all that decode, but those that wait for their last token's commit."""
        self.compact()
        self.in_step = self.requests
        self._chosen = slice(len(self.requests))
        self.all_wait = False
        if self._needing:
            ready = [
                row
                for row, request in enumerate(self.requests)
                if not request.needs_committed_token or request.sampled == len(request.generated)
            ]
            if len(ready) < len(self.requests):
                self._chosen = np.asarray(ready, dtype=np.int32)
                self.in_step = [self.requests[row] for row in ready]
                self.all_wait = len(self.requests) - len(ready) > len(self.requests) - self._needing

    def page_needs(self) -> list[tuple[RequestPages, int]]:
        """Return the rows in the step whose position needs a page: their pages, and their length after the step."""
        short = self._numbers[self._chosen][self._starts[self._chosen] >= self._room_ends[self._chosen]]
        if not len(short):
            return []
        self._room_ends[short] += self._page_size
        lengths = (self._starts[short] + 1).tolist()
        return [(self._pages[row], length) for row, length in zip(short.tolist(), lengths, strict=True)]

    def batch(self, step: int, chunks: Sequence[PromptChunk], writes: StepWrites) -> Batch:
        """Put a step together: one token of every row that is in it, then the chunks.

        Args:
            step: the step's number.
            chunks: parts of different prompts.
            writes: what the device does to page table and pages before the step.
        """
        if self._steady is None or chunks:
            batch = self._whole_batch(step, chunks, writes)
            if not chunks and not self._needing:
                self._steady = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
                self._steady["steady"] = self._version
            return batch
        changed = {
            "index": step,
            "starts": self._starts[self._chosen].copy(),
            "table_writes": writes.table_writes,
            "page_copies": writes.page_copies,
        }
        return Batch(**(self._steady | changed))

    def _whole_batch(self, step: int, chunks: Sequence[PromptChunk], writes: StepWrites) -> Batch:
        rows, chosen = len(self.in_step), self._chosen
        last = [row for row, chunk in enumerate(chunks, start=rows) if chunk.last]
        first_samples = [chunk.request for chunk in chunks if chunk.last]
        sampling = [request.sampling for request in first_samples]
        return Batch(
            index=step,
            slots=_join(self._slots[chosen], [chunk.pages.slot for chunk in chunks]),
            starts=_join(self._starts[chosen], [chunk.start for chunk in chunks]),
            query_lens=_join(self._ones[:rows], [len(chunk.token_ids) for chunk in chunks]),
            token_ids=np.concatenate([self._last_tokens(), *(chunk.token_ids for chunk in chunks)]),
            sample_rows=_join(self._numbers[:rows], last),
            temperatures=_join(self._temperatures[chosen], [s.temperature for s in sampling]),
            top_ps=_join(self._top_ps[chosen], [s.top_p for s in sampling]),
            top_ks=_join(self._top_ks[chosen], [s.top_k for s in sampling]),
            min_ps=_join(self._min_ps[chosen], [s.min_p for s in sampling]),
            seeds=_join(self._seeds[chosen], [s.seed for s in sampling]),
            table_writes=writes.table_writes,
            page_copies=writes.page_copies,
            masks=self._masks(first_samples),
            options=self._options(sampling),
            histories=self._histories(first_samples),
            prompt_scores={
                row: scores
                for row, chunk in enumerate(chunks, start=rows)
                if (scores := _prompt_scores(chunk)) is not None
            },
        )

    def _last_tokens(self) -> npt.NDArray[np.int32]:
        """Return the decoding rows' tokens: where the host chose one, this."""
        tokens = self._sampled_last_step[: len(self.in_step)]
        if self._asking and any(request.sampling.hook is not None for request in self.in_step):
            tokens = tokens.copy()
            for row, request in enumerate(self.in_step):
                if request.sampling.hook is not None:
                    tokens[row] = request.generated[-1]
        return tokens

    def _histories(self, first_samples: Sequence[Request]) -> dict[int, npt.NDArray[np.int32]]:
        """Return the sequences of samples whose options look back, as far as `Batch.histories` has them."""
        decoding = self.in_step if self._asking else ()
        histories = {row: each.tokens() for row, each in enumerate(decoding) if each.sampling.hook is not None}
        for sample, request in enumerate(first_samples, start=len(self.in_step)):
            options = request.sampling.options
            if options is not None and (options.penalizes or options.hook is not None):
                histories[sample] = request.tokens()
        return histories

    def _options(self, first_samples: Sequence[RowSampling]) -> dict[int, LogitOptions]:
        """Return what samples ask for beyond temperature and filters; by place among the step's samples."""
        decoding = [request.sampling for request in self.in_step] if self._asking else []
        options = {}
        for samplings, start in ((decoding, 0), (first_samples, len(self.in_step))):
            for sample, sampling in enumerate(samplings, start=start):
                if sampling.options is not None:
                    options[sample] = sampling.options
        return options

    def _masks(self, first_samples: Sequence[Request]) -> Mapping[int, npt.NDArray[np.int32]]:
        """Return the masks of the requests with a constraint, by place among the step's samples."""
        bound = {
            sample: request
            for requests, start in ((self.in_step if self._needing else (), 0), (first_samples, len(self.in_step)))
            for sample, request in enumerate(requests, start=start)
            if request.constraint is not None
        }
        return LateMasks(bound) if bound else {}

    def advance(self, step: int) -> None:
        """Note that the step was launched."""
        self._starts[self._chosen] += 1
        for request in self.in_step:
            request.computed += 1
            request.sampled += 1
            request.last_step = step
            if request.sampled == request.max_tokens:  # a length finish is known before the token is
                self._stale = True


def _prompt_scores(chunk: PromptChunk) -> PromptScores | None:
    """Return what is to be told of the prompt tokens that follow a chunk's, if anything."""
    request = chunk.request
    if request.prompt_logprobs is None or chunk.start + 1 >= len(request.prompt):
        return None
    if request.generated:  # it was parked and computes its prompt again, whose logprobs were told
        return None
    return PromptScores(targets=request.prompt[chunk.start + 1 : chunk.end + 1], logprobs=request.prompt_logprobs)


def _join(column: npt.NDArray[_Column], values: Sequence[float]) -> npt.NDArray[_Column]:
    """Return a new array of the column's dtype: the column, then the values."""
    if not values:
        return column.copy()
    return np.concatenate([column, np.asarray(values, dtype=column.dtype)])
