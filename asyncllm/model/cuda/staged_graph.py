"""A few kernels behind a step, with a block of inputs of their own: copied in and run by two calls.

Runs on the engine thread; what it enqueues runs on the engine's CUDA stream. Owns the block, on the host and on the
device, and the graph, which is captured at the first run. Invariant: inputs of zeros mean that there is nothing to do,
so that the capture's own run changes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import torch

from asyncllm.model.cuda.graphs import StepGraphs
from asyncllm.model.cuda.streams import step_stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from asyncllm.model.cuda.direct_calls import DirectCalls

__all__ = ["BehindSteps", "PaddedRows", "StagedGraph", "padded_rows"]

_GROWTH: Final = 4  # from one number of rows to the next


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BehindSteps:
    """How what goes behind steps is enqueued.

    Args:
        turns: steps whose host memory is used at once.
        captures: whether to run by CUDA graphs.
        device: where; host memory is pinned for a GPU.
        on_stream: makes the engine's stream the current one.
    """

    turns: int
    captures: bool
    device: torch.device
    on_stream: Callable[[], AbstractContextManager[object]]


class StagedGraph:
    """Run kernels on staged inputs.

    Args:
        elements: int32, of the inputs.
        launch: launches the kernels.
        behind: how they are enqueued.

    Attributes:
        input: int32 [elements].
    """

    def __init__(self, elements: int, launch: Callable[[], None], behind: BehindSteps) -> None:
        self._launch = launch
        self._behind = behind
        self._graph: StepGraphs[None] | None = None
        with behind.on_stream():
            self.input = torch.zeros(elements, dtype=torch.int32, device=behind.device)
        pinned = behind.device.type == "cuda"
        self._blocks = [
            torch.zeros(elements, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(behind.turns)
        ]

    def host(self, turn: int) -> npt.NDArray[np.int32]:
        """Return the host memory of a turn."""
        array: npt.NDArray[np.int32] = self._blocks[turn].numpy()
        return array

    def run(self, turn: int, direct: DirectCalls | None) -> None:
        """Enqueue a turn's inputs and the kernels."""
        if self._behind.captures and self._graph is None:
            self._capture()
        handle = None if self._graph is None else self._graph.handle(None)
        block = self._blocks[turn]
        if direct is not None and handle is not None:
            direct.copy_in(self.input.data_ptr(), block.data_ptr(), block.nbytes)
            direct.launch(handle)
            return
        with self._behind.on_stream():
            self.input.copy_(block, non_blocking=True)
            if self._graph is None:
                self._launch()
            else:
                self._graph.run(None)

    def drop(self) -> None:
        """Give the graph up, so that it is captured again: what it addresses has moved."""
        if self._graph is not None:
            step_stream(self._behind.device).synchronize()  # it may be running
            self.close()

    def close(self) -> None:
        """Give the graph back. Idempotent; nothing may be running."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _capture(self) -> None:
        step_stream(self._behind.device).synchronize()  # graphs are captured on another stream
        graph: StepGraphs[None] = StepGraphs(lambda _: self._launch(), self._behind.device)
        graph.capture([None], lambda _: self.input.zero_())
        self._graph = graph


def padded_rows(most: int) -> list[int]:
    """Return the numbers of rows that such kernels are padded to."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(_GROWTH * sizes[-1], most))
    return sizes


class HasGraph(Protocol):
    """What some rows need."""

    @property
    def graph(self) -> StagedGraph:
        """Has their inputs and runs their kernels."""


Rows = TypeVar("Rows", bound=HasGraph)


class PaddedRows(Generic[Rows]):
    """What rows behind a step need, by their padded number; made when so many come for the first time.

    Args:
        most: rows of a step.
    """

    def __init__(self, most: int) -> None:
        self._sizes = padded_rows(most)
        self._made: dict[int, Rows] = {}

    def fit(self, rows: int, make: Callable[[int], Rows]) -> Rows:
        """Return what this number of rows takes, from `make` the first time, which is given the padded number."""
        size = next(each for each in self._sizes if rows <= each)
        if size not in self._made:
            self._made[size] = make(size)
        return self._made[size]

    def drop_graphs(self) -> None:
        """Have all graphs captured again: what they address has moved."""
        for made in self._made.values():
            made.graph.drop()

    def close(self) -> None:
        """Give everything back. Idempotent; nothing may be running."""
        for made in self._made.values():
            made.graph.close()
        self._made.clear()
