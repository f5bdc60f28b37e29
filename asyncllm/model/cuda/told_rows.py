"""The rows of a step on a GPU whose logprobs are asked for: found by two kernels behind the step.

Runs on the engine thread; what it enqueues runs on the engine's CUDA stream. Owns, for each padded number of rows, the
inputs, the scores and the graph, made at their first use. Invariant: of the vocabulary nothing comes to the host but
what was asked for.

This is for the model's own logits, after which most ask; `asyncllm.model.option_sampler.tell` does the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.model.cuda.staged_graph import PaddedRows, StagedGraph
from asyncllm.model.cuda.step_layout import Counts, ToldLayout
from asyncllm.model.option_outcome import read_logprob

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from asyncllm.model.cuda.direct_calls import DirectCalls
    from asyncllm.model.cuda.fused_model import StepBuffers
    from asyncllm.model.cuda.staged_graph import BehindSteps
    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.scheduler.batch import Batch, StepResult

__all__ = ["ToldRows", "launch_told", "tells_all"]

_MOST: Final = 32  # likeliest tokens of a row; who asks for more takes the other way


def launch_told(buffers: StepBuffers, kernels: StepKernels) -> None:
    """Launch the kernels once, for one row, so that they are compiled; they are the same for any number."""
    layout, device = ToldLayout(rows=1), buffers.logits.device
    told = layout.device(torch.zeros(layout.size, dtype=torch.int32, device=device))
    scores = torch.zeros((1, 2 + 2 * _MOST), dtype=torch.float32, device=device)
    kernels.tell(buffers.logits, told, buffers.output, scores)


@dataclasses.dataclass(frozen=True, slots=True)
class _Told:
    """What will be told; an `Outcome`.

    Args:
        scores: float32 [rows, 2 + 2 * _MOST], pinned; right once the step is done.
        asked: the samples, each with the number of likeliest tokens, in the order of the rows.
    """

    scores: npt.NDArray[np.float32]
    asked: list[tuple[int, int]]

    def complete(self, result: StepResult) -> StepResult:
        """Return the result with the logprobs."""
        logprobs = {
            sample: read_logprob(result.token_ids[sample], row, _MOST, count)
            for (sample, count), row in zip(self.asked, self.scores.tolist(), strict=True)
        }
        return dataclasses.replace(result, logprobs=logprobs)


def tells_all(batch: Batch) -> bool:
    """Whether `ToldRows` can tell all that a step's rows ask to be told."""
    return not batch.prompt_scores and all(
        asked.hook is None and not asked.processed_logprobs and (asked.logprobs or 0) <= _MOST
        for asked in batch.options.values()
        if asked.tells
    )


class _Sized:
    """What so many rows need.

    Args:
        layout: how many.
        launch: launches their kernels.
        behind: how they are enqueued.
    """

    def __init__(self, layout: ToldLayout, launch: Callable[[], None], behind: BehindSteps) -> None:
        device, shape = behind.device, (layout.rows, 2 + 2 * _MOST)
        pinned = device.type == "cuda"
        self.graph = graph = StagedGraph(layout.size, launch, behind)
        self.host = [layout.host(graph.host(turn)) for turn in range(behind.turns)]
        self.told = layout.device(graph.input)
        with behind.on_stream():
            self.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        self.results = [
            torch.zeros(shape, dtype=torch.float32, device="cpu", pin_memory=pinned) for _ in range(behind.turns)
        ]


class ToldRows:
    """Find logprobs behind a step, once its tokens are chosen.

    Args:
        buffers: of the steps: their logits and results are read.
        kernels: tell.
        behind: how they are enqueued.
    """

    def __init__(self, buffers: StepBuffers, kernels: StepKernels, behind: BehindSteps) -> None:
        self._buffers = buffers
        self._kernels = kernels
        self._behind = behind
        self._sizes: PaddedRows[_Sized] = PaddedRows(buffers.output.shape[1])

    def enqueue(self, batch: Batch, places: npt.NDArray[np.integer], *, turn: int, direct: DirectCalls | None) -> _Told:
        """Enqueue what rows want to be told of their tokens, behind the choice of these.

        Args:
            batch: the step.
            places: int [samples]: the row of the logits that each sample has.
            turn: which host memory is free.
            direct: makes calls without torch.
        """
        asked = [(sample, each.logprobs) for sample, each in batch.options.items() if each.logprobs is not None]
        size = self._sizes.fit(len(asked), self._make)
        to, count = size.host[turn], len(asked)
        to.counts[Counts.ROWS] = count
        to.places[:count] = places[[sample for sample, _ in asked]]
        to.tops[:count] = [top for _, top in asked]
        size.graph.run(turn, direct)
        results = size.results[turn]
        if direct is not None:
            direct.copy_out(results.data_ptr(), size.scores.data_ptr(), size.scores[:count].nbytes)
        else:
            with self._behind.on_stream():
                results[:count].copy_(size.scores[:count], non_blocking=True)
        return _Told(results[:count].numpy(), asked)

    def close(self) -> None:
        """Give the graphs back. Idempotent; nothing may be running."""
        self._sizes.close()

    def _make(self, rows: int) -> _Sized:
        return _Sized(ToldLayout(rows=rows), functools.partial(self._run, rows), self._behind)

    def _run(self, rows: int) -> None:
        """Launch the kernels for so many rows."""
        size = self._sizes.fit(rows, self._make)
        self._kernels.tell(self._buffers.logits, size.told, self._buffers.output, size.scores)
