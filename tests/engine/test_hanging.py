"""Nobody waits for an engine thread that does not answer any more.

Closing an engine whose thread hangs ends in bounded time: everybody is told, and the thread is left to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import pytest

from asyncllm import (
    ConfigurationError,
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineFailedError,
    EngineState,
    IntegrityError,
)
from asyncllm.engine_loop import EngineLoop
from asyncllm.testing import HashedTokens, ScriptedModel, scripted_engine
from helpers.loops import HANG_GUARD_SECONDS, both_loops, on_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from asyncllm import StepRecord, TokenStream
    from asyncllm.backend import LaunchedStep, OpenBackend, Progress
    from asyncllm.scheduler.batch import Batch
    from asyncllm.wakeups import Reply

AT_ONCE: Final = 0.01  # nothing that hangs here comes back before it is let go, so any bound does
NEVER: Final = 3600.0  # and what is only slow is let go by the test
PROMPT: Final = (5, 6, 7)


def says(count: int) -> tuple[int, ...]:
    """What the scripted model says to the prompt."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(HashedTokens()(tokens))
    return tuple(tokens[len(PROMPT) :])


def hasty_engine(model: ScriptedModel, *, overlap: bool = False, **fields: Any) -> Engine:  # noqa: ANN401
    """Make an engine that gives its thread up at once; without overlap, it waits for a step when that begins."""
    return scripted_engine(model, close_timeout_seconds=AT_ONCE, overlap=overlap, **fields)


def engine_thread(engine: Engine) -> threading.Thread:
    opening = engine._life.opening
    assert opening is not None
    return opening.thread


@contextlib.contextmanager
def hanging_listener(engine: Engine, *, at_step: int) -> Iterator[threading.Event]:
    """Have a step listener stand on the engine thread after a step, until the block is left; tells when it stands."""
    stands, gate = threading.Event(), threading.Event()

    def stand(record: StepRecord) -> None:
        if record.index == at_step:
            stands.set()
            gate.wait(HANG_GUARD_SECONDS)

    engine.add_step_listener(stand)
    try:
        yield stands
    finally:
        gate.set()


async def told_closed(waiting: Callable[[], Awaitable[object]], outcomes: list[str]) -> None:
    """Note that `waiting` ends as it must when the engine is closed meanwhile."""
    with pytest.raises(EngineClosedError, match=r"the engine (was closed|is clos)"):
        await waiting()
    outcomes.append("told")


async def close_with_everybody_waiting(engine: Engine, streams: list[TokenStream]) -> None:
    """Close while each stream is read, a completion and a check are waited for, and a thread blocks in a stream."""
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        for stream in streams[:-1]:
            tasks.start_soon(told_closed, stream.result, told)
        tasks.start_soon(told_closed, lambda: engine.generate(PROMPT), told)
        tasks.start_soon(told_closed, lambda: anyio.to_thread.run_sync(read_blocking, streams[-1]), told)
        await anyio.wait_all_tasks_blocked()
        await engine.aclose()
    assert told == ["told"] * (len(streams) + 1)
    assert engine.state is EngineState.CLOSED
    assert engine.stats().total_pages == 0


async def waits_for_it(engine: Engine) -> None:
    """Wait until the engine waits for the step that stands: the one before has run, but may not be committed."""
    await engine.check_integrity_async()  # may be answered before its commit,
    await engine.check_integrity_async()  # this one behind it, so what comes next is read in the wait


def read_blocking(stream: TokenStream) -> None:
    while stream.next_blocking() is not None:
        pass


@both_loops
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_hangs_is_not_waited_for_longer_than_the_bound(
    library: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        model = ScriptedModel()
        engine = hasty_engine(model, overlap=overlap)
        await engine.start()
        thread = engine_thread(engine)
        with model.hold_at_step(2) as held:
            streams = [engine.stream(PROMPT, max_tokens=50) for _ in range(3)]
            await held.reached()
            await waits_for_it(engine)
            await close_with_everybody_waiting(engine, streams)
            assert thread.is_alive()
            assert "close_timeout_seconds=0.01 and is left to itself" in caplog.text
            assert "engine_loop.py" in caplog.text, "the log says where the thread stands"
        thread.join(HANG_GUARD_SECONDS)  # it comes back, and ends; `no_thread_left_behind` looks at the device's, too
        assert not thread.is_alive()
        assert "failed" not in caplog.text

    on_loop(library, main)


@both_loops
def test_a_listener_that_hangs_keeps_nobody_waiting(library: str) -> None:
    async def main() -> None:
        engine = hasty_engine(ScriptedModel())
        await engine.start()
        thread = engine_thread(engine)
        with hanging_listener(engine, at_step=1) as stands:
            streams = [engine.stream(PROMPT, max_tokens=50) for _ in range(3)]
            await anyio.to_thread.run_sync(stands.wait, HANG_GUARD_SECONDS)
            told: list[str] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(told_closed, engine.check_integrity_async, told)
                await anyio.wait_all_tasks_blocked()
                await close_with_everybody_waiting(engine, streams)
            assert told == ["told"]
        thread.join(HANG_GUARD_SECONDS)
        assert not thread.is_alive()

    on_loop(library, main)


def test_tokens_that_were_delivered_are_read_before_the_end() -> None:
    """The end is an error, or for a stream that was aborted just before, what there was of it."""

    async def main() -> None:
        engine = hasty_engine(ScriptedModel())
        await engine.start()
        with hanging_listener(engine, at_step=3) as stands:
            stream = engine.stream(PROMPT, max_tokens=50)
            left = engine.stream(PROMPT, max_tokens=50)
            await anyio.to_thread.run_sync(stands.wait, HANG_GUARD_SECONDS)
            assert left.abort()
            await engine.aclose()
            read = [(await anext(stream)).id for _ in range(3)]
            with pytest.raises(EngineClosedError):
                await anext(stream)
            partial = await left.result()
        assert tuple(read) == says(3)
        assert partial.finish_reason == "aborted"
        assert partial.token_ids == says(len(partial.token_ids))

    asyncio.run(main())


def test_a_last_token_that_was_not_delivered_any_more_is_told_as_closed() -> None:
    """Its end is decided, and not told: the listener before its delivery hangs."""
    engine = hasty_engine(ScriptedModel())
    engine.start_blocking()
    with hanging_listener(engine, at_step=0) as stands:
        stream = engine.stream(PROMPT, max_tokens=1)
        assert stands.wait(HANG_GUARD_SECONDS)
        engine.close()
        with pytest.raises(EngineClosedError):
            stream.next_blocking()


def test_what_ends_after_all_tells_nobody_twice(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel()
    engine = hasty_engine(model)
    engine.start_blocking()
    thread = engine_thread(engine)
    with model.hold_at_step(1) as held:
        stream = engine.stream(PROMPT, max_tokens=2)  # its last token is in the step that hangs
        held.wait_reached()
        engine.close()
        mailbox = stream._mailbox
        before = mailbox.unread
    thread.join(HANG_GUARD_SECONDS)
    assert mailbox.unread <= before + 1, "the last token may follow, where nobody reads it, but no second end"
    with pytest.raises(EngineClosedError):
        read_blocking(stream)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_step_that_only_takes_long_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        model = ScriptedModel()
        engine = scripted_engine(model, close_timeout_seconds=NEVER, overlap=False)
        await engine.start()
        thread = engine_thread(engine)
        with model.hold_at_step(1) as held:
            stream = engine.stream(PROMPT, max_tokens=2)
            await held.reached()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.aclose)
                await anyio.wait_all_tasks_blocked()
                assert engine.state is EngineState.RUNNING
                held.release()
        assert not thread.is_alive()
        assert (await stream.result()).token_ids == says(2)
        assert caplog.records == []

    asyncio.run(main())


def test_the_engine_opens_again_beside_the_thread_that_hangs() -> None:
    async def main() -> None:
        model = ScriptedModel()
        engine = hasty_engine(model)
        await engine.start()
        old = engine_thread(engine)
        held = model.hold_at_step(0)
        lost = engine.stream(PROMPT, request_id="same")
        await held.reached()
        await engine.aclose()
        engine = scripted_engine(model, close_timeout_seconds=NEVER)
        async with engine:
            stream = engine.stream(PROMPT, max_tokens=6, request_id="same")
            assert (await anext(stream)).id == says(1)[0]
            held.release()
            await anyio.to_thread.run_sync(old.join, HANG_GUARD_SECONDS)
            assert (await stream.result()).token_ids == says(6)
            with pytest.raises(EngineClosedError):
                await lost.result()
            assert engine.state is EngineState.RUNNING

    asyncio.run(main())


def test_the_same_engine_opens_again_and_closing_twice_is_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        model = ScriptedModel()
        engine = hasty_engine(model)
        await engine.start()
        with model.hold_at_step(0) as held:
            stream = engine.stream(PROMPT)
            await held.reached()
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(engine.aclose)
            engine.close()
            assert len(caplog.records) == 1  # later ones do not count: a thread that does not hang may take longer, too
            await engine.start()
            assert len((await engine.generate(PROMPT, max_tokens=3)).token_ids) == 3
            with pytest.raises(EngineClosedError):
                await stream.result()
        await engine.aclose()

    asyncio.run(main())


class NeverOpens(ScriptedModel):
    """A model whose opening hangs, without a sign of progress, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = threading.Event()
        self.go_on = threading.Event()

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """Hang."""
        self.opening.set()
        self.go_on.wait(HANG_GUARD_SECONDS)
        return super().open(config, progress)


@both_loops
def test_a_cancelled_start_does_not_wait_for_an_opening_that_hangs(library: str) -> None:
    """Nor does another start that waited for the first."""

    async def main() -> None:
        model = NeverOpens()
        engine = hasty_engine(model)
        told: list[str] = []
        async with anyio.create_task_group() as others:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(engine.start)
                    await anyio.to_thread.run_sync(model.opening.wait, HANG_GUARD_SECONDS)
                    thread = engine_thread(engine)
                    others.start_soon(told_closed, engine.start, told)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
            assert engine.state is EngineState.CLOSED
        assert told == ["told"]
        assert thread.is_alive()
        model.go_on.set()
        thread.join(HANG_GUARD_SECONDS)
        assert not thread.is_alive()

    on_loop(library, main)


def test_a_cancelled_close_still_closes_before_it_raises() -> None:
    """Under asyncio's own cancellation, which passes through anyio's shields."""

    async def main() -> None:
        model = ScriptedModel()
        engine = hasty_engine(model)
        await engine.start()
        with model.hold_at_step(0) as held:
            stream = engine.stream(PROMPT)
            await held.reached()
            closing = asyncio.create_task(engine.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert engine.state is EngineState.CLOSED
            with pytest.raises(EngineClosedError):
                await stream.result()

    asyncio.run(main())


def test_the_switch_interval_is_restored() -> None:
    before = sys.getswitchinterval()
    model = ScriptedModel()
    engine = hasty_engine(model, switch_interval_seconds=1e-4)
    engine.start_blocking()
    thread = engine_thread(engine)
    with model.hold_at_step(0) as held:
        stream = engine.stream(PROMPT)
        held.wait_reached()
        assert sys.getswitchinterval() < before
        engine.close()
        assert sys.getswitchinterval() == before
    thread.join(HANG_GUARD_SECONDS)
    assert sys.getswitchinterval() == before
    del stream


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_bound_that_is_none_is_refused(seconds: object) -> None:
    with pytest.raises(ConfigurationError, match="close_timeout_seconds"):
        Engine("m", close_timeout_seconds=seconds)


EXIT = """
from asyncllm.testing import ScriptedModel, scripted_engine
model = ScriptedModel()
engine = scripted_engine(model, close_timeout_seconds=0.01, overlap=False)
engine.start_blocking()
held = model.hold_at_step(1, patience_seconds=3600)
stream = engine.stream([5, 6, 7], max_tokens=50)
held.wait_reached()
"""


def test_the_interpreter_exits_though_a_step_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", EXIT],
        capture_output=True, text=True, check=False, timeout=HANG_GUARD_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was open at exit") == 1, done.stderr
    assert done.stderr.count("is left to itself") == 1, done.stderr


class FailsWithCallsUnread(ScriptedModel):
    """A model whose first step makes the engine fail, while a caller waits for an answer that nobody will give."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.replies: list[Reply[None]] = []

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """Have the launch of a step fail, behind the engine's last look at its messages."""
        opened = super().open(config, progress)

        def launch(_batch: Batch) -> LaunchedStep:
            caller = threading.Thread(target=self._ask)
            caller.start()
            caller.join()
            raise IntegrityError("simulated: a page is missing")

        opened.runner.launch = launch  # type: ignore[assignment]  # not the parameter's name
        return opened

    def _ask(self) -> None:
        assert self.engine is not None
        self.replies.append(self.engine._call(EngineLoop.check_integrity))


def test_a_call_that_the_engine_did_not_read_before_it_failed_is_told() -> None:
    model = FailsWithCallsUnread()
    with scripted_engine(model) as engine:
        model.engine = engine
        with pytest.raises(EngineFailedError):
            read_blocking(engine.stream(PROMPT))
        with pytest.raises(EngineFailedError, match="a page is missing"):
            model.replies[0].get_blocking(HANG_GUARD_SECONDS)


DROPPED = """
import time
from asyncllm.testing import ScriptedModel, scripted_engine

class SlowToClose(ScriptedModel):
    def open(self, config, progress):
        opened = super().open(config, progress)
        close = opened.runner.close

        def close_slowly():
            time.sleep(0.3)
            close()
            print("closed", flush=True)

        opened.runner.close = close_slowly
        return opened

engine = scripted_engine(SlowToClose())
engine.start_blocking()
del engine
"""


def test_the_interpreters_exit_waits_for_an_engine_that_was_dropped_just_before() -> None:
    """A thread that is inside torch when the interpreter goes would abort it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", DROPPED],
        capture_output=True, text=True, check=False, timeout=HANG_GUARD_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
