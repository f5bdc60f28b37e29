"""Watch admission work, step by step: python examples/admission_trace.py [model].

A pool of 64 tokens; a request starts only when its whole worst case fits. Four of five do (12 + 12 + 11 + 22 = 57
tokens); the fifth needs 12 more and waits until they have ended. Each line: what the step did, the requests in it,
then how many wait, free pages while it runs, tokens that running requests may still need after it.
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import Engine, SamplingParams, StepRecord

PROMPT_TOKENS = (5, 5, 4, 15, 5)


async def main(model: str) -> None:
    """Run the five requests and print a line for each step."""
    engine = Engine(
        model, kv_pool_tokens=64, page_size=1, prefix_cache="none", max_running_requests=8, overlap=False, cpu_threads=1
    )
    numbers: dict[str, int] = {}  # requests are numbered in the order in which they start

    def show(step: StepRecord) -> None:
        rows = " ".join(str(numbers.setdefault(name, len(numbers))) for name in step.request_ids)
        print(step.kind, rows, step.waiting, step.free_pages, step.reserved_tokens)

    async with engine:
        engine.add_step_listener(show)
        prompts = [
            [10 * number + position for position in range(tokens)] for number, tokens in enumerate(PROMPT_TOKENS)
        ]
        await engine.generate_all(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        await engine.check_integrity_async()
        stats = engine.stats()
    print(f"{stats.free_pages} of {stats.total_pages} pages are free")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"))
