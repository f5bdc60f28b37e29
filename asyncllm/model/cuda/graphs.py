"""CUDA graphs of padded steps: each captured once, most while an engine opens, and replayed by one call.

Captured and replayed on the engine thread. Owns the graphs and the memory that they share. Invariant: a graph is
captured in thread-local mode, so that other threads may allocate, free and synchronize meanwhile, and nothing of
the process but this thread waits for it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from asyncllm.model.cuda.direct_calls import graph_handle
from asyncllm.model.cuda.streams import capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["StepGraphs"]

Layout = TypeVar("Layout")


class StepGraphs(Generic[Layout]):
    """Capture steps, and run them by their graphs; a step without one runs as it is.

    Args:
        step: launches the step of a layout.
        device: where.
    """

    def __init__(self, step: Callable[[Layout], None], device: torch.device) -> None:
        self._step: Callable[[Layout], None] | None = step
        self._device = device
        self._graphs: dict[Layout, torch.cuda.CUDAGraph] = {}
        self._handles: dict[Layout, int | None] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(
        self,
        layouts: Iterable[Layout],
        prepare: Callable[[Layout], object],
        on_captured: Callable[[int], None] = lambda _done: None,
    ) -> None:
        """Capture the steps of these layouts.

        Args:
            layouts: which; the largest first, so that the others fit into its memory.
            prepare: fills a layout's inputs, on the current stream, with what may be run.
            on_captured: told how many there are, after each; raises to stop.
        """
        step = self._open()
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        for done, layout in enumerate(layouts, start=1):
            with capturing(self._device) as stream, torch.inference_mode():
                prepare(layout)
                step(layout)  # libraries and kernels are loaded now: that cannot be captured
                stream.synchronize()
                graph = self._graphs[layout] = _captured(functools.partial(step, layout), pool)
                self._handles[layout] = graph_handle(graph)
            on_captured(done)

    def handle(self, layout: Layout) -> int | None:
        """Return the driver's handle of a step's graph; None if there is no graph, or torch does not tell."""
        return self._handles.get(layout)

    def run(self, layout: Layout) -> None:
        """Enqueue a step on the current stream."""
        graph = self._graphs.get(layout)
        if graph is None:
            self._open()(layout)
        else:
            graph.replay()

    def close(self) -> None:
        """Give the graphs and their memory back. Idempotent; nothing may be running."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._handles.clear()
        self._step = None

    def _open(self) -> Callable[[Layout], None]:
        if self._step is None:
            raise RuntimeError("the graphs are closed")
        return self._step


def _captured(run: Callable[[], None], pool: torch.cuda._POOL_HANDLE) -> torch.cuda.CUDAGraph:
    """Capture what is launched on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # that the capture is broken is no news
            graph.capture_end()
        raise
    graph.capture_end()
    return graph
