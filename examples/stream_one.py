"""Stream one answer to the terminal: python examples/stream_one.py [prompt].

No `__main__` guard and nothing to set up: the engine is a thread of this process.
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import Engine


async def main(prompt: str) -> None:
    """Print the prompt and what the model makes of it, token by token."""
    async with Engine("smollm2-135m-instruct") as engine:
        print(prompt, end="", flush=True)
        async with engine.stream(prompt, max_tokens=40) as stream:
            async for token in stream:
                print(token, end="", flush=True)
        completion = await stream.result()
    print(f"\n\n{completion.usage.completion_tokens} tokens, ended by {completion.finish_reason}")


asyncio.run(main(" ".join(sys.argv[1:]) or "The capital of France is"))
