"""A stream whose reader stopped has at most `buffer_tokens` tokens unread, whichever steps fail beside it."""

from __future__ import annotations

import pytest

from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine
from helpers.loops import on_loop

BROKEN = RuntimeError("simulated: this step")
TOKENS = 12


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("buffer_tokens", [1, 2, 3])
@pytest.mark.parametrize("steps", [(1,), (2,), (3,), (4,), (2, 4), (3, 5), (4, 6), (2, 4, 6, 8)])
def test_the_buffer_is_filled_and_not_exceeded(steps: tuple[int, ...], buffer_tokens: int, overlap: bool) -> None:
    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, overlap=overlap) as engine:
            alone = [(await engine.generate([place], max_tokens=TOKENS)).token_ids for place in range(5)]
            engine.reset_prefix_cache()
            before = engine.stats().steps
            for step in steps:
                model.fail_at_step(before + step, BROKEN)
            with model.hold_at_step(before):  # until all are there: who is in which step is the same each time
                streams = [engine.stream([i], max_tokens=TOKENS, buffer_tokens=buffer_tokens) for i in range(4)]
                neighbour = engine.stream([4], max_tokens=TOKENS)
                await engine.check_integrity_async()
            assert (await neighbour.result()).token_ids == alone[4]
            while engine.stats().paused < len(streams):
                await engine.check_integrity_async()
            for _ in range(1000):  # a call is answered before what the turn has to tell is delivered, and between steps
                await engine.check_integrity_async()
                if sum(stream._mailbox.unread for stream in streams) >= buffer_tokens * len(streams):
                    break
            assert [stream._mailbox.unread for stream in streams] == [buffer_tokens] * len(streams)
            for stream, tokens in zip(streams, alone, strict=False):
                assert tuple([token.id async for token in stream]) == tokens
            check_nothing_left(engine)

    on_loop("asyncio", main)
