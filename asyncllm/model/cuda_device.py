"""A GPU as a device: one stream on which steps are enqueued in launch order.

Made and used on the engine thread; owns nothing but its last step. Invariant: the host reads a result only after the
event behind its copy. A result is in pinned memory, which torch gives to another only when no step holds it and the
copies into it are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncllm.model.cuda.streams import step_stream
from asyncllm.scheduler.batch import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CUDADevice", "CUDAStep"]


class CUDAStep:
    """A `LaunchedStep` of a `CUDADevice`."""

    __slots__ = ("_done", "_index", "_sampled")

    def __init__(self, index: int, sampled: torch.Tensor, done: torch.cuda.Event) -> None:
        self._index = index
        self._sampled = sampled  # int64 [2, samples], pinned
        self._done = done

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return bool(self._done.query())

    def call_when_done(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002 - a stream cannot call back
        """Return False: poll `done`, or block in `wait`."""
        return False

    def wait(self) -> None:
        """Block until the step is done, with the GIL released."""
        self._done.synchronize()

    def result(self) -> StepResult:
        """Return what was sampled; raise what the device raised. Blocks until done."""
        self.wait()
        tokens, finite = self._sampled.tolist()
        return StepResult(index=self._index, token_ids=tuple(tokens), finite=tuple(flag != 0 for flag in finite))


class CUDADevice:
    """Enqueue steps on the device's stream.

    Args:
        device: which GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = step_stream(device)
        self._last: CUDAStep | None = None

    def submit(self, index: int, step: Callable[[], torch.Tensor]) -> CUDAStep:
        """Enqueue a step and the copy of what it samples, int64 [2, samples], to the host."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
            sampled = step().to("cpu", non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._last = CUDAStep(index, sampled, done)
        return self._last

    def close(self) -> None:
        """Wait for all steps. Idempotent."""
        if self._last is not None:
            self._last.wait()
            self._last = None
