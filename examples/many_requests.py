"""Answer many prompts at once, in order, with a progress bar: python examples/many_requests.py [how many].

They are computed together, step by step; the beginning that all prompts share is computed once.
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import Engine, SamplingParams

SHARED = "Answer with one word. Question: What colour is {}? Answer:"
THINGS = ("snow", "grass", "the sky", "blood", "coal", "a lemon", "an orange", "chocolate")


async def main(count: int) -> None:
    """Print each prompt's answer and what the prefix cache saved."""
    things = [THINGS[index % len(THINGS)] for index in range(count)]
    params = SamplingParams(max_tokens=8, stop=["\n", "."])
    async with Engine("smollm2-135m-instruct") as engine:
        completions = await engine.generate_all((SHARED.format(thing) for thing in things), params, progress=True)
        for thing, completion in zip(things, completions, strict=True):
            print(f"{thing}:{completion.text}")
        stats = engine.stats()
    print(f"{stats.generated_tokens} tokens in {stats.steps} steps, {stats.prefix_hit_tokens} prompt tokens cached")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
