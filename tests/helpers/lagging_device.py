"""A device that runs every step as late as it may, so that faults of overlap show on a CPU.

A GPU reads a step's host buffers, page table and pages long after the launch has returned; a CPU device has read
them before the next step is built, which hides every page that is freed too early. Here a step begins only when
the next one was launched, or when somebody waits for it. What the host frees is poisoned in the device's order,
after all steps that were launched before: reading it then raises (scripted model) or changes tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import threading
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.testing.device_thread import ThreadStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import Backend, LaunchedStep, OpenBackend, Progress, StepRunner
    from asyncllm.config import EngineConfig
    from asyncllm.scheduler.batch import Batch, StepResult

__all__ = ["LaggingBackend", "LaggingRunner", "LaggingStep", "LaggingThread"]


class LaggingStep(ThreadStep):
    """A step that stands until it may begin."""

    __slots__ = ("_may_begin",)

    def __init__(self, run: Callable[[], StepResult]) -> None:
        super().__init__(run)
        self._may_begin = threading.Event()

    def begin(self) -> None:
        """Let it begin when the steps before it have ended."""
        self._may_begin.set()

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        """Begin, since somebody waits; see `ThreadStep`."""
        self.begin()
        return super().call_when_done(callback)

    def wait(self) -> None:
        """Begin, since somebody waits; see `ThreadStep`."""
        self.begin()
        super().wait()

    def result(self) -> StepResult:
        """Begin, since somebody waits; see `ThreadStep`."""
        self.begin()
        return super().result()

    def execute(self) -> None:
        """Run as late as possible."""
        self._may_begin.wait()
        super().execute()


class LaggingThread:
    """A `DeviceThread` that lags: at most the newest launched step has not begun."""

    def __init__(self) -> None:
        self._work_items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._newest: LaggingStep | None = None
        self._thread = threading.Thread(target=self._work, name="asyncllm lagging device", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], StepResult]) -> LaggingStep:
        """Queue a step; the one before it may begin now."""
        step = LaggingStep(run)
        previous, self._newest = self._newest, step
        self._work_items.put(step.execute)
        if previous is not None:
            previous.begin()
        return step

    def do_in_order(self, work: Callable[[], None]) -> None:
        """Queue work that is no step, such as poisoning, behind the steps launched so far."""
        self._work_items.put(work)

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        if self._newest is not None:
            self._newest.begin()
        self._work_items.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._work_items.get()) is not None:
            work()


class LaggingRunner:
    """A `StepRunner` that launches the steps of another one late, and waits for each before the next.

    Args:
        inner: what runs the steps; closed with this one.
    """

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.device = LaggingThread()

    def launch(self, batch: Batch) -> LaunchedStep:
        """See `StepRunner`. Fails the step if anybody changed the batch meanwhile."""
        as_launched = copy.deepcopy(batch)

        def run() -> StepResult:
            for field in dataclasses.fields(batch):
                now, then = getattr(batch, field.name), getattr(as_launched, field.name)
                assert np.array_equal(now, then), f"step {batch.index}: {field.name} was changed after the launch"
            return self._inner.launch(batch).result()

        return self.device.submit(run)

    def close(self) -> None:
        """See `StepRunner`."""
        self.device.close()
        self._inner.close()


class LaggingBackend:
    """A `Backend` whose steps lag, for tests of the whole engine."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """See `Backend`."""
        opened = self._inner.open(config, progress)
        return dataclasses.replace(opened, runner=LaggingRunner(opened.runner))
