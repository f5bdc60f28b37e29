"""Every way to leave a stream at every moment of its life: its request ends, and nobody else notices.

Beside the stream another one runs, in the same steps; it must have the tokens that it has alone. In the end every
page is back. `docs/faults.md` shows the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from typing import TYPE_CHECKING, Final

import anyio
import pytest

from asyncllm import DeadlineExceededError, EngineClosedError
from asyncllm.testing.engines import collect_garbage
from helpers.loops import on_loop
from helpers.scenes import MOMENTS, PROMPT, READ, STEPS, TOKENS, Scene, check_neighbour, scene_at, sequence

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncllm import TokenStream

# -- the ways ----------------------------------------------------------------------------------------------------

Left = tuple["TokenStream | None", "str | type[Exception]"]


async def read(stream: TokenStream, count: int) -> None:
    """Read some tokens, which are there."""
    for index in range(count):
        assert (await anext(stream)).index == index


async def break_unnamed(scene: Scene) -> Left:
    async for token in scene.open():
        if token.index == scene.tokens - 1:
            await scene.arrive()
            break
    return None, "aborted"


async def leave_block(scene: Scene) -> Left:
    async with scene.open() as stream:
        await read(stream, scene.tokens)
        await scene.arrive()
    return stream, "aborted"


async def close(scene: Scene) -> Left:
    stream = scene.open()
    await read(stream, scene.tokens)
    await scene.arrive()
    await stream.aclose()
    return stream, "aborted"


async def abort(scene: Scene) -> Left:
    stream = scene.open()
    await read(stream, scene.tokens)
    await scene.arrive()
    assert scene.engine.abort("left") == (scene.moment != "after the end")
    return stream, "aborted"


async def cancel_in_wait(scene: Scene) -> Left:
    stream = scene.open()
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            async for _ in stream:
                pass

        tasks.start_soon(wait)
        await scene.arrive()
        tasks.cancel_scope.cancel()
    return stream, "aborted"


async def cancel_in_body(scene: Scene) -> Left:
    streams: list[TokenStream] = []
    async with anyio.create_task_group() as tasks:

        async def hold() -> None:
            async with scene.open() as stream:
                streams.append(stream)
                await read(stream, scene.tokens)
                await anyio.sleep_forever()

        tasks.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        await scene.arrive()
        tasks.cancel_scope.cancel()
    return streams[0], "aborted"


async def move_on(scene: Scene) -> Left:
    stream = scene.open()
    with anyio.move_on_after(1000) as scope:
        async with stream:
            await read(stream, scene.tokens)
            await scene.arrive()
            scope.deadline = anyio.current_time() - 1
            await anyio.sleep_forever()
    return stream, "aborted"


async def asyncio_timeout(scene: Scene) -> Left:
    stream = scene.open()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1000) as timeout, stream:
            await read(stream, scene.tokens)
            await scene.arrive()
            timeout.reschedule(asyncio.get_running_loop().time() - 1)
            await asyncio.Event().wait()
    return stream, "aborted"


async def request_timeout(scene: Scene) -> Left:
    stream = scene.open(timeout=1000)
    await read(stream, scene.tokens)
    await scene.arrive()
    scene.clock[0] += 2000  # as if so many seconds had passed
    return stream, DeadlineExceededError


async def drop(scene: Scene) -> Left:
    stream = scene.open()
    await read(stream, scene.tokens)
    await scene.arrive()
    del stream
    return None, "aborted"


async def drop_in_a_cycle(scene: Scene) -> Left:
    cycle: list[object] = [scene.open()]
    cycle.append(cycle)
    await read(cycle[0], scene.tokens)  # type: ignore[arg-type]
    await scene.arrive()
    del cycle
    collect_garbage()
    return None, "aborted"


async def close_the_engine(scene: Scene) -> Left:
    stream = scene.open()
    await read(stream, scene.tokens)
    await scene.arrive()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.engine.aclose)
        await anyio.wait_all_tasks_blocked()
        scene.exits.close()
    return stream, EngineClosedError


WAYS: Final = [
    break_unnamed,
    leave_block,
    close,
    abort,
    cancel_in_wait,
    cancel_in_body,
    move_on,
    asyncio_timeout,
    request_timeout,
    drop,
    drop_in_a_cycle,
    close_the_engine,
]


def possible(way: Callable[..., object], moment: str, library: str) -> bool:
    """A loop body needs a token to run for; nobody waits where there is something to read; trio has one timeout."""
    if way is break_unnamed:
        return moment in READ
    if way is cancel_in_wait:
        return moment not in {"paused", "after the end"}
    return way is not asyncio_timeout or library == "asyncio"


@pytest.mark.parametrize(
    ("way", "moment", "library"),
    [
        pytest.param(way, moment, library, id=f"{way.__name__}-{moment}-{library}".replace(" ", "_"))
        for way in WAYS
        for moment in MOMENTS
        for library in ("asyncio", "trio")
        if possible(way, moment, library)
    ],
)
def test_a_stream_is_left(
    way: Callable[[Scene], Awaitable[Left]], moment: str, library: str, clock: list[float]
) -> None:
    async def main() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            async with scene_at(moment, clock) as scene:
                stream, end = await way(scene)
                scene.exits.close()
                if moment == "after the end":
                    end = "length"
                await check_end(scene, stream, end)

    on_loop(library, main)


async def check_end(scene: Scene, stream: TokenStream | None, end: str | type[Exception]) -> None:
    """Check how a left stream ended: with the tokens it had, and in no step launched after it was left."""
    expected = sequence(PROMPT, TOKENS)
    if stream is not None:
        if isinstance(end, str):
            completion = await stream.result()
            assert completion.finish_reason == end
            assert completion.token_ids == expected[: len(completion.token_ids)]
        else:
            caught: Exception | None
            try:
                completion = await stream.result()
            except end as error:
                caught = error
            else:  # the engine stops behind the step in flight, which may be the last
                assert (scene.moment, completion.finish_reason) == ("finishing step", "length")
                caught = None
            if isinstance(caught, DeadlineExceededError):
                tokens = caught.completion.token_ids
                assert tokens == expected[: len(tokens)]
    if end is EngineClosedError and scene.moment == "paused":  # no step stands then: it may have had its last token
        with contextlib.suppress(EngineClosedError):
            await check_neighbour(scene)
    elif end is EngineClosedError:
        with pytest.raises(EngineClosedError):
            await scene.neighbour.result()
    else:
        await check_neighbour(scene)
    named = [record.index for record in scene.records if "left" in record.request_ids]
    if scene.moment in {"before it is read", "waiting"}:
        assert named == []
    elif scene.moment in STEPS:
        assert STEPS[scene.moment] in named or end is EngineClosedError
        assert max(named, default=0) <= STEPS[scene.moment] + 1  # the step that stood, and the one launched behind it
