"""Test what you build on asyncllm, in milliseconds, without weights or a GPU.

A scripted model answers as a test says, through the real engine: its queue, pages, streams and errors.

    async def test_my_app():
        async with scripted_engine({"ping": "pong"}) as engine:
            assert (await engine.generate("ping")).text == "pong"

Or, with `pytest_plugins = ["asyncllm.testing.plugin"]`, take the fixture `scripted_engine`.
"""

from asyncllm.testing.engines import check_nothing_left, scripted_engine
from asyncllm.testing.faults import HeldStep
from asyncllm.testing.script import HashedTokens, NextToken, Replies, Reply
from asyncllm.testing.scripted_model import ScriptedModel

__all__ = [
    "HashedTokens",
    "HeldStep",
    "NextToken",
    "Replies",
    "Reply",
    "ScriptedModel",
    "check_nothing_left",
    "scripted_engine",
]
