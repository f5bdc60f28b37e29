"""The work that engines are compared on: prompts are token ids, greedy, EOS ignored, all requests at once.

Runs in each engine's own process and interpreter, so it imports the standard library only. Lengths of a workload are
the same in every round, ids are not: what a cache kept from an earlier round answers nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VOCAB_SIZE = 49_152
FIRST_ID = 100  # below are special tokens

NAMES = ("W1", "W2", "W3", "W4")
MEANING = {
    "W1": "1 request, 64 prompt tokens, 64 new",
    "W2": "8 requests, 32 to 128 prompt tokens, 64 new",
    "W3": "16 requests, 512 shared and 16 own prompt tokens, 32 new",
    "W4": "32 requests, 16 to 256 prompt tokens, 16 to 128 new",
}


@dataclasses.dataclass(frozen=True)
class Work:
    """One request: its prompt's ids and how many tokens to generate."""

    prompt: list[int]
    new_tokens: int


def workload(name: str, round_number: int) -> list[Work]:
    """Draw a workload's requests."""
    sizes = random.Random(f"asyncllm-{name}")
    ids = random.Random(f"asyncllm-{name}-{round_number}")

    def draw(count: int) -> list[int]:
        return [ids.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(count)]

    if name == "W1":
        return [Work(draw(64), 64)]
    if name == "W2":
        return [Work(draw(sizes.randint(32, 128)), 64) for _ in range(8)]
    if name == "W3":
        shared = draw(512)
        return [Work(shared + draw(16), 32) for _ in range(16)]
    if name == "W4":
        return [Work(draw(sizes.randint(16, 256)), sizes.randint(16, 128)) for _ in range(32)]
    raise KeyError(name)


class Clock:
    """Notes when each token of each request came."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = work
        self._times: list[list[float]] = [[] for _ in work]
        self._started = time.perf_counter()

    def token(self, request: int, count: int = 1) -> None:
        """`count` tokens of a request came now."""
        self._times[request] += [time.perf_counter()] * count

    def figures(self) -> dict[str, float]:
        """Sum up; raises ValueError if a request got another number of tokens than asked for."""
        for times, work in zip(self._times, self._work, strict=True):
            if len(times) != work.new_tokens:
                raise ValueError(f"{len(times)} tokens came of {work.new_tokens}")
        firsts = [times[0] - self._started for times in self._times]
        gaps = [later - earlier for times in self._times for earlier, later in itertools.pairwise(times)]
        seconds = max(times[-1] for times in self._times) - self._started
        return {
            "tokens_per_second": sum(map(len, self._times)) / seconds,
            "ttft_mean_ms": 1e3 * statistics.mean(firsts),
            "itl_mean_ms": 1e3 * statistics.mean(gaps),
            "itl_p95_ms": 1e3 * sorted(gaps)[int(0.95 * (len(gaps) - 1))],
        }


def run(engine: str, serve: Callable[[Sequence[Work], Clock], None], names: Sequence[str], round_number: int) -> None:
    """Warm up, then print a JSON line a workload. `serve` runs the requests and tells the clock of each token."""
    warm_up = workload("W2", 1000 + round_number)
    serve(warm_up, Clock(warm_up))
    for name in names:
        work = workload(name, round_number)
        clock = Clock(work)
        serve(work, clock)
        print(json.dumps({"engine": engine, "workload": name, "round": round_number, **clock.figures()}), flush=True)
