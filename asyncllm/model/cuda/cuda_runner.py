"""The runner of a model on a GPU: batches in, sampled tokens out, a handful of calls a step.

Runs on the engine thread; the steps run on the device's stream. Owns the model and its graphs. Invariant: at most
two steps are launched and not read, and host memory takes turns by three: what a step reads or writes there is left
alone until it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from asyncllm.errors import EngineError
from asyncllm.model.cuda.direct_calls import DirectCalls
from asyncllm.model.cuda.staging import query_places
from asyncllm.model.cuda.streams import step_stream
from asyncllm.model.option_outcome import OptionStep
from asyncllm.model.option_sampler import OptionSampler
from asyncllm.model.option_tensors import stage_options
from asyncllm.scheduler.batch import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from asyncllm.model.cuda.fused_model import FusedModel
    from asyncllm.model.cuda.graphs import StepGraphs
    from asyncllm.model.cuda.layouts import StepLayouts
    from asyncllm.model.cuda.staging import StepStaging
    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.model.cuda.step_layout import StepLayout
    from asyncllm.model.option_tensors import StagedOptions
    from asyncllm.scheduler.batch import Batch

__all__ = ["CUDARunner", "CUDAStep"]

_TURNS: Final = 3
_BLOCKING: Final = True  # sleep while a step runs, instead of spinning on a core


class CUDAStep:
    """A step on the device's stream; a `LaunchedStep`.

    Args:
        index: the batch's number.
        results: int32 [2, rows], pinned; right once `done` is.
        places: int64 [samples]: the columns of `results` that were asked for.
        done: recorded behind the copy of the results.
    """

    __slots__ = ("_done", "_index", "_places", "_results", "_waited")

    def __init__(
        self, index: int, results: npt.NDArray[np.int32], places: npt.NDArray[np.int64], done: torch.cuda.Event
    ) -> None:
        self._index = index
        self._results = results
        self._places = places
        self._done = done
        self._waited = False

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return bool(self._done.query())

    def call_when_done(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002 - a stream cannot call back cheaply
        """Return False: poll `done`, or block in `wait`."""
        return False

    def wait(self) -> None:
        """Block until the step is done, with the GIL released; a second call keeps it."""
        if self._waited:
            return
        try:
            self._done.synchronize()
        except RuntimeError as error:
            raise EngineError(
                f"CUDA failed in a step: {error}. Nothing in this process can use the device any more: restart it"
            ) from error
        self._waited = True

    def result(self) -> StepResult:
        """Return what was sampled. Blocks until done.

        Raises:
            EngineError: the device failed.
        """
        self.wait()
        tokens, finite = (row[self._places].tolist() for row in self._results)  # one row at a time keeps the GIL
        return StepResult(index=self._index, token_ids=tuple(tokens), finite=tuple(map(bool, finite)))


class CUDARunner:
    """Run a model's steps; a `StepRunner`.

    Args:
        model: the model; the runner gives it up at `close`.
        graphs: of its steps; closed with the runner.
        kernels: for page copies, which are no part of a step.
        layouts: the padded sizes.
        staging: host memory for inputs.
    """

    def __init__(
        self,
        model: FusedModel,
        graphs: StepGraphs,
        kernels: StepKernels,
        layouts: StepLayouts,
        staging: StepStaging,
    ) -> None:
        self._model: FusedModel | None = model
        self._graphs = graphs
        self._kernels = kernels
        self._layouts = layouts
        self._staging = staging
        self._device = model.input.device
        self._stream = step_stream(self._device)
        pinned = [torch.zeros(len(model.output), dtype=torch.int32, pin_memory=True) for _ in range(_TURNS)]
        self._results: list[tuple[torch.Tensor, npt.NDArray[np.int32]]] = [(t, t.numpy()) for t in pinned]
        self._events = [torch.cuda.Event(blocking=_BLOCKING) for _ in range(_TURNS)]
        for event in self._events:
            event.record(self._stream)  # only now it has a handle
        self._direct = DirectCalls.find(self._stream)
        self._turn = 0
        self._last: CUDAStep | None = None
        self._options = OptionSampler(num_slots=len(model.pages.token_pool))

    def launch(self, batch: Batch) -> CUDAStep | OptionStep:
        """Enqueue a step and return without waiting for it.

        Raises:
            RuntimeError: the runner is closed.
        """
        model = self._model
        if model is None:
            raise RuntimeError("the runner is closed")
        layout = self._layouts.choose(batch, self._staging.tiles(batch))
        staged = self._staging.stage(batch, layout)
        self._turn = (self._turn + 1) % _TURNS
        results, array = self._results[self._turn]
        event, size = self._events[self._turn], 2 * layout.rows
        if staged.late_writes.size or batch.page_copies.size:
            self._write_pages(model, staged.late_writes, batch.page_copies)
        options = self._staged_options(batch, staged.places, model.vocab_size)
        graph = self._graphs.handle(layout)
        if options is None and self._direct is not None and graph is not None:
            self._direct.enqueue(
                staged.address,
                model.input.data_ptr(),
                4 * layout.size,
                graph,
                model.output.data_ptr(),
                results.data_ptr(),
                4 * size,
                event.cuda_event,
            )
        else:
            self._enqueue(model, staged.block, layout, results[:size], event, options=options)
        step = CUDAStep(batch.index, array[:size].reshape(2, layout.rows), staged.places, event)
        staged.read_by(step)
        self._last = step
        return step if options is None else OptionStep(step, options.outcome)

    def close(self) -> None:
        """Wait for what is launched, then give all memory back. Idempotent."""
        if self._model is None:
            return
        try:
            if self._last is not None:
                self._last.wait()
        finally:
            self._model = self._last = None
            self._graphs.close()
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()

    def _enqueue(
        self,
        model: FusedModel,
        block: torch.Tensor,
        layout: StepLayout,
        results: torch.Tensor,
        event: torch.cuda.Event,
        *,
        options: StagedOptions | None,
    ) -> None:
        """Enqueue a step by way of torch."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            model.input[: layout.size].copy_(block, non_blocking=True)
            if options is None:
                self._graphs.run(layout)
            else:
                self._run_options(model, layout, options)
            results.copy_(model.output[: len(results)], non_blocking=True)
            event.record(self._stream)

    def _staged_options(self, batch: Batch, places: npt.NDArray[np.int64], vocab_size: int) -> StagedOptions | None:
        if not (batch.masks or batch.options or batch.prompt_scores):
            return None
        return stage_options(batch, places=places, row_starts=query_places(batch), vocab_size=vocab_size, pinned=True)

    def _run_options(self, model: FusedModel, layout: StepLayout, options: StagedOptions) -> None:
        """Run a step, and choose the asking rows' tokens again; prompts are scored without the step's graph."""
        if options.outcome.scores_prompts:
            logits, token_logits = model.open_step(layout)
        else:
            logits = self._graphs.run(layout)
            token_logits = logits.__getitem__
        asked = self._options.sample(logits, options, token_logits)
        tokens, finite = model.results(layout)
        tokens[asked.places] = asked.tokens.to(torch.int32)
        finite[asked.places] *= asked.left
        model.pages.token_pool[asked.slots] = asked.tokens.to(torch.int32)

    def _write_pages(self, model: FusedModel, writes: npt.NDArray[np.int32], copies: npt.NDArray[np.int32]) -> None:
        """Do what finds no room in a padded step; rare, so it may take calls of its own."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            if writes.size:
                slots, columns, pages = torch.from_numpy(writes.copy()).to(self._device)
                model.pages.table[slots.long(), columns.long()] = pages
            if copies.size:
                sources, targets = torch.from_numpy(copies.copy()).to(self._device)
                self._kernels.copy_pages(model.pages, sources, targets)
