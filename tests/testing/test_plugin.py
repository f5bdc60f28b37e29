"""The pytest plugin, in a pytest run of its own: with every kind of async test, and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = 'pytest_plugins = ["asyncllm.testing.plugin"]\n'

GOOD = """
import asyncio
import pytest
from asyncllm.testing import ScriptedModel

def test_plain(scripted_engine):
    engine = scripted_engine({"ping": "pong"})
    assert asyncio.run(engine.generate("ping")).text == "pong"

def test_two_engines(scripted_engine):
    first, second = scripted_engine({}, default="1"), scripted_engine(default="2", kv_pool_tokens=64)
    assert [asyncio.run(engine.generate("x")).text for engine in (first, second)] == ["1", "2"]

@pytest.mark.asyncio
async def test_pytest_asyncio(scripted_engine):
    engine = scripted_engine(str.upper)
    assert (await engine.generate("ping")).text == "PING"
    async for token in engine.stream("dropped"):
        break

@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param

@pytest.mark.anyio
async def test_anyio(scripted_engine):
    assert (await scripted_engine({"a": "b"}).generate("a")).text == "b"

def test_a_held_step_does_not_hang_the_end(scripted_engine):
    model = ScriptedModel()
    engine = scripted_engine(model)
    held = model.hold_at_step()
    stream = engine.stream("x", max_tokens=20)
    held.wait_reached()

def test_a_failed_engine_is_closed(scripted_engine):
    model = ScriptedModel()
    engine = scripted_engine(model)
    model.fail_from_step(0, MemoryError())
    with pytest.raises(Exception, match="failed"):
        asyncio.run(engine.generate("x"))
"""

LEAKING = """
def test_leaves_a_request(scripted_engine):
    engine = scripted_engine()
    scripted_engine.kept = engine.stream("x", max_tokens=3000)
"""


def run_pytest(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests with the plugin, warnings as errors."""
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_it.py").write_text(test, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--timeout=300"]
    return subprocess.run(
        [*command, "-o", "asyncio_default_fixture_loop_scope=function", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_the_fixture_serves_every_kind_of_test(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, GOOD)
    assert "7 passed" in done.stdout, done.stdout + done.stderr


def test_a_test_that_leaves_a_request_fails_at_its_end_and_its_engine_is_closed(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, LEAKING)
    assert "1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "1 requests run and 0 wait" in done.stdout
