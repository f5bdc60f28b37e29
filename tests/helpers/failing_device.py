"""A device whose steps raise where a test says so: launched, before they run, after they ran, or when they are read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import Backend, LaunchedStep, OpenBackend, Progress, StepRunner
    from asyncllm.config import EngineConfig
    from asyncllm.scheduler.batch import Batch, StepResult

__all__ = ["FailingBackend", "When"]

When = Literal["launch", "before", "after", "read"]


@dataclasses.dataclass(frozen=True, slots=True)
class _FailingStep:
    """A step that raises when its result is read; it has run, or another stands for it."""

    error: Exception
    ran: LaunchedStep | None

    def done(self) -> bool:
        return self.ran is None or self.ran.done()

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        if self.ran is not None:
            return self.ran.call_when_done(callback)
        callback()
        return True

    def wait(self) -> None:
        if self.ran is not None:
            self.ran.wait()

    def result(self) -> StepResult:
        self.wait()
        raise self.error


class _FailingRunner:
    def __init__(self, inner: StepRunner, backend: FailingBackend) -> None:
        self._inner = inner
        self._backend = backend

    def launch(self, batch: Batch) -> LaunchedStep:
        backend = self._backend
        number = backend.launched
        backend.launched += 1
        error = backend.fault(number, batch)
        if error is None:
            return self._inner.launch(batch)
        backend.failed += 1
        if backend.when == "launch":
            raise error
        return _FailingStep(error, self._inner.launch(batch) if backend.when in {"after", "read"} else None)

    def close(self) -> None:
        self._inner.close()


class FailingBackend:
    """A `Backend` some of whose steps fail.

    Args:
        inner: what runs the others.
        fault: asked at each launch, by its number and batch; the error, or None.
        when: where the error shows, and whether the device has done what the step asks.
            What stands behind a step that fails when it is read has run, too.

    Attributes:
        launched, failed: how many steps were.
    """

    def __init__(self, inner: Backend, fault: Callable[[int, Batch], Exception | None], when: When) -> None:
        self._inner = inner
        self.fault = fault
        self.when = when
        self.launched = self.failed = 0

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """See `Backend`."""
        opened = self._inner.open(config, progress)
        return dataclasses.replace(opened, runner=_FailingRunner(opened.runner, self))
