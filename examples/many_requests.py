"""Answer many prompts at once, in order, with a progress bar: python examples/many_requests.py [how many].

They are computed together, step by step; the whole pages that all prompts begin with are computed once.
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import Engine, SamplingParams

SHARED = (
    "Countries and their capitals. France: Paris. Italy: Rome. Japan: Tokyo. Cuba: Havana. Kenya: Nairobi. "
    "Peru: Lima. India: New Delhi. Norway: Oslo. Canada: Ottawa. Chile: Santiago. Iran: Tehran. {}:"
)
COUNTRIES = ("Spain", "Germany", "Egypt", "Russia", "Greece", "China", "Portugal", "Austria")


async def main(count: int) -> None:
    """Print each prompt's answer and what the prefix cache saved."""
    countries = [COUNTRIES[index % len(COUNTRIES)] for index in range(count)]
    params = SamplingParams(max_tokens=8, stop=".")
    async with Engine("smollm2-135m-instruct", page_size=16) as engine:
        completions = await engine.generate_all(
            (SHARED.format(country) for country in countries), params, progress=True
        )
        for country, completion in zip(countries, completions, strict=True):
            print(f"{country}:{completion.text}")
        stats = engine.stats()
    print(f"{stats.generated_tokens} tokens in {stats.steps} steps, {stats.prefix_hit_tokens} prompt tokens cached")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
