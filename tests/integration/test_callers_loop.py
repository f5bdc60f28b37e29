"""The caller's loop goes on while the engine loads the demo model, tokenizes, prefills and decodes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import torch  # noqa: F401 - the import holds every thread up for its own time, which is not the engine's to change

import asyncllm

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

LEAST_BEATS = 10  # of a millisecond each; every phase takes many times that, and a loop that is held up has 0 or 1


async def beats_during(work: Coroutine[object, object, object]) -> int:
    """Count a heartbeat's beats until `work` is done."""
    task, beats = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0.001)
        beats += 1
    await task
    return beats


async def generate_too_much(engine: asyncllm.Engine) -> None:
    """Have a prompt of a megabyte tokenized; it fits no context."""
    with contextlib.suppress(asyncllm.PromptTooLongError):
        await engine.generate("A fox, 12 dogs. " * 65_536, max_tokens=1)


async def main(model: Path) -> dict[str, int]:
    engine = asyncllm.Engine(model, dtype="float32", kv_pool_tokens=4096)
    prompt = [5 + i % 997 for i in range(2048)]
    beats = {"load": await beats_during(engine.start())}
    try:
        beats["tokenize"] = await beats_during(generate_too_much(engine))
        beats["prefill"] = await beats_during(engine.generate(prompt, max_tokens=1))
        beats["decode"] = await beats_during(engine.generate(prompt[:8], max_tokens=16, ignore_eos=True))
    finally:
        await engine.aclose()
    return beats


@pytest.fixture(scope="module")
def beats(demo_gguf: Path) -> dict[str, int]:
    """The beats of one run."""
    return asyncio.run(main(demo_gguf))


@pytest.mark.parametrize("phase", ["load", "tokenize", "prefill", "decode"])
def test_a_heartbeat_beats_while_the_engine_works(beats: dict[str, int], phase: str) -> None:
    assert beats[phase] >= LEAST_BEATS
