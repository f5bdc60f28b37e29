"""A device that runs every step as late as it may, so that faults of overlap show on a CPU.

A GPU reads a step's host buffers, page table and pages long after the launch has returned; a CPU device has read
them before the next step is built, which hides every page that is freed too early and every buffer that is written
again too early. Here a step begins only when the next one was launched, or when somebody waits for it. What the
host frees can be poisoned in the device's order, after all steps that were launched before.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.model.cpu_device import CPUStep
from asyncllm.model.option_outcome import OptionStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import Backend, LaunchedStep, OpenBackend, Progress, StepRunner
    from asyncllm.config import EngineConfig
    from asyncllm.model.cpu_device import Sampled
    from asyncllm.scheduler.batch import Batch, StepResult

__all__ = ["LaggingBackend", "LaggingDevice", "LaggingRunner", "LaggingStep"]


class LaggingStep(CPUStep):
    """A step that stands until it may begin."""

    __slots__ = ("_before", "_may_begin")

    def __init__(self, index: int, step: Callable[[], Sampled], before: LaggingStep | None) -> None:
        super().__init__(index, step, before)
        self._before = before
        self._may_begin = threading.Event()

    def begin(self) -> None:
        """Let it begin, after those before it."""
        before, self._before = self._before, None
        if before is not None:
            before.begin()
        self._may_begin.set()

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        """Begin, since somebody waits; see `CPUStep`."""
        self.begin()
        return super().call_when_done(callback)

    def wait(self) -> None:
        """Begin, since somebody waits; see `CPUStep`."""
        self.begin()
        super().wait()

    def result(self) -> StepResult:
        """Begin, since somebody waits; see `CPUStep`."""
        self.begin()
        return super().result()

    def execute(self) -> None:
        """Run as late as possible."""
        self._may_begin.wait()
        super().execute()


class LaggingDevice:
    """A `CPUDevice` that lags.

    Args:
        until_waited_for: begin a step when somebody waits for it or a later one, and not before, whatever else
            was launched.
    """

    def __init__(self, *, until_waited_for: bool = False) -> None:
        self._until_waited_for = until_waited_for
        self._work_items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._newest: LaggingStep | None = None
        self._thread = threading.Thread(target=self._work, name="asyncllm lagging device", daemon=True)
        self._thread.start()

    def submit(self, index: int, step: Callable[[], Sampled]) -> LaggingStep:
        """Queue a step; the ones before it may begin now."""
        before = self._newest
        if before is not None and not self._until_waited_for:
            before.begin()
        self._newest = LaggingStep(index, step, before)
        self._work_items.put(self._newest.execute)
        return self._newest

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


class _Relayed:
    """Another device's result, as a device takes it, and as it was."""

    def __init__(self) -> None:
        self.result: StepResult | None = None

    def tolist(self) -> list[list[int]]:
        return [[], []]  # told by `complete`

    def complete(self, result: StepResult) -> StepResult:
        return result if self.result is None else self.result


def _same(now: object, then: object) -> bool:
    """Whether arrays, and what holds arrays, are equal."""
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        return now.keys() == then.keys() and all(_same(now[key], then[key]) for key in now)
    if dataclasses.is_dataclass(now):
        return all(_same(getattr(now, field.name), getattr(then, field.name)) for field in dataclasses.fields(now))
    return np.array_equal(now, then)  # type: ignore[arg-type]  # numbers and arrays


class LaggingRunner:
    """A `StepRunner` that launches the steps of another one late, and waits for each before the next.

    Args:
        inner: what runs the steps; closed with this one.
    """

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.device = LaggingDevice()

    def launch(self, batch: Batch) -> LaunchedStep:
        """See `StepRunner`. Fails the step if anybody changed the batch meanwhile."""
        as_launched = copy.deepcopy(batch)

        relayed = _Relayed()

        def run() -> _Relayed:
            for field in dataclasses.fields(batch):
                now, then = getattr(batch, field.name), getattr(as_launched, field.name)
                assert _same(now, then), f"step {batch.index}: {field.name} was changed after the launch"
            relayed.result = self._inner.launch(batch).result()
            return relayed

        return OptionStep(self.device.submit(batch.index, run), relayed)

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
