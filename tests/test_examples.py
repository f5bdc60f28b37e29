"""Each example, and each piece of code in the README, run as a user would run it."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import httpx
import nbclient
import nbformat
import pytest
import uvicorn

from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import ModuleType

    from conftest import TinyModel

    from helpers.warm_process import WarmProcess

ROOT: Final = Path(__file__).parents[1]
EXAMPLES: Final = ROOT / "examples"
HANG_GUARD_SECONDS: Final = 300

ADMISSION_TRACE: Final = """\
prefill 0 1 2 3 1 35 28
decode 0 1 2 3 1 31 24
decode 0 1 2 3 1 27 20
decode 0 1 2 3 1 23 16
decode 0 1 2 3 1 19 12
decode 0 1 2 3 1 15 8
decode 0 1 2 3 1 11 4
decode 0 1 2 3 1 7 0
prefill 4 0 59 7
decode 4 0 58 6
decode 4 0 57 5
decode 4 0 56 4
decode 4 0 55 3
decode 4 0 54 2
decode 4 0 53 1
decode 4 0 52 0
64 of 64 pages are free
"""


def run(*arguments: str | Path) -> str:
    """Run Python from its start; return what it printed. Anything on standard error is a failure."""
    command = [sys.executable, "-W", "error::ResourceWarning", *arguments]
    return output(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False))


def output(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a process printed. Anything on standard error is a failure."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


class RunScript(Protocol):
    """Runs a script in a process of its own."""

    def __call__(self, script: Path | str, *arguments: str | Path, stdin: str = "") -> str:
        """Return what it printed."""


@pytest.fixture
def script(warm_process: WarmProcess) -> RunScript:
    """Run a script, a file or its text, in a process of its own."""
    return lambda *arguments, stdin="": output(warm_process.run(*arguments, stdin=stdin))


@pytest.fixture(autouse=True)
def _with_demo_model(demo_gguf: Path) -> None:
    assert demo_gguf.is_file()


def test_every_example_is_short_and_tested_here() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.is_file():
            assert f'"{path.name}"' in tests, path
            if path.suffix == ".py":
                assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path


def test_stream_one() -> None:
    printed = run(EXAMPLES / "stream_one.py")
    assert printed.startswith("The capital of France is Paris")
    assert re.search(r"\d+ tokens, ended by (length|stop)\n$", printed)


def test_many_requests_shares_their_common_beginning(script: RunScript) -> None:
    lines = script(EXAMPLES / "many_requests.py", "12").splitlines()
    assert [line.partition(": ")[0] for line in lines[:2]] == ["Spain", "Germany"]
    assert len(lines) == 13
    assert int(re.findall(r"\d+", lines[-1])[2]) > 0


def test_cancel_and_timeout_gives_all_pages_back_each_time(script: RunScript) -> None:
    printed = script(EXAMPLES / "cancel_and_timeout.py")
    assert printed.count("running 0, owned pages 0, leased pages 0") == 4
    assert "CancelledError" in printed
    assert "the request's own timeout:" in printed


def test_chat_takes_turns_and_reuses_the_turns_before(script: RunScript) -> None:
    printed = script(EXAMPLES / "chat.py", stdin="Which city is the capital of France?\nAnd of Japan?\n")
    turns = [(int(cached), int(prompt)) for cached, prompt in re.findall(r"\[(\d+) of (\d+) prompt tokens", printed)]
    assert len(turns) == 2
    assert all(len(answer) > 10 for answer in printed.split("  [")[:2])  # words depend on how bfloat16 is rounded
    assert turns[1][0] >= turns[0][1]


def test_logprobs_prefers_the_right_answer_and_bans_it(script: RunScript) -> None:
    lines = script(EXAMPLES / "logprobs.py").splitlines()
    assert lines[0].endswith("The capital of France is Paris")
    assert lines[3].startswith("' Paris' [(")
    assert "Paris" not in lines[6]


def test_structured_gives_what_fits(script: RunScript) -> None:
    printed = script(EXAMPLES / "structured.py")
    assert "Recipe(name=" in printed
    assert re.search(r"minutes: [1-9]\d?; red: (yes|no); [1-9] \+ [1-9] = [1-9]\n$", printed)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_admission_trace_row_by_row(script: RunScript, tiny_model: TinyModel, architecture: str) -> None:
    printed = script(EXAMPLES / "admission_trace.py", tiny_model(architecture))
    assert printed.splitlines() == ADMISSION_TRACE.splitlines()


def test_my_app_passes_under_pytest() -> None:
    assert "3 passed" in run("-m", "pytest", "-p", "no:cacheprovider", EXAMPLES / "test_my_app.py")


def test_notebook_in_a_real_kernel() -> None:
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=HANG_GUARD_SECONDS, kernel_name="python3").execute()
    outputs = ["".join(map(str, cell.get("outputs", []))) for cell in book.cells]
    assert "Paris" in outputs[3]
    assert "CLOSED" in outputs[7]


@asynccontextmanager
async def serving(web_app: ModuleType) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the web app on a real socket, and give a client of it."""
    server = uvicorn.Server(uvicorn.Config(web_app.app, port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANG_GUARD_SECONDS) as client:
        yield client
    server.should_exit = True
    await task


async def idle(client: httpx.AsyncClient) -> dict[str, object]:
    """Wait until the app runs nothing, and return its health then."""
    while True:
        health: dict[str, object] = (await client.get("/health")).json()
        if health["running"] == 0:
            return health
        await asyncio.sleep(0.01)


@pytest.fixture
def web_app() -> ModuleType:
    """Import the example as a server does."""
    spec = importlib.util.spec_from_file_location("web_app", EXAMPLES / "web_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.asyncio
async def test_web_app_ends_the_request_of_a_client_that_disconnects(
    web_app: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server, a real client that goes away: the request ends long before its length, all pages come back."""
    tokens = 3000
    engine = scripted_engine(ScriptedModel(default="word " * tokens, step_seconds=0.01))
    monkeypatch.setattr(web_app, "engine", engine)
    async with serving(web_app) as client:
        async with client.stream("GET", "/", params={"prompt": "Hi", "max_tokens": tokens}) as response:
            assert response.status_code == 200
            assert "w" in await anext(response.aiter_text())
        assert (await idle(client))["owned_pages"] == 0
        check_nothing_left(engine)
        assert 0 < engine.stats().generated_tokens < tokens


@pytest.mark.asyncio
async def test_web_app_says_at_once_what_it_cannot_run(web_app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "engine", scripted_engine(default="word"))
    async with serving(web_app) as client:
        too_long = await client.get("/", params={"prompt": "Hi", "max_tokens": 10**9})
        assert (too_long.status_code, "1000000000" in too_long.text) == (400, True)
        assert (await client.get("/", params={"max_tokens": "many"})).status_code == 400
        assert (await client.get("/", params={"prompt": "Hi"})).text == "word"


@pytest.mark.asyncio
async def test_web_app_from_the_command_line() -> None:
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "web_app:app", "--port", "0"]
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, cwd=ROOT)
    assert server.stderr is not None
    log = ""
    while (found := re.search(r"running on (http://[\w.:]+)", log)) is None:
        line = await server.stderr.readline()
        assert line, log
        log += line.decode()
    async with httpx.AsyncClient(base_url=found[1], timeout=HANG_GUARD_SECONDS) as client:
        answer = await client.get("/", params={"prompt": "The capital of France is", "max_tokens": 6})
        assert "Paris" in answer.text
        async with client.stream("GET", "/", params={"max_tokens": 1000}) as response:
            await anext(response.aiter_text())
        assert await idle(client) == {"state": "running", "running": 0, "owned_pages": 0}
    server.send_signal(signal.SIGINT)
    assert await server.wait() == 0
    assert "Traceback" not in (await server.stderr.read()).decode()


def python_blocks() -> list[str]:
    """Return the README's pieces of Python."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", python_blocks(), ids=lambda code: code.splitlines()[0])
def test_the_code_in_the_readme_runs(script: RunScript, code: str) -> None:
    script(code)
