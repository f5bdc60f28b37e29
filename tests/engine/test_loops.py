"""Any event loop, several at once, one after another, or none; nothing of the process is changed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import trio
import uvloop

from asyncllm.errors import EngineError
from asyncllm.llm import LLM
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.engine import Engine


@pytest.fixture(name="engine")
def open_engine() -> Iterator[Engine]:
    with scripted_engine(ScriptedModel(next_token=HashedTokens())) as engine:
        yield engine
        check_nothing_left(engine)


async def tokens_of(engine: Engine, prompt: str = "same", max_tokens: int = 20) -> list[int]:
    async with engine.stream(prompt, max_tokens=max_tokens) as stream:
        return [token.id async for token in stream]


def test_one_engine_serves_loops_one_after_another_and_at_once(engine: Engine) -> None:
    """B92: a second `asyncio.run`, trio, uvloop, then two loops in two threads: the same tokens everywhere."""
    expected = asyncio.run(tokens_of(engine))
    assert asyncio.run(tokens_of(engine)) == expected
    assert trio.run(tokens_of, engine) == expected
    assert uvloop.run(tokens_of(engine)) == expected
    got: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: got.append(asyncio.run(tokens_of(engine)))),
        threading.Thread(target=lambda: got.append(trio.run(tokens_of, engine))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected, expected]


def test_a_stream_of_one_loop_is_read_to_its_end_on_another(engine: Engine) -> None:
    async def begin() -> list[int]:
        return [(await anext(stream)).id for _ in range(3)]

    stream = engine.stream("same", max_tokens=20)
    first = asyncio.run(begin())

    async def rest() -> list[int]:
        return [token.id async for token in stream]

    assert first + trio.run(rest) == asyncio.run(tokens_of(engine))


def test_only_the_stream_whose_reader_waits_on_a_closed_loop_ends() -> None:
    model = ScriptedModel(next_token=HashedTokens())
    held = model.hold_at_step(0)
    with scripted_engine(model) as engine:
        loop = asyncio.new_event_loop()
        lost = engine.stream("lost", max_tokens=50)
        task = loop.create_task(anext(lost))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()  # with a reader waiting on it
        other = engine.stream("other", max_tokens=30)
        held.release()
        got = []
        while (token := other.next_blocking()) is not None:
            got.append(token.id)
        assert len(got) == 30

        async def read_on() -> None:
            async for _ in lost:
                pass

        with pytest.raises(EngineError, match="loop"):
            asyncio.run(read_on())
        del task
        engine.drain()
        check_nothing_left(engine)


@pytest.mark.parametrize("runner", ["asyncio", "trio"])
def test_the_blocking_face_works_inside_a_running_loop(runner: str) -> None:
    """B94: as in a notebook's plain cell; nothing is patched."""

    async def main() -> list[str]:
        with LLM("scripted", backend=ScriptedModel({"p": "abc"})) as llm:
            return [c.text for c in llm.generate(["p", "p"])] + ["".join(str(t) for t in llm.stream("p"))]

    assert (asyncio.run(main()) if runner == "asyncio" else trio.run(main)) == ["abc"] * 3


def test_eight_threads_share_one_blocking_engine() -> None:
    """B99."""
    with LLM("scripted", backend=ScriptedModel(lambda prompt: prompt * 3)) as llm:
        got: dict[int, list[str]] = {}

        def work(number: int) -> None:
            got[number] = [c.text for c in llm.generate([f"{number}.{i};" for i in range(10)])]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {number: [f"{number}.{i};" * 3 for i in range(10)] for number in range(8)}


def test_a_hundred_tasks_share_one_engine(engine: Engine) -> None:
    async def main() -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(engine, f"task {number}", 10) for number in range(100)))

    together = asyncio.run(main())
    for number in (0, 37, 99):
        assert asyncio.run(tokens_of(engine, f"task {number}", 10)) == together[number]


def test_the_callers_loop_goes_on_while_a_step_runs() -> None:
    """B104: a heartbeat beats while the device holds a step: nothing of the engine runs on the caller's loop."""
    model = ScriptedModel({"p": "abc"})
    held = model.hold_at_step(1)

    async def main() -> None:
        beats = 0
        task = asyncio.ensure_future(engine.generate("p"))
        await held.reached()
        for _ in range(50):
            await asyncio.sleep(0.001)
            beats += 1
        assert beats == 50
        assert not task.done()
        held.release()
        assert (await task).text == "abc"

    with scripted_engine(model) as engine:
        asyncio.run(main())


def test_a_large_prompt_is_tokenized_off_the_callers_loop() -> None:
    """B103: the loop beats between the call and the first token of a prompt of a megabyte."""

    async def main() -> None:
        stream = engine.stream("x" * 1_000_000, max_tokens=2)
        beats = 0
        first = asyncio.ensure_future(anext(stream))
        while not first.done():
            await asyncio.sleep(0.001)
            beats += 1
        assert beats > 2  # a loop that is held up has one
        await stream.aclose()

    with scripted_engine(kv_pool_tokens=1_048_576, page_size=256, max_model_tokens=1_048_576, step_token_budget=65_536,
                         prefix_cache="none") as engine:  # fmt: skip
        asyncio.run(main())


def test_a_loop_that_closes_on_a_wake_up_leaves_its_stream_to_others() -> None:
    """The wake-up is accepted and never run, so no later one is tried, and nobody tells the engine."""
    model = ScriptedModel({"p": "abc"})
    held = model.hold_at_step(1)
    with scripted_engine(model) as engine:
        stream = engine.stream("p")
        gone = asyncio.new_event_loop()
        reader = gone.create_task(stream.result())

        def stop_on_a_wake_up() -> None:  # it comes while this runs, so it would run after this
            held.wait_reached()
            held.release()
            while not stream._mailbox.unread:
                engine.check_integrity()
            gone.stop()

        gone.call_soon(stop_on_a_wake_up)  # after the first turn of the reader, which waits then
        gone.run_forever()
        assert not reader.done()
        gone.close()
        reader._log_destroy_pending = False  # type: ignore[attr-defined]
        assert asyncio.run(stream.result()).text == "abc"


MODULE_LEVEL = """
import asyncio
from asyncllm.testing import scripted_engine

async def main():
    async with scripted_engine({"p": "abc"}) as engine:
        async with engine.stream("p") as stream:
            print("".join([str(token) async for token in stream]))

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["-c", "stdin", "file"])
def test_a_script_needs_no_main_guard(how: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """B97: module level, `python -c`, standard input: no child process runs, so none starts over."""
    if how == "-c":
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", MODULE_LEVEL], capture_output=True, text=True, check=False
        )
    elif how == "stdin":
        run = subprocess.run(
            [sys.executable, "-W", "error", "-"], input=MODULE_LEVEL, capture_output=True, text=True, check=False
        )
    else:
        script = tmp_path_factory.mktemp("script") / "script.py"
        script.write_text(MODULE_LEVEL)
        run = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "abc\n", "")
