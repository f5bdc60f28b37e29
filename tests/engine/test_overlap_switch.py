"""The order of launches and of results read, with overlap and without."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest

from asyncllm import Engine
from asyncllm.testing import ScriptedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import LaunchedStep, OpenBackend, Progress, StepRunner
    from asyncllm.config import EngineConfig
    from asyncllm.scheduler.batch import Batch, StepResult


class _WatchedStep:
    """A step whose result being read is an event."""

    def __init__(self, step: LaunchedStep, index: int, events: list[str]) -> None:
        self._step, self._index, self._events = step, index, events

    def done(self) -> bool:
        return self._step.done()

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        return self._step.call_when_done(callback)

    def wait(self) -> None:
        self._step.wait()

    def result(self) -> StepResult:
        self._events.append(f"read {self._index}")
        return self._step.result()


class _WatchedRunner:
    """A runner whose launches are events."""

    def __init__(self, runner: StepRunner, events: list[str]) -> None:
        self._runner, self._events = runner, events

    def launch(self, batch: Batch) -> LaunchedStep:
        self._events.append(f"launch {batch.index}")
        return _WatchedStep(self._runner.launch(batch), batch.index, self._events)

    def close(self) -> None:
        self._runner.close()


class _WatchedModel:
    """A scripted model that records what the engine does with its steps."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._model = ScriptedModel({"p": "abcd"})

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        opened = self._model.open(config, progress)
        return dataclasses.replace(opened, runner=_WatchedRunner(opened.runner, self.events))


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (True, ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"]),
        (False, ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]),
    ],
)
def test_overlap_launches_a_step_before_the_one_before_it_is_read(overlap: bool, expected: list[str]) -> None:
    model = _WatchedModel()

    async def main() -> None:
        async with Engine("scripted", backend=model, overlap=overlap) as engine:
            await engine.generate("p", max_tokens=4)

    asyncio.run(main())
    assert model.events == expected


class _Sinks:
    """A runner whose launches note how many tokens lie in a stream's mailbox."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.unread: list[int] = []
        self.count: Callable[[], int] = lambda: 0

    def launch(self, batch: Batch) -> LaunchedStep:
        self.unread.append(self.count())
        return self._runner.launch(batch)

    def close(self) -> None:
        self._runner.close()


def test_a_step_is_launched_before_readers_get_the_tokens_of_the_last_one() -> None:
    """They want the GIL then, and the device has work meanwhile."""
    model, sinks = ScriptedModel({"p": "abcdefgh"}), []

    class Watched:
        def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
            opened = model.open(config, progress)
            sinks.append(_Sinks(opened.runner))
            return dataclasses.replace(opened, runner=sinks[0])

    async def main() -> int:
        async with Engine("scripted", backend=Watched()) as engine:
            await engine.start()
            done, loop = asyncio.Event(), asyncio.get_running_loop()
            engine.add_step_listener(lambda step: step.index < 7 or loop.call_soon_threadsafe(done.set))
            async with engine.stream("p", max_tokens=8) as stream:
                sinks[0].count = lambda: stream._mailbox.unread
                await done.wait()  # nobody reads meanwhile
                return len((await stream.result()).token_ids)

    assert asyncio.run(main()) == 8
    # Before step n is launched, step n - 2 is committed: its token and those before it would be n - 1.
    assert [unread - (number - 2) for number, unread in enumerate(sinks[0].unread) if number >= 2] == [0] * 6
