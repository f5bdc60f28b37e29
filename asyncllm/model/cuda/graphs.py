"""CUDA graphs of padded steps: captured once while an engine opens, replayed by one call each.

Captured and replayed on the engine thread. Owns the graphs and the memory that they share. Invariant: a graph is
captured in thread-local mode, so that other threads may allocate, free and synchronize meanwhile, and nothing of
the process but this thread waits for it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from asyncllm.model.cuda.direct_calls import graph_handle
from asyncllm.model.cuda.streams import capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncllm.model.cuda.step_layout import StepLayout

__all__ = ["StepGraphs"]


class StepGraphs:
    """Capture steps, and run them by their graphs; a step without one runs as it is.

    Args:
        step: launches the step of a layout; returns its logits, [rows, vocab].
        device: where.
    """

    def __init__(self, step: Callable[[StepLayout], torch.Tensor], device: torch.device) -> None:
        self._step: Callable[[StepLayout], torch.Tensor] | None = step
        self._device = device
        self._graphs: dict[StepLayout, torch.cuda.CUDAGraph] = {}
        self._logits: dict[StepLayout, torch.Tensor] = {}
        self._handles: dict[StepLayout, int | None] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(
        self,
        layouts: Iterable[StepLayout],
        prepare: Callable[[StepLayout], None],
        on_captured: Callable[[int], None] = lambda _done: None,
    ) -> None:
        """Capture the steps of these layouts, the largest first, so that the others fit into its memory.

        Args:
            layouts: which.
            prepare: fills a layout's inputs, on the current stream, with what may be run.
            on_captured: told how many there are, after each; raises to stop.
        """
        step = self._open()
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        for done, layout in enumerate(sorted(layouts, key=lambda each: each.tokens, reverse=True), start=1):
            with capturing(self._device) as stream, torch.inference_mode():
                prepare(layout)
                step(layout)  # libraries and kernels are loaded now: that cannot be captured
                stream.synchronize()
                graph, logits = _captured(functools.partial(step, layout), pool)
                self._graphs[layout], self._logits[layout] = graph, logits
                self._handles[layout] = graph_handle(graph)
            on_captured(done)

    def handle(self, layout: StepLayout) -> int | None:
        """Return the driver's handle of a step's graph; None if there is no graph, or torch does not tell."""
        return self._handles.get(layout)

    def run(self, layout: StepLayout) -> torch.Tensor:
        """Enqueue a step on the current stream; return its logits, [rows, vocab], there until the next step."""
        graph = self._graphs.get(layout)
        if graph is None:
            return self._open()(layout)
        graph.replay()
        return self._logits[layout]

    def close(self) -> None:
        """Give the graphs and their memory back. Idempotent; nothing may be running."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._logits.clear()
        self._handles.clear()
        self._step = None

    def _open(self) -> Callable[[StepLayout], torch.Tensor]:
        if self._step is None:
            raise RuntimeError("the graphs are closed")
        return self._step


def _captured(
    run: Callable[[], torch.Tensor], pool: torch.cuda._POOL_HANDLE
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture what is launched on the current stream; return where its logits will be, too."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        logits = run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # that the capture is broken is no news
            graph.capture_end()
        raise
    graph.capture_end()
    return graph, _view_of(logits)


class _Place:
    """Memory of a tensor of 16-bit elements, by Python's array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<i2",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _view_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same place that does not own it, so that later captures can use the memory, too.

    It belongs to the graphs' pool, which stays as long as they do. Where torch cannot make such a view, or would copy,
    which no replay would write to, it is the tensor itself: right too, at the price of its memory.
    """
    try:
        view = torch.as_tensor(_Place(tensor), device=tensor.device).view(tensor.dtype)
    except (TypeError, ValueError, RuntimeError):
        return tensor
    return view if view.data_ptr() == tensor.data_ptr() else tensor
