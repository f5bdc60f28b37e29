"""Test your own app in milliseconds, without weights: python -m pytest examples/test_my_app.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from asyncllm import Engine, PromptTooLongError, RequestFailedError
from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STORY = "A fox. " + "It jumps over the dog. " * 40


async def first_sentence(engine: Engine, prompt: str, max_tokens: int = 1000) -> str:
    """Stop reading at the first full stop: this is the app under test."""
    text = ""
    async with engine.stream(prompt, max_tokens=max_tokens, buffer_tokens=16) as stream:
        async for token in stream:
            text += token.text
            if "." in text:
                break
    return text.partition(".")[0] + "."


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    """Give an engine that answers by script, with the queue, pages, streams and errors of a real one."""
    model = ScriptedModel({"Who?": STORY, "Broken?": "Never seen."})
    model.not_finite_at("Broken?", token=3)
    async with scripted_engine(model) as opened:
        yield opened
        check_nothing_left(opened)


@pytest.mark.asyncio
async def test_the_rest_of_the_answer_is_not_generated(engine: Engine) -> None:
    assert await first_sentence(engine, "Who?") == "A fox."
    assert engine.stats().generated_tokens <= len("A fox.") + 16 < len(STORY)


@pytest.mark.asyncio
async def test_what_can_never_fit_is_refused_at_the_call(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError, match="1000000"):
        await first_sentence(engine, "Who?", max_tokens=1_000_000)


@pytest.mark.asyncio
async def test_a_request_that_fails_fails_alone(engine: Engine) -> None:
    with pytest.raises(RequestFailedError):
        await first_sentence(engine, "Broken?")
    assert await first_sentence(engine, "Who?") == "A fox."
