"""Cancelling, disconnecting, leaving early: whatever the caller does, only its own request ends, and all of it.

One test for each kind of fault that engines of this kind were reported for; long, since they are one list.
"""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING, Final

import anyio
import pytest
import trio

from asyncllm import Engine, EngineFailedError, EngineState, StepRecord
from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine
from helpers.engines import POOL, TinyModelFolder, each_model, small_engine
from helpers.idle import Idle
from helpers.loops import both_loops, on_loop

if TYPE_CHECKING:
    from asyncllm import EngineConfig, TokenStream
    from asyncllm.backend import OpenBackend, Progress

PROMPT = [10, 11, 12, 13, 14]


async def read(engine: Engine, tokens: int, *, max_tokens: int = 64) -> None:
    """Read some tokens of a stream, then leave it."""
    async with engine.stream(PROMPT, max_tokens=max_tokens, ignore_eos=True) as stream:
        for _ in range(tokens):
            await anext(stream)


@pytest.mark.parametrize("call", ["stream", "generate"])
def test_a_task_cancelled_at_any_await_leaves_nothing_on_asyncio(call: str) -> None:
    """B01: registration and submission are one step, as a cancellation sees it."""

    async def use(engine: Engine) -> None:
        if call == "generate":
            await engine.generate(PROMPT, max_tokens=8)
        else:
            await read(engine, 8)

    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            for turns in range(21):
                task = asyncio.create_task(use(engine))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await idle.check()

    asyncio.run(main())


@pytest.mark.parametrize("call", ["stream", "generate"])
def test_a_task_cancelled_at_any_await_leaves_nothing_on_trio(call: str) -> None:
    """B01, under trio."""

    async def use(engine: Engine) -> None:
        if call == "generate":
            await engine.generate(PROMPT, max_tokens=8)
        else:
            await read(engine, 8)

    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            for turns in range(21):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(use, engine)
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
            await idle.check()

    trio.run(main)


@pytest.mark.parametrize("call", ["stream", "generate"])
@both_loops
def test_a_request_cancelled_while_it_waits_never_runs(library: str, call: str) -> None:
    """B02: not one of its prompt's tokens is computed."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, max_running_requests=2) as engine:
            idle = await Idle.watch(engine)
            records: list[StepRecord] = []
            engine.add_step_listener(records.append)

            async def wait(name: str) -> None:
                if call == "generate":
                    await engine.generate([7] * 5, max_tokens=20, request_id=name)
                else:
                    await engine.stream([7] * 5, max_tokens=20, request_id=name).result()

            with model.hold_at_step() as held:
                running = [engine.stream([i] * 5, max_tokens=20, request_id=f"runs {i}") for i in range(2)]
                await held.reached()
                async with anyio.create_task_group() as tasks:
                    for place in range(5):
                        tasks.start_soon(wait, f"queued {place}")
                    while engine.stats().waiting < 5:
                        await engine.check_integrity_async()
                    tasks.cancel_scope.cancel()
            for stream in running:
                assert len((await stream.result()).token_ids) == 20
            assert not [record for record in records if any("queued" in name for name in record.request_ids)]
            await idle.check()

    on_loop(library, main)


@both_loops
def test_cancelling_samples_stops_all_of_them(library: str) -> None:
    """B02: a parent's cancel stops all siblings."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            idle = await Idle.watch(engine)
            held = model.hold_at_step()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: engine.generate_samples(PROMPT, n=4, max_tokens=500))
                    await held.reached()
                    scope.cancel()
            held.release()
            await idle.check()

    on_loop(library, main)


@both_loops
def test_a_cancelled_reader_stops_nobody_else(library: str) -> None:
    """B04: of three streams one is cancelled midway without being closed; the others end, and a fourth works."""

    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            streams = [engine.stream([i] * 5, max_tokens=50, buffer_tokens=8) for i in range(3)]
            with anyio.CancelScope() as scope:
                async for token in streams[0]:
                    if token.index == 3:
                        scope.cancel()
            assert scope.cancelled_caught
            for stream in streams[1:]:
                assert len((await stream.result()).token_ids) == 50
            assert len((await engine.generate(PROMPT, max_tokens=9)).token_ids) == 9
            await idle.check()

    on_loop(library, main)


@both_loops
def test_a_dead_engine_says_so_at_once(library: str) -> None:
    """B05: `stats` tells, and a new request is refused at the call."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            model.fail_from_step(2, RuntimeError("the device is gone"))
            with pytest.raises(EngineFailedError, match="the device is gone"):
                await engine.generate(PROMPT, max_tokens=20)
            assert engine.stats().state is EngineState.FAILED
            with pytest.raises(EngineFailedError, match="the device is gone"):
                engine.stream(PROMPT)

    on_loop(library, main)


@each_model
@both_loops
def test_a_dropped_stream_gives_everything_back(library: str, kind: str, tiny_model: TinyModelFolder) -> None:
    """B06, B14, B16: neither reading on nor closing is needed, and the steps stop."""

    async def main() -> None:
        async with small_engine(kind, tiny_model) as engine:
            idle = await Idle.watch(engine)
            stream = engine.stream(PROMPT, max_tokens=400, ignore_eos=True)
            await anext(stream)
            del stream
            await idle.check()

    on_loop(library, main)


@both_loops
def test_breaking_out_is_a_normal_operation(library: str) -> None:
    """B07: five hundred times, closed by the block or by being dropped."""

    async def main() -> None:
        async with scripted_engine(max_running_requests=8, debug_checks=False) as engine:
            idle = await Idle.watch(engine)
            for turn in range(500):
                if turn % 2:
                    await read(engine, 2)
                else:
                    async for token in engine.stream(PROMPT, max_tokens=64):
                        if token.index:
                            break
            await idle.check()

    on_loop(library, main)


@each_model
@both_loops
def test_a_mass_cancel_leaves_the_engine_idle_and_alive(library: str, kind: str, tiny_model: TinyModelFolder) -> None:
    """B08: two hundred readers at once."""

    async def main() -> None:
        async with small_engine(kind, tiny_model) as engine:
            idle = await Idle.watch(engine)
            async with anyio.create_task_group() as tasks:
                for turn in range(200):
                    tasks.start_soon(read, engine, turn)
                await engine.generate(PROMPT, max_tokens=5)
                tasks.cancel_scope.cancel()
            await idle.check()

    on_loop(library, main)


# Where a request can be when it is aborted: most requests that run, the prompt, and the step that stands.
STATES: Final[dict[str, tuple[int, list[int], int]]] = {
    "queued behind a full batch": (1, PROMPT, 0),
    "in the first of three chunks": (1, list(range(180)), 0),
    "in a middle chunk": (1, list(range(180)), 1),
    "in the last chunk": (1, list(range(180)), 2),
    "decoding": (64, PROMPT, 3),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_an_abort_works_in_every_state(state: str, overlap: bool) -> None:
    """B09: also twice, while its last step runs."""
    most_running, prompt, step = STATES[state]

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(
            model, overlap=overlap, max_running_requests=most_running, step_token_budget=64 + most_running
        ) as engine:
            idle = await Idle.watch(engine)
            first = engine.stats().steps
            with model.hold_at_step(first + step) as held:
                ahead = engine.stream([1, 2, 3], max_tokens=30) if state.startswith("queued") else None
                stream = engine.stream(prompt, max_tokens=30, request_id="it")
                await held.reached()
                assert engine.abort("it")
                assert not engine.abort("it")
            completion = await stream.result()
            assert completion.finish_reason == "aborted"
            assert len(completion.token_ids) <= step
            if ahead is not None:
                assert len((await ahead.result()).token_ids) == 30
            await idle.check()

    asyncio.run(main())


class SlowTextModel(ScriptedModel):
    """A scripted model whose tokenizer stands at long texts until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = threading.Event(), threading.Event()

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """See `Backend`."""
        opened = super().open(config, progress)
        assert opened.tokenizer is not None
        encode = opened.tokenizer.encode

        def slow_encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
            if len(text) > 1000:
                self.reached.set()
                assert self.released.wait(300)
            return encode(text, add_special_tokens=add_special_tokens)

        opened.tokenizer.encode = slow_encode  # type: ignore[method-assign]
        return opened


@both_loops
def test_an_abort_works_before_the_prompt_is_tokenized(library: str) -> None:
    """B09: in the state before all others; the text is never computed, and nobody waits for it."""

    async def main() -> None:
        model = SlowTextModel()
        async with scripted_engine(model) as engine:
            idle = await Idle.watch(engine)
            computed = engine.stats().prompt_tokens
            stream = engine.stream("x" * 3000, max_tokens=30)
            model.reached.wait(300)
            assert engine.abort(stream.request_id)
            completion = await stream.result()
            assert (completion.finish_reason, completion.token_ids) == ("aborted", ())
            assert len((await engine.generate(PROMPT, max_tokens=2)).token_ids) == 2
            model.released.set()
            await idle.check()
            assert engine.stats().prompt_tokens - computed < 100

    on_loop(library, main)


def test_random_cancels_never_reach_the_engine() -> None:
    """B10: two thousand requests, cancelled at random moments; the engine's thread is the same, and alive."""

    async def main() -> None:
        rng = random.Random(10)
        async with scripted_engine(debug_checks=False) as engine:
            idle = await Idle.watch(engine)
            opening = engine._life.opening
            assert opening is not None
            thread = opening.thread
            for _ in range(40):
                tasks = [asyncio.create_task(read(engine, rng.randrange(12))) for _ in range(50)]
                for task in rng.sample(tasks, 50):
                    if rng.random() < 0.5:
                        await asyncio.sleep(0)
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            assert opening.thread is thread
            assert thread.is_alive()
            await idle.check()

    asyncio.run(main())


@both_loops
def test_a_timeout_outside_is_a_cancel_inside(library: str) -> None:
    """B12: three hundred readers give up after a moment."""

    async def main() -> None:
        async with scripted_engine(ScriptedModel(step_seconds=0.001)) as engine:
            idle = await Idle.watch(engine)

            async def give_up() -> None:
                with anyio.move_on_after(0.01):
                    await read(engine, 1000, max_tokens=200)

            async with anyio.create_task_group() as tasks:
                for _ in range(300):
                    tasks.start_soon(give_up)
            await idle.check()

    on_loop(library, main)


@both_loops
def test_generate_can_be_cancelled(library: str) -> None:
    """B15: its pages are free when the steps that were launched have ended, not at `max_tokens`."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            idle = await Idle.watch(engine)
            with model.hold_at_step(engine.stats().steps + 5) as held:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: engine.generate(PROMPT, max_tokens=1000))
                    await held.reached()
                    tasks.cancel_scope.cancel()
                steps = engine.stats().steps
            check_nothing_left(engine)
            assert engine.stats().steps <= steps + 2
            await idle.check()

    on_loop(library, main)


async def leave(way: str, engine: Engine, stream: TokenStream) -> None:  # noqa: C901  # a branch for each way
    """Leave a stream in one of the ways that there are."""
    match way:
        case "close":
            await stream.aclose()
        case "break":
            async with stream:
                async for _ in stream:
                    break
        case "abort by id":
            assert engine.abort(stream.request_id)
            assert (await stream.result()).finish_reason == "aborted"
        case "abort":
            assert stream.abort()
            async for token in stream:
                assert token.finish_reason is None
            assert stream.finish_reason == "aborted"
        case "cancel":
            with anyio.CancelScope() as scope:
                async for _ in stream:
                    scope.cancel()
            assert scope.cancelled_caught
        case "throw":
            with pytest.raises(ZeroDivisionError):
                await stream.athrow(ZeroDivisionError())
        case "error in the block":
            with pytest.raises(ZeroDivisionError):
                async with stream:
                    raise ZeroDivisionError


@pytest.mark.parametrize("way", ["close", "break", "abort by id", "abort", "cancel", "throw", "error in the block"])
@both_loops
def test_every_way_out_of_a_stream_ends_its_request(library: str, way: str) -> None:
    """B17."""

    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            stream = engine.stream(PROMPT, max_tokens=900, buffer_tokens=8)
            await anext(stream)
            await leave(way, engine, stream)
            await idle.check()
            assert len([token async for token in stream]) <= 8, "what was delivered before may still be read"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    on_loop(library, main)


@both_loops
def test_closing_does_not_wait_for_a_slow_step(library: str) -> None:
    """B21: the step stands while `aclose` returns; nothing is raised, and nothing warns."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            idle = await Idle.watch(engine)
            with model.hold_at_step(engine.stats().steps + 3) as held:
                stream = engine.stream(PROMPT, max_tokens=50)
                await anext(stream)
                await held.reached()
                await stream.aclose()
                assert engine.stats().running == 1, "its pages stay while a launched step names them"
            await idle.check()

    on_loop(library, main)


def test_a_whole_pool_is_free_after_its_only_user_left() -> None:
    """B06 in the smallest pool: the next request needs every page of the one that was left."""

    async def main() -> None:
        async with scripted_engine(None, default=None, **POOL) as engine:
            for first in range(4):
                stream = engine.stream([first] * 60, max_tokens=60)
                await anext(stream)
                await stream.aclose()
            assert len((await engine.generate([99] * 65, max_tokens=63)).token_ids) == 63
            check_nothing_left(engine)

    asyncio.run(main())
