"""Every fault at every moment of a stream's life: who is told what, and that the stream beside it has its tokens.

`docs/faults.md` shows the table. Which rows a failed step takes with it, and how they are found, is held in more
depth by `test_failed_steps.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import warnings
from typing import TYPE_CHECKING, Final, NoReturn

import pytest

from asyncllm import EngineError, EngineFailedError, EngineState, RequestFailedError
from asyncllm.testing.engines import collect_garbage
from helpers.loops import both_loops, on_loop
from helpers.scenes import MOMENTS, PROMPT, STEPS, TOKENS, Scene, check_neighbour, scene_at, sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncllm import StepRecord, TokenStream
    from asyncllm.submission import Submission
    from asyncllm.text.advance import TextProgress, TextStep

BROKEN: Final = RuntimeError("simulated: the device is broken")
NO_MEMORY: Final = MemoryError("simulated")
SAMPLES: Final = {"last chunk": 0, "decode": STEPS["decode"] - STEPS["last chunk"], "finishing step": TOKENS - 1}
"""Which of its tokens the stream samples in the step of a moment."""

each_moment: Final = pytest.mark.parametrize("moment", MOMENTS)
each_step: Final = pytest.mark.parametrize("moment", list(STEPS))
each_sample: Final = pytest.mark.parametrize("moment", list(SAMPLES))


def at_the_moment(library: str, moment: str, fault: Callable[[Scene], None], end: type[Exception] | None) -> None:
    """Have something go wrong at a moment, and check how the stream ends: by its last token, or by an error."""

    async def main() -> None:
        async with scene_at(moment, [0.0]) as scene:
            stream = scene.open()
            await scene.arrive()
            fault(scene)
            scene.exits.close()
            if end is None or moment == "after the end":
                assert tuple([token.id async for token in stream]) == sequence(PROMPT, TOKENS)
            else:
                with pytest.raises(end) as caught:
                    await stream.result()
                check_cause(caught.value)
            if end is EngineFailedError and moment != "after the end":
                if moment == "paused":  # then it may have had its last token
                    with contextlib.suppress(EngineFailedError):
                        await check_neighbour(scene)
                else:
                    with pytest.raises(EngineFailedError):
                        await scene.neighbour.result()
                assert scene.engine.state is EngineState.FAILED
                with pytest.raises(EngineFailedError):
                    scene.engine.stream(PROMPT)
            else:
                await check_neighbour(scene)
            if end is EngineFailedError and moment == "after the end":
                with pytest.raises(EngineFailedError):  # whoever comes next
                    await scene.engine.generate(PROMPT)

    on_loop(library, main)


def check_cause(error: Exception) -> None:
    """Check that an error carries what caused it, unless it is of the logits, which is nobody's exception."""
    if "finite" not in str(error):
        assert error.__cause__ in {BROKEN, NO_MEMORY}


def step_of(scene: Scene) -> int | None:
    """The step that stands at the moment; the next to begin where none does."""
    return STEPS.get(scene.moment, None if scene.moment in {"paused", "after the end"} else 1)


@each_moment
@both_loops
def test_a_step_raises_once(library: str, moment: str) -> None:
    at_the_moment(library, moment, lambda scene: scene.model.fail_at_step(step_of(scene), BROKEN), None)


@each_moment
@both_loops
def test_no_step_runs_any_more(library: str, moment: str) -> None:
    at_the_moment(
        library, moment, lambda scene: scene.model.fail_from_step(step_of(scene) or 0, BROKEN), EngineFailedError
    )


@each_moment
def test_there_is_no_memory_for_one_step(moment: str) -> None:
    at_the_moment("asyncio", moment, lambda scene: scene.model.fail_at_step(step_of(scene), NO_MEMORY), None)


@each_moment
def test_there_is_no_memory_for_any_step(moment: str) -> None:
    at_the_moment("asyncio", moment, lambda scene: scene.model.fail_steps_above(0, NO_MEMORY), EngineFailedError)


@each_moment
@both_loops
def test_steps_with_it_raise(library: str, moment: str) -> None:
    at_the_moment(library, moment, lambda scene: scene.model.fail_steps_with(PROMPT[:5], BROKEN), RequestFailedError)


@each_sample
@both_loops
def test_its_logits_are_not_finite(library: str, moment: str) -> None:
    at_the_moment(library, moment, lambda scene: scene.model.not_finite_at(PROMPT, SAMPLES[moment]), RequestFailedError)


class FaultyText:
    """The text of a request, which raises at one token."""

    def __init__(self, inner: TextProgress, token_id: int) -> None:
        self._inner = inner
        self._token_id = token_id

    def advance(self, token_id: int) -> TextStep:
        """See `TextProgress`."""
        if token_id == self._token_id:
            raise BROKEN
        return self._inner.advance(token_id)


@each_sample
@both_loops
def test_the_text_of_its_token_cannot_be_made(library: str, moment: str) -> None:
    def fault(scene: Scene) -> None:
        (submission,) = [each for each in live(scene) if each.request_id == "left"]
        assert submission.ready is not None
        text = FaultyText(submission.ready.text, sequence(PROMPT, TOKENS)[SAMPLES[moment]])
        submission.ready = dataclasses.replace(submission.ready, text=text)  # type: ignore[arg-type]

    at_the_moment(library, moment, fault, RequestFailedError)


@pytest.mark.parametrize("error", [BROKEN, SystemExit(1)], ids=["error", "exit"])
@each_step
@both_loops
def test_a_step_listener_raises(library: str, moment: str, error: BaseException) -> None:
    told: list[int] = []

    def fault(scene: Scene) -> None:
        def listen(record: StepRecord) -> None:
            told.append(record.index)
            raise error

        scene.engine.add_step_listener(listen)

    at_the_moment(library, moment, fault, None)
    assert len(told) == 1, "a listener that raised is not told again"


@pytest.mark.parametrize("way", ["closed", "wake-up fails"])
@each_step
def test_the_loop_that_its_reader_waits_on_is_gone(moment: str, way: str) -> None:
    """In another thread; the neighbour's loop, and the neighbour, go on."""

    async def main() -> None:
        async with scene_at(moment, [0.0]) as scene:
            stream = scene.open()
            with reader_on_a_loop_of_its_own(stream) as loop:
                await scene.arrive()
                while stream._mailbox.unread or stream._mailbox.reader_door is None:
                    await scene.engine.check_integrity_async()
                if way == "closed":
                    loop.call_soon_threadsafe(loop.stop)
                    while not loop.is_closed():
                        await scene.engine.check_integrity_async()
                else:
                    loop.call_soon_threadsafe = fail_to_wake  # type: ignore[method-assign,assignment]
                scene.exits.close()
                await check_neighbour(scene)
                assert not live(scene)
            if moment == "finishing step":  # then it may have had its last token
                with contextlib.suppress(EngineError):
                    assert (await stream.result()).token_ids == sequence(PROMPT, TOKENS)
            else:
                with pytest.raises(EngineError, match="the event loop that waited for 'left' is closed"):
                    await stream.result()

    on_loop("asyncio", main)


def live(scene: Scene) -> list[Submission]:
    """The requests that have not ended."""
    opening = scene.engine._life.opening
    assert opening is not None
    return opening.desk.live()


def fail_to_wake(*_: object) -> NoReturn:
    """Raise what a loop raises that was closed just now."""
    raise RuntimeError("Event loop is closed")


@contextlib.contextmanager
def reader_on_a_loop_of_its_own(stream: TokenStream) -> Iterator[asyncio.AbstractEventLoop]:
    """Read a stream on a loop in a thread, until that is stopped; then the loop is closed."""
    loop = asyncio.SelectorEventLoop()
    ring = loop.call_soon_threadsafe
    waiting = threading.Event()

    async def read() -> None:
        asyncio.get_running_loop().call_soon(waiting.set)  # when it waits
        async for _ in stream:
            pass

    def run() -> None:
        tasks = [loop.create_task(read())]  # dropped with the loop
        tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_forever()
        loop.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tasks.clear()
            collect_garbage()

    thread = threading.Thread(target=run)
    thread.start()
    waiting.wait(300)
    try:
        yield loop
    finally:
        with contextlib.suppress(RuntimeError):  # it is closed
            ring(loop.stop)
        thread.join(300)
