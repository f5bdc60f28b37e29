"""Every way to stop early gives the KV pages back: python examples/cancel_and_timeout.py.

Leaving the block, cancelling the task, a timeout around it and a timeout of the request all end the request within
the steps already launched (at most two).
"""

from __future__ import annotations

import asyncio

from asyncllm import DeadlineExceededError, Engine

PROMPT = "Once upon a time"


async def read(engine: Engine, tokens: int) -> str:
    """Read some tokens of a long answer and leave."""
    text = ""
    async with engine.stream(PROMPT, max_tokens=1000, ignore_eos=True) as stream:
        async for token in stream:
            text += token.text
            if token.index + 1 == tokens:
                break
    return text


async def idle(engine: Engine) -> None:
    """Wait until nothing runs; show where the pages are."""
    while (stats := engine.stats()).running + stats.waiting:
        await asyncio.sleep(0.01)
    print(f"  running {stats.running}, owned pages {stats.owned_pages}, leased pages {stats.leased_pages}")


async def main() -> None:
    """Stop in four ways, and look at the pages after each."""
    async with Engine("smollm2-135m-instruct", kv_pool_tokens=4096) as engine:
        print("leave the block:", repr(await read(engine, 5)))
        await idle(engine)
        task = asyncio.create_task(read(engine, 1000))
        await read(engine, 3)
        task.cancel()
        print("cancel the task:", await asyncio.gather(task, return_exceptions=True))
        await idle(engine)
        try:
            async with asyncio.timeout(0.5):
                await engine.generate(PROMPT, max_tokens=1000, ignore_eos=True)
        except TimeoutError:
            print("a timeout around it: nothing is left")
        await idle(engine)
        try:
            await engine.generate(PROMPT, max_tokens=1000, ignore_eos=True, timeout=0.5)
        except DeadlineExceededError as error:
            print(f"the request's own timeout: {error.completion.usage.completion_tokens} tokens came in time")
        await idle(engine)


asyncio.run(main())
