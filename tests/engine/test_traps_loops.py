"""Traps of event loops and of memory (known from other engines): policies, suites of tests, web apps, lazy batches."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel
import pytest
from starlette.responses import StreamingResponse

from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine
from helpers.loops import HANG_GUARD_SECONDS, on_loop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from asyncllm import Engine

POLICY: Final = """
import asyncio, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of the policy's getter, in newer Pythons
before = asyncio.get_event_loop_policy()
from asyncllm import LLM, Engine
from asyncllm.testing import ScriptedModel
Engine("never opened")
with LLM("scripted", backend=ScriptedModel({"p": "abc"})) as llm:
    print(llm.generate("p", progress=False)[0].text)
assert asyncio.get_event_loop_policy() is before
try:
    asyncio.get_running_loop()
except RuntimeError:
    print("no loop")
print(*{"nest_asyncio", "uvloop", "trio"} & set(sys.modules))
"""

SUITE: Final = """
import pytest, pytest_asyncio
from asyncllm.testing import ScriptedModel, scripted_engine

@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine():
    async with scripted_engine(ScriptedModel({"p": "abc"})) as engine:
        yield engine

@pytest.mark.parametrize("time", range(2))
@pytest.mark.asyncio(loop_scope="function")
async def test_on_a_loop_of_its_own(engine, time):
    assert (await engine.generate("p")).text == "abc"

@pytest.mark.asyncio(loop_scope="module")
async def test_on_the_modules_loop(engine):
    assert "".join([str(token) async for token in engine.stream("p")]) == "abc"

@pytest.mark.asyncio(loop_scope="session")
async def test_on_the_sessions_loop(engine):
    assert [str(each) for each in await engine.generate_all(["p", "p"])] == ["abc", "abc"]

@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.anyio
async def test_on_anyios_loops(engine, anyio_backend):
    assert (await engine.generate("p")).text == "abc"

def test_without_a_loop(engine):
    stream = engine.stream("p")
    assert stream.next_blocking().text == "a"
    stream.close()
"""


def test_no_loop_policy_is_set_and_no_loop_is_needed() -> None:
    """B93: at import, at construction, and while an engine runs."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", POLICY],
        capture_output=True, text=True, check=False, timeout=HANG_GUARD_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "abc\nno loop\n\n", "")


def test_one_engine_of_a_session_serves_tests_on_loops_of_every_scope(tmp_path: Path) -> None:
    """B101."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-o", "asyncio_default_fixture_loop_scope=function", tmp_path],
        capture_output=True, text=True, check=False, timeout=HANG_GUARD_SECONDS, cwd=tmp_path,
    )  # fmt: skip
    assert "7 passed" in done.stdout, done.stdout + done.stderr


async def until_idle(engine: Engine) -> None:
    """Let the loop run until nothing runs any more, then check that nothing is left."""
    with anyio.fail_after(HANG_GUARD_SECONDS):
        while engine.stats().running or engine.stats().waiting:
            await engine.check_integrity_async()
            await anyio.lowlevel.checkpoint()
    check_nothing_left(engine)


async def wrapped(engine: Engine) -> AsyncGenerator[str, None]:
    """Wrap a stream as a web app does."""
    async with engine.stream([1, 2, 3], max_tokens=3000) as stream:
        async for token in stream:
            yield str(token)


@pytest.mark.parametrize(("library", "closed"), [("asyncio", False), ("asyncio", True), ("trio", True)])
def test_a_callers_own_generator_that_is_cancelled_at_its_yield_ends_the_request(library: str, closed: bool) -> None:
    """If nobody closes it, asyncio does when it is dropped. Trio would only warn of it."""

    async def main() -> None:
        async with scripted_engine(ScriptedModel()) as engine:
            reading = anyio.Event()

            async def consume() -> None:
                pieces = wrapped(engine)
                async with contextlib.aclosing(pieces) if closed else contextlib.nullcontext():
                    async for _ in pieces:
                        reading.set()
                        await anyio.sleep_forever()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                await reading.wait()
                tasks.cancel_scope.cancel()
            await until_idle(engine)

    on_loop(library, main)


def test_a_browser_that_goes_away_ends_its_request() -> None:
    """Under Starlette, which cancels the response while its generator waits for a token or stands at its yield."""

    async def main() -> None:
        async with scripted_engine(ScriptedModel()) as engine:
            sent = asyncio.Event()

            async def send(message: dict[str, object]) -> None:
                if message.get("body"):
                    sent.set()
                    await asyncio.sleep(0)

            async def receive() -> dict[str, object]:
                await sent.wait()
                return {"type": "http.disconnect"}

            scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
            await StreamingResponse(wrapped(engine))(scope, receive, send)  # type: ignore[arg-type]  # mappings
            assert engine.stats().generated_tokens < 3000
            await until_idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize("window", [1, 4])
def test_prompts_of_a_batch_are_taken_as_there_is_room(window: int) -> None:
    """B108: at most twice `max_running_requests` ahead of what has ended, and nothing is held of what has."""

    async def main() -> None:
        async with scripted_engine(ScriptedModel(), max_running_requests=window) as engine:
            taken = ended = 0

            def prompts() -> Iterator[list[int]]:
                nonlocal taken
                for place in range(40):
                    taken += 1
                    assert taken - ended <= 2 * window
                    yield [place]

            async for _ in engine.stream_all(prompts(), max_tokens=2, ignore_eos=True):
                ended += 1
            assert ended == 40
            check_nothing_left(engine)

    asyncio.run(main())
