"""The CPU as a device: one thread that runs steps in the order in which they are launched, as a CUDA stream does.

Made and closed on the engine thread, imports no torch. Owns its thread. Invariant: steps become done in launch
order. A step that raises does not stop the thread; those that were launched before its error was read fail too, and
do nothing: they count on what it did not do, such as entries of the page table.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from typing import TYPE_CHECKING, Protocol

from asyncllm.scheduler.batch import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CPUDevice", "CPUStep", "Sampled"]


class Sampled(Protocol):
    """What a step samples: integers [2, samples], token ids and whether all logits were finite; a tensor."""

    def tolist(self) -> list[list[int]]:
        """Return the token ids, then the flags."""


class CPUStep:
    """A `LaunchedStep` of a `CPUDevice`.

    Args:
        index: its number.
        step: what it does.
        behind: the step launched before it.
    """

    __slots__ = ("_behind", "_future", "_index", "_step", "_was_read")

    def __init__(self, index: int, step: Callable[[], Sampled], behind: CPUStep | None) -> None:
        self._index = index
        self._step: Callable[[], Sampled] | None = step
        self._was_read: bool = False
        self._behind = None if behind is None or behind._was_read else behind  # noqa: SLF001  (its own kind)
        self._future: concurrent.futures.Future[StepResult] = concurrent.futures.Future()

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done()

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called once when the step is done, on the device's thread; at once if it is done."""
        self._future.add_done_callback(lambda _future: callback())
        return True

    def wait(self) -> None:
        """Block until the step is done."""
        concurrent.futures.wait((self._future,))

    def result(self) -> StepResult:
        """Return what was sampled; raise what the step raised. Blocks until done."""
        self._was_read = True
        return self._future.result()

    def execute(self) -> None:
        """Run the step; called once, by the device's thread."""
        step, self._step = self._step, None  # a step that is done holds none of what it read
        behind, self._behind = self._behind, None
        if step is None:
            raise RuntimeError("a step runs once")
        try:
            if behind is not None and behind._future.exception() is not None:  # noqa: SLF001  (done: it ran before)
                raise RuntimeError(f"step {self._index} was not run: the step before it failed")
            tokens, finite = step().tolist()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to whoever reads the result
            self._future.set_exception(error)
        else:
            result = StepResult(index=self._index, token_ids=tuple(tokens), finite=tuple(flag != 0 for flag in finite))
            self._future.set_result(result)


class CPUDevice:
    """Run steps one after the other on a daemon thread.

    Args:
        prepare: called on the thread before the first step.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._steps: queue.SimpleQueue[CPUStep | None] = queue.SimpleQueue()
        self._closed = False
        self._newest: CPUStep | None = None
        self._thread = threading.Thread(target=self._work, args=(prepare,), name="asyncllm cpu device", daemon=True)
        self._thread.start()

    def submit(self, index: int, step: Callable[[], Sampled]) -> CPUStep:
        """Queue the step with this number and return without waiting for it.

        Raises:
            RuntimeError: the device is closed.
        """
        if self._closed:
            raise RuntimeError("the device is closed")
        self._newest = CPUStep(index, step, self._newest)
        self._steps.put(self._newest)
        return self._newest

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._steps.put(None)
        self._thread.join()

    def _work(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (step := self._steps.get()) is not None:
            step.execute()
            del step  # nothing of it is kept while the thread waits for the next one
