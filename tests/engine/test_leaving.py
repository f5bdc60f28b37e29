"""Every way to leave a stream ends its request, and only its request, and gives back what it held."""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel
import pytest
import trio

from asyncllm.errors import DeadlineExceededError, InvalidRequestError, StreamInUseError
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left, scripted_engine
from asyncllm.testing.engines import collect_garbage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncllm.engine import Engine

pytestmark = pytest.mark.anyio


ENDLESS: Final[dict[str, Any]] = {"max_tokens": 200, "buffer_tokens": 8}
"""Of a stream that does not end by itself, however late it is left: it is paused until it is read."""


@pytest.fixture(params=["asyncio", "asyncio+uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    name, _, loop = str(request.param).partition("+")
    return name, {"use_uvloop": True} if loop else {}


async def break_unnamed(engine: Engine) -> None:
    async for _ in engine.stream("left", **ENDLESS):
        break


async def leave_block(engine: Engine) -> None:
    async with engine.stream("left", **ENDLESS) as stream:
        async for _ in stream:
            break


async def close_explicitly(engine: Engine) -> None:
    stream = engine.stream("left", **ENDLESS)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    completion = await stream.result()
    assert completion.finish_reason == "aborted"
    assert len(completion.token_ids) < 200


async def cancel_while_waiting(engine: Engine) -> None:
    stream = engine.stream("left", **ENDLESS)
    with anyio.CancelScope() as scope:
        async for token in stream:
            if token.index == 2:
                scope.cancel()
    assert (await stream.result()).finish_reason == "aborted"


async def cancel_in_the_body(engine: Engine) -> None:
    with anyio.CancelScope() as scope:
        async with engine.stream("left", **ENDLESS) as stream:
            async for token in stream:
                if token.index == 2:
                    scope.cancel()
                    await anyio.sleep_forever()


async def move_on(engine: Engine) -> None:
    with anyio.move_on_after(0.02):
        async with engine.stream("left", **ENDLESS) as stream:
            async for _ in stream:
                await anyio.sleep(0.005)


async def time_out(engine: Engine) -> None:
    stream = engine.stream("left", max_tokens=200, timeout=0.02)
    seen = []
    with pytest.raises(DeadlineExceededError) as caught:  # noqa: PT012  # raised where the stream is read
        async for token in stream:
            seen.append(token.id)
            await anyio.sleep(0.001)
    assert caught.value.completion.finish_reason == "timeout"
    assert list(caught.value.completion.token_ids) == seen


async def abort(engine: Engine) -> None:
    stream = engine.stream("left", **ENDLESS)
    await anext(stream)
    assert engine.abort(stream.request_id)
    assert not engine.abort(stream.request_id), "an abort of an aborted request has nothing to end"
    tokens = [token async for token in stream]
    assert stream.finish_reason == "aborted"
    completion = await stream.result()
    assert len(completion.token_ids) == 1 + len(tokens)


async def drop_in_a_cycle(engine: Engine) -> None:
    stream = engine.stream("left", **ENDLESS)
    await anext(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    collect_garbage()


async def throw(engine: Engine) -> None:
    stream = engine.stream("left", **ENDLESS)
    await anext(stream)
    with pytest.raises(KeyError):
        await stream.athrow(KeyError("why"))


async def cancel_generate(engine: Engine) -> None:
    with anyio.move_on_after(0.02):
        await engine.generate("left", max_tokens=200)


async def leave_stream_all(engine: Engine) -> None:
    async for _ in engine.stream_all([[i, 5] for i in range(20)], max_tokens=50):
        break
    await anyio.lowlevel.checkpoint()


WAYS = [
    break_unnamed,
    leave_block,
    close_explicitly,
    cancel_while_waiting,
    cancel_in_the_body,
    move_on,
    time_out,
    abort,
    drop_in_a_cycle,
    throw,
    cancel_generate,
    leave_stream_all,
]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("overlap", [True, False])
async def test_leaving_ends_the_request_and_nobody_else_notices(
    leave: Callable[[Engine], Awaitable[None]], overlap: bool
) -> None:
    model = ScriptedModel(next_token=HashedTokens(), step_seconds=0.001)
    async with scripted_engine(model, overlap=overlap) as engine:
        alone = await engine.generate("neighbour", max_tokens=40)
        async with engine.stream("neighbour", max_tokens=40) as neighbour:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                await leave(engine)
                tokens = [token.id async for token in neighbour]
                await engine.drain_async()
        assert tuple(tokens) == alone.token_ids
        check_nothing_left(engine)


async def test_a_dropped_stream_is_named_by_a_resource_warning() -> None:
    async with scripted_engine() as engine:
        with pytest.warns(ResourceWarning, match="my-stream"):  # noqa: PT031  # warned some time after the drop
            async for _ in engine.stream("left", request_id="my-stream", **ENDLESS):
                break
            collect_garbage()
            await engine.drain_async()


async def test_a_stream_that_was_read_to_its_end_is_dropped_without_a_warning() -> None:
    async with scripted_engine() as engine:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [token.index async for token in engine.stream("all", max_tokens=5)] == list(range(5))
            collect_garbage()
            await engine.drain_async()


async def test_the_last_token_says_why_and_how_many_and_then_comes_the_end() -> None:
    async with scripted_engine() as engine, engine.stream("count", max_tokens=7) as stream:
        tokens = [token async for token in stream]
        assert [token.finish_reason for token in tokens] == [None] * 6 + ["length"]
        usage = tokens[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.max_tokens) == (6, 7, 7)
        assert all(token.usage is None for token in tokens[:-1])
        completion = await stream.result()
        assert completion.text == "".join(str(token) for token in tokens)
        assert completion.token_ids == tuple(token.id for token in tokens)


async def test_a_second_consumer_is_told_and_the_first_goes_on() -> None:
    model = ScriptedModel({"p": "abc"})
    held = model.hold_at_step(0)
    async with scripted_engine(model) as engine, engine.stream("p") as stream:
        got: list[str] = []

        async def first() -> None:
            got.extend([str(token) async for token in stream])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(StreamInUseError):
                await anext(stream)
            held.release()
        assert "".join(got) == "abc"


async def test_a_stream_is_made_in_one_task_and_read_in_another() -> None:
    async with scripted_engine({"p": "abc"}) as engine:
        stream = engine.stream("p")
        got: list[str] = []

        async def read() -> None:
            got.extend([str(token) async for token in stream])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
        assert "".join(got) == "abc"


async def test_a_slow_reader_is_paused_within_its_buffer_and_gets_every_token() -> None:
    async with scripted_engine(ScriptedModel(next_token=HashedTokens())) as engine:
        fast = await engine.generate("slow", max_tokens=60)
        stream = engine.stream("slow", max_tokens=60, buffer_tokens=4)
        await engine.generate("other", max_tokens=100)  # a hundred steps in which nobody reads
        assert stream._mailbox.unread <= 4
        assert engine.stats().paused == 1
        assert tuple([token.id async for token in stream]) == fast.token_ids
        await engine.drain_async()
        check_nothing_left(engine)


async def test_a_duplicate_id_is_refused_at_the_call_and_free_again_after_the_end() -> None:
    async with scripted_engine() as engine:
        async with engine.stream("p", request_id="a", max_tokens=20, buffer_tokens=8) as first:
            with pytest.raises(InvalidRequestError, match="'a' is in use"):
                engine.stream("p", request_id="a")
            assert len([token async for token in first]) == 20
        completion = await engine.generate("p", request_id="a", max_tokens=1)
        assert completion.request_id == "a"


@pytest.mark.parametrize("turns", range(12))
def test_a_cancel_at_any_turn_of_the_loop_leaves_nothing(turns: int) -> None:
    """B01: the task is cancelled after k turns of its loop, whatever it was doing then."""

    async def main() -> None:
        async with scripted_engine() as engine:
            task = asyncio.ensure_future(engine.generate("p", max_tokens=50))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.drain_async()
            check_nothing_left(engine)

    asyncio.run(main())


def test_a_mass_cancel_under_trio_leaves_the_engine_alive() -> None:
    """B08: 200 consumers, the whole nursery is cancelled."""

    async def consume(engine: Engine, number: int) -> None:
        async with engine.stream([number, 7], max_tokens=20) as stream:
            async for _ in stream:
                pass

    async def main() -> None:
        async with scripted_engine() as engine:
            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(consume, engine, number)
                await trio.sleep(0.02)
                nursery.cancel_scope.cancel()
            assert len((await engine.generate("still there", max_tokens=3)).token_ids) == 3
            await engine.drain_async()
            check_nothing_left(engine)

    trio.run(main)


async def test_a_reader_that_is_behind_can_be_cancelled_and_lets_its_loop_run() -> None:
    async with scripted_engine() as engine:
        stream = engine.stream("behind", max_tokens=50)
        while engine.stats().generated_tokens < 50:
            await engine.check_integrity_async()
        turns, seen = 0, 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn)
            with anyio.CancelScope() as scope:
                async for _ in stream:
                    seen += 1
                    if seen == 20:
                        scope.cancel()
            tasks.cancel_scope.cancel()
        assert scope.cancelled_caught
        assert seen == 20
        assert turns >= 20
