"""How long an engine keeps its caller's event loop waiting: the largest gap between a heartbeat's beats.

    python -m benchmarks.loop_lag [--model smollm2-135m-instruct] [--rounds 3] [--device auto]

Phases: importing torch and the model code (the interpreter's own import lock and C extensions' initialisation: nobody
can keep that from a loop), loading once they are imported, tokenizing a prompt of 1 MB, prefill of a long prompt,
decode at one and at 64 streams, close. A gap's floor is the same heartbeat beside nothing at all, `idle`. Prints a
JSON line a round and phase, then a table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from typing import TYPE_CHECKING

import asyncllm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BEAT_SECONDS = 0.001
LONG_TEXT_BYTES = 1_000_000
PROMPT_TOKENS = 4096
STREAMS = 64
TOKENS = 64


class Heartbeat:
    """A task that sleeps a millisecond at a time; records how late it wakes, by phase."""

    def __init__(self) -> None:
        self.gaps: dict[str, list[float]] = {}

    @contextlib.asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        """Measure what runs inside."""
        gaps = self.gaps.setdefault(name, [])
        task = asyncio.create_task(self._beat(gaps))
        await asyncio.sleep(0)
        try:
            yield
        finally:
            await asyncio.sleep(2 * BEAT_SECONDS)  # a gap that has begun is seen to its end
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _beat(self, gaps: list[float]) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(BEAT_SECONDS)
            gaps.append(time.perf_counter() - before - BEAT_SECONDS)


async def read(engine: asyncllm.Engine, prompt: list[int], tokens: int) -> None:
    """Read one stream to its end."""
    async with engine.stream(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0) as stream:
        async for _token in stream:
            pass


async def measure(options: argparse.Namespace, heart: Heartbeat) -> None:
    """Go through all phases once."""
    settings = {"model": options.model, "device": options.device, "max_running_requests": STREAMS}
    async with heart.phase("idle"):
        await asyncio.sleep(1.0)
    engine = asyncllm.Engine(**settings)
    async with heart.phase("first start (imports torch)"):
        await engine.start()
    await engine.aclose()
    engine = asyncllm.Engine(**settings)
    async with heart.phase("load"):
        await engine.start()
    try:
        async with heart.phase("tokenize 1 MB"):
            with contextlib.suppress(asyncllm.PromptTooLongError):  # what matters has been done by then
                await engine.generate("The quick brown fox, 12 times. " * (LONG_TEXT_BYTES // 31), max_tokens=1)
        async with heart.phase(f"prefill {PROMPT_TOKENS} tokens"):
            await read(engine, [5 + i % 1000 for i in range(PROMPT_TOKENS)], 1)
        async with heart.phase("decode, 1 stream"):
            await read(engine, list(range(5, 69)), TOKENS)
        async with heart.phase(f"decode, {STREAMS} streams"):
            await asyncio.gather(*(read(engine, [5 + i, *range(5, 69)], TOKENS) for i in range(STREAMS)))
    finally:
        async with heart.phase("close"):
            await engine.aclose()


def main() -> None:
    """Run the rounds, the first of which imports torch, and print the table."""
    parser = argparse.ArgumentParser(description="The largest gaps in a caller's event loop.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    worst: dict[str, list[float]] = {}
    typical: dict[str, list[float]] = {}
    for number in range(options.rounds):
        heart = Heartbeat()
        asyncio.run(measure(options, heart))
        for phase, gaps in heart.gaps.items():
            imports = phase.startswith("first")
            if imports and number:
                continue
            worst.setdefault(phase, []).append(max(gaps) * 1e3)
            typical.setdefault(phase, []).append(statistics.median(gaps) * 1e3)
            print(
                json.dumps({"round": number, "phase": phase, "worst_ms": max(gaps) * 1e3, "beats": len(gaps)}),
                flush=True,
            )
    print(f"\n{'phase':32}{'worst gap, ms':>15}{'median worst':>14}{'typical':>9}")
    for phase, values in worst.items():
        print(f"{phase:32}{max(values):15.1f}{statistics.median(values):14.1f}{statistics.median(typical[phase]):9.2f}")


if __name__ == "__main__":
    main()
