"""asyncllm: a task and a stream for each request."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from asyncllm import Engine
from benchmarks.workloads import Clock, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Work


def main(model: str, dtype: str, names: str, round_number: str) -> None:
    """Run the workloads once."""
    with Engine(model, dtype=dtype, device="cpu", kv_pool_tokens=32_768, max_running_requests=64) as engine:

        async def read(number: int, one: Work, clock: Clock) -> None:
            stream = engine.stream(one.prompt, max_tokens=one.new_tokens, temperature=0.0, ignore_eos=True)
            async with stream:
                async for _ in stream:
                    clock.token(number)

        async def gather(work: Sequence[Work], clock: Clock) -> None:
            await asyncio.gather(*(read(number, one, clock) for number, one in enumerate(work)))

        run("asyncllm", lambda work, clock: asyncio.run(gather(work, clock)), names.split(","), int(round_number))


if __name__ == "__main__":
    main(*sys.argv[1:])
