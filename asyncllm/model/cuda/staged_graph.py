"""A few kernels behind a step, with a block of inputs of their own: copied in and run by two calls.

Runs on the engine thread; what it enqueues runs on the engine's CUDA stream. Owns the block, on the host and on the
device, and the graph, which is captured at the first run. Invariant: inputs of zeros mean that there is nothing to do,
so that the capture's own run changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from asyncllm.model.cuda.graphs import StepGraphs
from asyncllm.model.cuda.streams import step_stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from asyncllm.model.cuda.direct_calls import DirectCalls

__all__ = ["StagedGraph", "padded_rows"]

_GROWTH: Final = 4  # from one number of rows to the next


def padded_rows(most: int) -> list[int]:
    """Return the numbers of rows that such kernels are padded to."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(_GROWTH * sizes[-1], most))
    return sizes


class StagedGraph:
    """Run kernels on staged inputs.

    Args:
        elements: int32, of the inputs.
        launch: launches the kernels.
        turns: host blocks that take turns.
        captures: whether to run by a CUDA graph.
        device: where; host memory is pinned for a GPU.
        on_stream: makes the engine's stream the current one.

    Attributes:
        input: int32 [elements].
    """

    def __init__(
        self,
        elements: int,
        launch: Callable[[], None],
        *,
        turns: int,
        captures: bool,
        device: torch.device,
        on_stream: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._launch = launch
        self._captures = captures
        self._device = device
        self._on_stream = on_stream
        self._graph: StepGraphs[None] | None = None
        with on_stream():
            self.input = torch.zeros(elements, dtype=torch.int32, device=device)
        self._blocks = [
            torch.zeros(elements, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            for _ in range(turns)
        ]

    def host(self, turn: int) -> npt.NDArray[np.int32]:
        """Return the host memory of a turn."""
        array: npt.NDArray[np.int32] = self._blocks[turn].numpy()
        return array

    def run(self, turn: int, direct: DirectCalls | None) -> None:
        """Enqueue a turn's inputs and the kernels."""
        if self._captures and self._graph is None:
            self._capture()
        handle = None if self._graph is None else self._graph.handle(None)
        block = self._blocks[turn]
        if direct is not None and handle is not None:
            direct.copy_in(self.input.data_ptr(), block.data_ptr(), block.nbytes)
            direct.launch(handle)
            return
        with self._on_stream():
            self.input.copy_(block, non_blocking=True)
            if self._graph is None:
                self._launch()
            else:
                self._graph.run(None)

    def drop(self) -> None:
        """Give the graph up, so that it is captured again: what it addresses has moved."""
        if self._graph is not None:
            step_stream(self._device).synchronize()  # it may be running
            self.close()

    def close(self) -> None:
        """Give the graph back. Idempotent; nothing may be running."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _capture(self) -> None:
        step_stream(self._device).synchronize()  # graphs are captured on another stream
        graph: StepGraphs[None] = StepGraphs(lambda _: self._launch(), self._device)
        graph.capture([None], lambda _: self.input.zero_())
        self._graph = graph
