"""Chat in the terminal: python examples/chat.py; an empty line or Ctrl-D ends it.

Each turn sends the whole conversation: the prefix cache answers for what was computed in the turns before.
"""

from __future__ import annotations

import asyncio

from asyncllm import Conversation, Engine


async def ask() -> str:
    """Read a line without blocking the event loop."""
    try:
        return await asyncio.to_thread(input, "> ")
    except EOFError:
        return ""


async def main() -> None:
    """Take turns until there is nothing more to say."""
    async with Engine("smollm2-135m-instruct") as engine:
        talk = Conversation(engine)
        while text := await ask():
            async with talk.send(text, max_tokens=100) as stream:
                async for token in stream:
                    print(token, end="", flush=True)
            usage = (await stream.result()).usage
            print(f"  [{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached]")


asyncio.run(main())
