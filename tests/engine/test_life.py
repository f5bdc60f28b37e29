"""An engine's life: opening, closing, failing, and again; from every place and in every state."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import anyio
import pytest
import trio

from asyncllm.engine import Engine
from asyncllm.errors import (
    ConfigurationError,
    EngineClosedError,
    EngineFailedError,
    ModelLoadError,
    QueueFullError,
    RequestFailedError,
)
from asyncllm.outputs import EngineState
from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine
from asyncllm.testing.engines import collect_garbage

if TYPE_CHECKING:
    from asyncllm.backend import OpenBackend, Progress
    from asyncllm.config import EngineConfig


class SlowToOpen(ScriptedModel):
    """A model whose opening stops until it is let go, telling its progress meanwhile."""

    def __init__(self) -> None:
        super().__init__({"p": "abc"})
        self.opening = threading.Event()
        self.go_on = threading.Event()

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """Wait to be let go, or for `progress` to raise."""
        self.opening.set()
        while not self.go_on.wait(0.001):
            progress("waiting", 0, 1)
        return super().open(config, progress)


class FailsToOpen(ScriptedModel):
    """A model that cannot be opened."""

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:  # noqa: ARG002  # the protocol's
        """Raise."""
        raise MemoryError("no room for weights")


def test_before_the_start_and_after_the_close_every_call_says_which() -> None:
    engine = scripted_engine()
    assert engine.state is EngineState.NEW
    with pytest.raises(EngineClosedError, match="not started"):
        engine.stream("p")
    with engine:
        assert str(engine) == "<Engine 'scripted' running>"
    assert str(engine) == "<Engine 'scripted' closed>"
    with pytest.raises(EngineClosedError, match="closed"):
        engine.stream("p")
    with pytest.raises(EngineClosedError, match="closed"):
        engine.check_integrity()
    assert engine.stats().total_pages == 0
    assert not engine.abort("nobody")


def test_an_engine_opens_again_after_its_close() -> None:
    engine = scripted_engine({"p": "abc"})
    for _ in range(3):
        with engine:
            stream = engine.stream("p")
            texts = []
            while (token := stream.next_blocking()) is not None:
                texts.append(str(token))
            assert "".join(texts) == "abc"


def test_close_is_idempotent_and_works_when_every_loop_is_gone() -> None:
    engine = scripted_engine({"p": "abc"})

    async def main() -> str:
        await engine.start()
        return (await engine.generate("p")).text

    assert asyncio.run(main()) == "abc"
    engine.close()
    engine.close()
    assert engine.state is EngineState.CLOSED


def test_two_starts_are_one() -> None:
    async def main() -> None:
        model = SlowToOpen()
        engine = scripted_engine(model)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.start)
            tasks.start_soon(engine.start)
            await anyio.to_thread.run_sync(model.opening.wait)
            model.go_on.set()
        assert (await engine.generate("p")).text == "abc"
        await engine.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)], ids=["asyncio", "trio"])
def test_a_cancelled_start_stops_and_leaves_nothing(run: object) -> None:
    async def main() -> None:
        model = SlowToOpen()
        engine = scripted_engine(model)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.start)
                await anyio.to_thread.run_sync(model.opening.wait)
                scope.cancel()
        assert engine.state is EngineState.CLOSED
        model.go_on.set()
        async with engine:
            assert (await engine.generate("p")).text == "abc"

    assert callable(run)
    run(main())


def test_a_model_that_cannot_be_opened_says_why_and_the_engine_can_be_tried_again() -> None:
    engine = Engine("broken", backend=FailsToOpen())
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="no room for weights"):
            engine.start_blocking()
        assert engine.state is EngineState.CLOSED


def test_settings_that_contradict_are_refused_at_construction_or_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="step_token_budget=20"):
        Engine("m", step_token_budget=20, max_running_requests=16, min_prefill_chunk=16)
    with pytest.raises(ConfigurationError, match="96 or 112"):
        Engine("m", kv_pool_tokens=100, page_size=16)
    with pytest.raises(TypeError, match="kv_pool"):
        Engine("m", kv_pool=100)
    with pytest.raises(ConfigurationError), scripted_engine(step_token_budget=70, max_running_requests=64):
        pass


def test_close_ends_open_streams_after_what_was_delivered() -> None:
    async def main() -> None:
        model = ScriptedModel({"p": "abcdef"})
        held = model.hold_at_step(3)
        engine = scripted_engine(model, overlap=False)
        await engine.start()
        stream = engine.stream("p")
        first = [str(await anext(stream)) for _ in range(2)]
        await held.reached()
        closing = asyncio.ensure_future(engine.aclose())
        await asyncio.sleep(0)
        held.release()
        await closing
        rest: list[str] = []

        async def read_on() -> None:
            async for token in stream:
                rest.append(str(token))  # noqa: PERF401  # what came before the error counts

        with pytest.raises(EngineClosedError):
            await read_on()
        assert "abcdef".startswith("".join(first + rest))

    asyncio.run(main())


def test_close_under_a_cancelled_scope_still_closes() -> None:
    async def main() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            engine = scripted_engine()
            engine.start_blocking()
            await engine.aclose()
        assert engine.state is EngineState.CLOSED

    asyncio.run(main())
    trio.run(main)


def test_a_listener_may_close_the_engine() -> None:
    engine = scripted_engine()
    engine.start_blocking()
    engine.add_step_listener(lambda _: engine.close())
    stream = engine.stream("p", max_tokens=50)

    def read() -> None:
        while stream.next_blocking() is not None:
            pass

    with pytest.raises(EngineClosedError):
        read()
    engine.close()
    assert engine.state is EngineState.CLOSED


def test_statistics_are_those_of_the_check_just_made() -> None:
    with scripted_engine() as engine:
        for place in range(50):
            asyncio.run(engine.generate([place] * 20, max_tokens=3))
            engine.check_integrity()
            assert engine.stats().running == 0
            assert engine.stats().cached_pages > 0
            engine.reset_prefix_cache()
            assert engine.stats().cached_pages == 0


def test_a_dropped_engine_closes_itself_with_a_warning() -> None:
    engine = scripted_engine()
    engine.start_blocking()
    thread = next(t for t in threading.enumerate() if t.name == "asyncllm-engine")
    with pytest.warns(ResourceWarning, match="scripted"):  # noqa: PT031  # the drop is the two
        del engine
        collect_garbage()
    thread.join(300)
    assert not thread.is_alive()


def test_a_failed_step_tells_everybody_at_once_and_the_engine_opens_again() -> None:
    """B05, B24, B38: all readers and all later calls get the first cause; the process lives."""

    async def main() -> None:
        model = ScriptedModel({"p": "abc"})
        model.fail_from_step(0, RuntimeError("CUDA out of memory"))
        engine = scripted_engine(model)
        await engine.start()
        outcomes = await asyncio.gather(*(engine.generate("p") for _ in range(8)), return_exceptions=True)
        assert all(isinstance(outcome, EngineFailedError) for outcome in outcomes)
        assert {str(outcome.__cause__) for outcome in outcomes if isinstance(outcome, Exception)} == {
            "CUDA out of memory"
        }
        assert engine.state is EngineState.FAILED
        assert engine.stats().state is EngineState.FAILED
        with pytest.raises(EngineFailedError, match="CUDA out of memory"):
            engine.stream("p")
        await engine.aclose()
        async with engine:
            assert (await engine.generate("p")).text == "abc"

    asyncio.run(main())


def test_a_row_that_is_not_finite_fails_alone() -> None:
    async def main() -> None:
        model = ScriptedModel(lambda _: "ok" * 8)
        model.not_finite_at("b", 2)
        async with scripted_engine(model, overlap=False) as engine:
            outcomes = await engine.generate_all(["a", "b", "c"], return_exceptions=True)
            assert sum(isinstance(outcome, RequestFailedError) for outcome in outcomes) == 1
            assert sum(str(outcome) == "ok" * 8 for outcome in outcomes) == 2
            await engine.drain_async()
            check_nothing_left(engine)

    asyncio.run(main())


def test_the_queue_bound_is_told_at_the_call() -> None:
    """B48."""

    async def main() -> None:
        model = ScriptedModel({"p": "abc"})
        held = model.hold_at_step(0)
        async with scripted_engine(model, max_waiting_requests=2, max_running_requests=1) as engine:
            first = asyncio.ensure_future(engine.generate("p"))
            await held.reached()
            for _ in range(2):  # turns of the engine's loop: it tells what it has admitted at the end of each
                await engine.check_integrity_async()
            others = [asyncio.ensure_future(engine.generate("p")) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="max_waiting_requests=2"):
                engine.stream("p")
            held.release()
            assert [c.text for c in await asyncio.gather(first, *others)] == ["abc"] * 3

    asyncio.run(main())


def test_drain_lets_the_running_finish_and_takes_no_new_ones() -> None:
    async def main() -> None:
        async with scripted_engine({"p": "abcdef"}) as engine:
            task = asyncio.ensure_future(engine.generate("p"))
            await asyncio.sleep(0)
            await engine.drain_async()
            with pytest.raises(EngineClosedError, match="draining"):
                engine.stream("p")
            assert (await task).text == "abcdef"

    asyncio.run(main())


def test_the_switch_interval_is_short_while_steps_run_and_restored_after() -> None:
    before = sys.getswitchinterval()
    seen: list[float] = []
    with scripted_engine({"p": "abc"}, switch_interval_seconds=1e-4) as engine:
        engine.add_step_listener(lambda _: seen.append(sys.getswitchinterval()))
        stream = engine.stream("p")
        while stream.next_blocking() is not None:
            pass
    assert seen
    assert all(abs(interval - 1e-4) < 1e-6 for interval in seen)
    assert sys.getswitchinterval() == before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lets waits take longer")
def test_the_engine_threads_waits_end_on_time_and_no_other_threads_do() -> None:
    libc = ctypes.CDLL(None)

    def slack_nanoseconds() -> int:
        return int(libc.prctl(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK, of the calling thread

    before, seen = slack_nanoseconds(), []
    with scripted_engine({"p": "abc"}) as engine:
        engine.add_step_listener(lambda _: seen.append(slack_nanoseconds()))
        stream = engine.stream("p")
        while stream.next_blocking() is not None:
            pass
    assert set(seen) == {1}
    assert slack_nanoseconds() == before > 1


def test_a_listener_that_raises_is_removed_and_the_request_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def listener(_: object) -> None:
        calls.append(1)
        raise ValueError("listener")

    with scripted_engine({"p": "abc"}) as engine:
        engine.add_step_listener(listener)
        stream = engine.stream("p")
        while stream.next_blocking() is not None:
            pass
    assert calls == [1]
    assert "listener raised" in caplog.text


def test_nothing_happens_at_construction() -> None:
    threads = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine("a-model-that-does-not-exist")
        assert threading.active_count() <= threads  # another's may end
        del engine
        collect_garbage()


def test_a_policy_that_contradicts_the_model_closes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    model = ScriptedModel({"p": "abc"})
    real_open = model.open

    def open_small(config: EngineConfig, progress: Progress) -> OpenBackend:
        opened = dataclasses.replace(real_open(config, progress), step_token_budget=1)
        real_close = opened.runner.close

        def close() -> None:
            closed.append(1)
            real_close()

        monkeypatch.setattr(opened.runner, "close", close)
        return opened

    monkeypatch.setattr(model, "open", open_small)
    engine = scripted_engine(model)
    with pytest.raises(ConfigurationError, match="step_token_budget=1"):
        engine.start_blocking()
    assert closed == [1]
    assert str(engine) == "<Engine 'scripted' closed>"
