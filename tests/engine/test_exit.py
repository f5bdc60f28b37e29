"""The interpreter's exit, Ctrl-C, and forks: exit code as expected, nothing on standard error but one warning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asyncllm.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Iterator

PREAMBLE = """
import asyncio, os, signal, sys, threading, time
from asyncllm.errors import EngineError
from asyncllm.llm import LLM
from asyncllm.testing import HashedTokens, ScriptedModel, scripted_engine
model = ScriptedModel(next_token=HashedTokens(), step_seconds=0.002)
engine = scripted_engine(model)
"""

HANG_SECONDS = 300


def run(body: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", PREAMBLE + body],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )


MOMENTS = {
    "idle": "engine.start_blocking()",
    "decoding": """
engine.start_blocking()
stream = engine.stream("p", max_tokens=1000)
stream.next_blocking()
""",
    "prefilling": """
engine.start_blocking()
stream = engine.stream([5] * 3000, max_tokens=100)
""",
    "tokenizing": """
engine.start_blocking()
stream = engine.stream("x" * 3000, max_tokens=100)
""",
    "with a reader on a dead loop": """
engine.start_blocking()
async def main():
    stream = engine.stream("p", max_tokens=1000)
    await anext(stream)
    global kept
    kept = stream
asyncio.run(main())
""",
    "in a reference cycle": """
engine.start_blocking()
engine.me = [engine]
""",
}


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let what is started here be interrupted: a shell has its background jobs, and theirs, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("moment", MOMENTS)
def test_exit_without_close_is_clean_and_says_so_once(moment: str) -> None:
    done = run(MOMENTS[moment], "-W", "always::ResourceWarning")
    assert done.returncode == 0
    warnings = [line for line in done.stderr.splitlines() if "ResourceWarning" in line]
    assert len(warnings) == 1, done.stderr
    assert "open at exit" in warnings[0]
    others = [line for line in done.stderr.splitlines() if "ResourceWarning" not in line and line.strip()]
    assert all(line.startswith("  ") for line in others), done.stderr  # the warning's source line


def test_exit_while_the_model_opens_is_clean() -> None:
    done = run(
        """
class Slow(ScriptedModel):
    def open(self, config, progress):
        while True:
            time.sleep(0.001)
            progress("waiting", 0, 1)

def start():
    try:
        engine.start_blocking()
    except EngineError:
        pass

engine = scripted_engine(Slow({"p": "abc"}))
threading.Thread(target=start, daemon=True).start()
time.sleep(0.2)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_in_a_blocking_call_aborts_its_requests_and_is_raised() -> None:
    done = run(
        """
llm = LLM("scripted", backend=model)
def interrupt(record):  # once all run, and the main thread waits for them
    if record.index == 100:
        os.kill(os.getpid(), signal.SIGINT)
llm.engine.add_step_listener(interrupt)
try:
    llm.generate([[i, 4] for i in range(50)], max_tokens=2000, progress=False)
except KeyboardInterrupt:
    print("interrupted")
while llm.engine.stats().running or llm.engine.stats().waiting:
    time.sleep(0.001)
print(len(llm.generate(["again"], max_tokens=3)[0].token_ids))
llm.close()
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n3\n", "")


def test_ctrl_c_in_asyncio_run_closes_the_engine_on_the_way_out() -> None:
    done = run(
        """
async def main():
    async with engine, engine.stream("p", max_tokens=4000) as stream:
        async for token in stream:
            if token.index == 20:
                os.kill(os.getpid(), signal.SIGINT)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print(engine.state.value)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_in_a_forked_child_every_call_raises_and_exit_is_quiet() -> None:
    done = run(
        """
engine.start_blocking()
stream = engine.stream("p", max_tokens=50)
stream.next_blocking()
pid = os.fork()
if pid == 0:
    refused = 0
    for call in (lambda: engine.stream("p"), engine.stats, lambda: engine.abort("x"), engine.check_integrity,
                 lambda: asyncio.run(engine.generate("p")), engine.start_blocking, engine.drain):
        try:
            call()
        except EngineError as error:
            refused += "fork" in str(error)
    del stream
    engine.close()
    print("refused", refused, flush=True)
    sys.exit(0)
print("child", os.waitpid(pid, 0)[1], flush=True)
while stream.next_blocking() is not None:
    pass
print("parent goes on", stream.finish_reason)
engine.close()
""",
        "-W",
        "ignore::DeprecationWarning",  # from Python 3.12 on, os.fork itself warns of any second thread
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["refused 7", "child 0", "parent goes on length"]


def test_the_command_line_stops_cleanly_on_ctrl_c_and_tells_a_wrong_model() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asyncllm", "hello", "--model", "/does/not/exist"],
        capture_output=True, text=True, check=False, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 1
    assert "/does/not/exist" in done.stderr
    assert "Traceback" not in done.stderr
    with subprocess.Popen([sys.executable, "-m", "asyncllm", "hello"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "loading" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(HANG_SECONDS) == 130
    assert "Traceback" not in rest


def test_the_command_line_tells_a_wrong_value_before_it_loads_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "--max-tokens", "-3", "--model", "/does/not/exist"]) == 1
    assert capsys.readouterr().err == "asyncllm: max_tokens must be an integer >= 1, not -3\n"
