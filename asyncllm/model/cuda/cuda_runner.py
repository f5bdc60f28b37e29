"""The runner of a model on a GPU: batches in, sampled tokens out, a handful of calls a step.

Runs on the engine thread; the steps run on the device's stream. Owns the model and its graphs. Invariant: at most
two steps are launched and not read, and host memory takes turns by three: what a step reads or writes there is left
alone until it is done.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.errors import EngineError
from asyncllm.model.cuda.asked_rows import AskedRows
from asyncllm.model.cuda.direct_calls import DirectCalls
from asyncllm.model.cuda.staged_graph import BehindSteps
from asyncllm.model.cuda.staging import query_places
from asyncllm.model.cuda.streams import step_stream
from asyncllm.model.cuda.told_rows import ToldRows, tells_all
from asyncllm.model.option_outcome import OptionStep
from asyncllm.model.option_sampler import tell
from asyncllm.model.option_tensors import stage_options
from asyncllm.scheduler.batch import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from asyncllm.model.cuda.fused_model import FusedModel
    from asyncllm.model.cuda.graphs import StepGraphs
    from asyncllm.model.cuda.layouts import StepLayouts
    from asyncllm.model.cuda.staging import Staged, StepStaging
    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.model.cuda.step_layout import StepLayout
    from asyncllm.model.option_outcome import Outcome
    from asyncllm.scheduler.batch import Batch

__all__ = ["CUDARunner", "CUDAStep"]

_TURNS: Final = 3
_BLOCKING: Final = True  # sleep while a step runs, instead of spinning on a core


class CUDAStep:
    """A step on the device's stream; a `LaunchedStep`.

    Args:
        index: the batch's number.
        results: int32 [2, most rows], pinned; right once `done` is.
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
        kernels: as the model has them; for page copies and asking rows, which are no part of a step.
        layouts: the padded sizes.
        staging: host memory for inputs.
    """

    def __init__(
        self,
        model: FusedModel,
        graphs: StepGraphs[StepLayout],
        kernels: Mapping[bool, StepKernels],
        layouts: StepLayouts,
        staging: StepStaging,
    ) -> None:
        self._model: FusedModel | None = model
        self._graphs = graphs
        self._kernels = kernels
        self._layouts = layouts
        self._staging = staging
        self._device = model.buffers.input.device
        self._stream = step_stream(self._device)
        output = model.buffers.output
        pinned = [torch.zeros(output.shape, dtype=output.dtype, pin_memory=True) for _ in range(_TURNS)]
        self._results: list[tuple[torch.Tensor, npt.NDArray[np.int32]]] = [(t, t.numpy()) for t in pinned]
        self._events = [torch.cuda.Event(blocking=_BLOCKING) for _ in range(_TURNS)]
        for event in self._events:
            event.record(self._stream)  # only now it has a handle
        self._direct = DirectCalls.find(self._stream)
        self._turn = 0
        self._last: CUDAStep | None = None
        self._asked: AskedRows | None = None  # with the first row that asks
        self._told: ToldRows | None = None

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
        if staged.late_writes.size or batch.page_copies.size:
            self._write_pages(model, staged.late_writes, batch.page_copies)
        results, array = self._results[self._turn]
        event = self._events[self._turn]
        try:
            outcome = self._enqueue(model, batch, staged, layout)
            self._enqueue_results(model, results, event)
        except BaseException:
            self._stream.synchronize()  # nothing reads the host's memory any more
            raise
        step = CUDAStep(batch.index, array, staged.places, event)
        staged.read_by(step)
        self._last = step
        return step if outcome is None else OptionStep(step, outcome)

    def close(self) -> None:
        """Wait for what is launched, then give all memory back. Idempotent."""
        if self._model is None:
            return
        try:
            if self._last is not None:
                self._last.wait()
        finally:
            asked, told = self._asked, self._told
            self._model = self._last = self._asked = self._told = None
            self._graphs.close()
            if asked is not None:
                asked.close()
            if told is not None:
                told.close()
            del asked, told  # their memory is given back now
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()

    def _enqueue(self, model: FusedModel, batch: Batch, staged: Staged, layout: StepLayout) -> Outcome | None:
        """Enqueue a step, and what its rows ask behind it; return what will be told beside tokens, if anything."""
        buffers, graph = model.buffers, self._graphs.handle(layout)
        token_logits: Callable[[torch.Tensor], torch.Tensor] = buffers.logits.__getitem__
        if self._direct is not None:
            self._direct.use_device()
        if self._direct is not None and graph is not None and not batch.prompt_scores:
            self._direct.copy_in(buffers.input.data_ptr(), staged.address, 4 * layout.size)
            self._direct.launch(graph)
        else:
            with self._on_stream():
                buffers.input[: layout.size].copy_(staged.block, non_blocking=True)
                if batch.prompt_scores:  # by no graph: what logits are made of is kept
                    token_logits = model.step_of_prompts(layout)
                else:
                    self._graphs.run(layout)
        edited = None
        if batch.masks or any(asked.edits for asked in batch.options.values()):
            edited = self._asked_rows(model).enqueue(batch, staged.places, turn=self._turn, direct=self._direct)
        if not batch.prompt_scores and not any(asked.tells for asked in batch.options.values()):
            return None
        if tells_all(batch):
            return self._told_rows(model).enqueue(batch, staged.places, turn=self._turn, direct=self._direct)
        return self._enqueue_telling(model, batch, staged, edited, token_logits)

    def _enqueue_telling(
        self,
        model: FusedModel,
        batch: Batch,
        staged: Staged,
        edited: torch.Tensor | None,
        token_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> Outcome | None:
        """Enqueue logprobs of all kinds, and logits for hooks, by torch; `edited` are the edited rows' logits."""
        told = stage_options(
            batch,
            places=staged.places,
            row_starts=query_places(batch),
            vocab_size=model.vocab_size,
            pinned=True,
            edits=False,
        )
        if told is None:
            return None
        logits, asking = model.buffers.logits, batch.asking
        with self._on_stream():
            inputs = told.on_device(self._device)
            tokens = model.buffers.output[0, inputs.places].to(torch.int64)
            after = logits[inputs.places].to(torch.float32)
            if edited is not None:
                rows = torch.tensor([asking.index(sample) for sample in batch.edited]).pin_memory()
                after[rows.to(self._device, non_blocking=True)] = edited
            tell(told, inputs, logits=logits, edited=after, tokens=tokens, token_logits=token_logits)
        return told.outcome

    def _asked_rows(self, model: FusedModel) -> AskedRows:
        if self._asked is None:
            self._asked = AskedRows(model.buffers, model.pages.token_pool, self._kernels[True], self._behind_steps())
        return self._asked

    def _told_rows(self, model: FusedModel) -> ToldRows:
        if self._told is None:
            self._told = ToldRows(model.buffers, self._kernels[True], self._behind_steps())
        return self._told

    def _behind_steps(self) -> BehindSteps:
        captures = len(self._graphs) > 0
        return BehindSteps(turns=_TURNS, captures=captures, device=self._device, on_stream=self._on_stream)

    def _enqueue_results(self, model: FusedModel, results: torch.Tensor, event: torch.cuda.Event) -> None:
        """Enqueue the results' copy, and the event behind it."""
        output = model.buffers.output
        if self._direct is not None:
            self._direct.copy_out(results.data_ptr(), output.data_ptr(), output.nbytes)
            self._direct.record(event.cuda_event)
        else:
            with self._on_stream():
                results.copy_(output, non_blocking=True)
                event.record(self._stream)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Have torch enqueue on the device's stream."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield

    def _write_pages(self, model: FusedModel, writes: npt.NDArray[np.int32], copies: npt.NDArray[np.int32]) -> None:
        """Do what finds no room in a padded step; rare, so it may take calls of its own."""
        with self._on_stream():
            if writes.size:
                slots, columns, pages = torch.from_numpy(writes.copy()).to(self._device)
                model.pages.table[slots.long(), columns.long()] = pages
            if copies.size:
                sources, targets = torch.from_numpy(copies.copy()).to(self._device)
                self._kernels[False].copy_pages(model.pages, sources, targets)
