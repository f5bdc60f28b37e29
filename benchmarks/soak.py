"""Whether an engine loses, leaks or mixes up anything under a load of callers that behave badly.

    python -m benchmarks.soak [--model scripted] [--requests 100000 | --seconds 60] [--users 64] [--seed 0]

Waves of requests of random lengths with common prefixes, each a burst of all users and then an idle gap. Of the
callers 40% leave early, in one of six ways, some have a timeout, read slowly, or pass arguments that cannot be
served. On the scripted model steps raise, run out of memory, and rows' logits are not finite, too, and every token is
compared with what the model says to its prompt alone; other models' whole answers are compared with the first of the
same prompt. After each wave nothing may be left: no page, no request, no object of one.

Prints a JSON line a tenth of the run, then a table; exits with 1 if anything was lost, leaked or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import logging
import random
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

import asyncllm
from asyncllm.request import Request
from asyncllm.submission import Submission
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left
from asyncllm.testing.engines import collect_garbage

if TYPE_CHECKING:
    from asyncllm import Engine, TokenStream

BAD_ARGUMENTS: Final[tuple[dict[str, object], ...]] = (
    {"max_tokens": -1},
    {"temperature": float("nan")},
    {"top_p": 2},
    {"max_tokens": 10**9},
    {"stop": [""]},
    {"timeout": -1},
    {"buffer_tokens": 0},
    {"request_id": ""},
    {"priority": 0.5},
)
WAYS_TO_LEAVE: Final = ("break", "close", "abort", "cancel", "timeout", "drop")
BROKEN: Final = RuntimeError("simulated: this step")
PAGE_BYTES: Final = 4096


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """What happened."""

    requests: int = 0
    tokens: int = 0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    leaks: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # requests so far, bytes
    worst_lag_seconds: float = 0.0
    seconds: float = 0.0

    def bytes_per_request(self) -> float:
        """The slope of resident memory over the second half of the run, by least squares."""
        half = self.memory[len(self.memory) // 2 :]
        if len(half) < 2:
            return 0.0
        mean_x = sum(x for x, _ in half) / len(half)
        mean_y = sum(y for _, y in half) / len(half)
        return sum((x - mean_x) * (y - mean_y) for x, y in half) / sum((x - mean_x) ** 2 for x, _ in half)

    def row(self) -> dict[str, object]:
        """The figures, as JSON has them."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "outcomes": dict(sorted(self.outcomes.items())),
            "faults": dict(sorted(self.faults.items())),
            "wrong": len(self.wrong),
            "leaks": len(self.leaks),
            "bytes_per_request": round(self.bytes_per_request(), 2),
            "resident_mb": round(self.memory[-1][1] / 2**20, 1) if self.memory else None,
            "worst_lag_ms": round(1e3 * self.worst_lag_seconds, 1),
            "seconds": round(self.seconds, 1),
        }


class Soak:
    """One engine and its callers.

    Args:
        engine: open.
        model: the scripted model below it; None: another one, whose steps do not fail.
        users: callers at once.
        wave: requests between two idle gaps.
        seed: of lengths and of what callers do.
        vocabulary: prompts' ids are below.
    """

    def __init__(
        self, engine: Engine, model: ScriptedModel | None, *, users: int, wave: int, seed: int, vocabulary: int
    ) -> None:
        self.report = Report()
        self._engine = engine
        self._model = model
        self._users = users
        self._wave = wave
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self._stems = [self._ids(self._random.randrange(8, 100)) for _ in range(8)]
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._guilty: set[tuple[int, ...]] = set()
        self._left = 0
        gc.collect()
        self._kept_before = count_objects()

    async def run(self, *, requests: int | None, seconds: float | None) -> Report:
        """Run waves until so many requests, or so many seconds, are over."""
        report, began = self.report, time.perf_counter()
        lag = asyncio.create_task(self._watch_lag())
        told = 0
        while (requests is None or report.requests < requests) and (seconds is None or report.seconds < seconds):
            self._left = self._wave if requests is None else min(self._wave, requests - report.requests)
            self._inject()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._users):
                    tasks.create_task(self._user())
            self._check()
            await asyncio.sleep(self._random.choice([0.0, 0.001, 0.02]))
            report.seconds = time.perf_counter() - began
            done = report.requests / requests if requests else report.seconds / (seconds or 1.0)
            if int(10 * done) > told:
                told = int(10 * done)
                print(json.dumps(report.row()), flush=True)
        lag.cancel()
        return report

    # -- callers ---------------------------------------------------------------------------------------------

    async def _user(self) -> None:
        while self._left > 0:
            self._left -= 1
            self.report.requests += 1
            draw = self._random.random()
            if draw < 0.05:
                self._ask_badly()
                continue
            prompt = self._prompt()
            options = {"max_tokens": self._random.randrange(1, 40), "ignore_eos": True, "temperature": 0}
            if draw < 0.45:
                await self._leave(prompt, options)
            elif draw < 0.5:
                await self._read(prompt, options, "timed out", timeout=self._random.random() * 0.01)
            elif draw < 0.55:
                await self._read(prompt, options, "read slowly", buffer_tokens=self._random.randrange(1, 6))
            else:
                await self._read(prompt, options, "read")

    def _ask_badly(self) -> None:
        try:
            self._engine.stream([1, 2, 3], **self._random.choice(BAD_ARGUMENTS))  # type: ignore[arg-type]
        except asyncllm.RequestError:
            self.report.outcomes["refused"] += 1
        else:
            self.report.wrong.append("a bad argument was taken")

    async def _read(self, prompt: tuple[int, ...], options: dict[str, int], kind: str, **more: float) -> None:
        tokens: list[int] = []
        try:
            async with self._engine.stream(prompt, **options, **more) as stream:  # type: ignore[arg-type]
                async for token in stream:
                    tokens.append(token.id)
                    if "buffer_tokens" in more:
                        await asyncio.sleep(self._random.random() * 0.002)
        except asyncllm.DeadlineExceededError:
            self._note(kind, prompt, tokens, whole=False)
        except asyncllm.RequestFailedError as error:
            self.report.outcomes["failed"] += 1
            if not self._may_fail(prompt):
                self.report.wrong.append(f"an innocent request failed: {error!r}")
        else:
            self._note("read" if kind == "timed out" else kind, prompt, tokens, whole=True)
            if len(tokens) != options["max_tokens"]:
                self.report.wrong.append(f"{len(tokens)} tokens of {options['max_tokens']}")

    async def _leave(self, prompt: tuple[int, ...], options: dict[str, int]) -> None:
        way = self._random.choice(WAYS_TO_LEAVE)
        reads = self._random.randrange(0, 12)
        tokens: list[int] = []
        try:
            await self._leave_by(way, self._engine.stream(prompt, **options), reads, tokens)  # type: ignore[arg-type]
        except asyncllm.RequestFailedError as error:
            if not self._may_fail(prompt):
                self.report.wrong.append(f"an innocent request failed: {error!r}")
        self._note(f"left by {way}", prompt, tokens, whole=False)

    async def _leave_by(self, way: str, stream: TokenStream, reads: int, tokens: list[int]) -> None:
        async def read() -> None:
            async for token in stream:
                tokens.append(token.id)
                if way not in {"cancel", "timeout"} and len(tokens) > reads:
                    break

        if way == "cancel":
            task = asyncio.create_task(read())
            for _ in range(reads):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif way == "timeout":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._random.random() * 0.005):
                    await read()
        else:
            if reads:
                await read()
            if way == "abort":
                stream.abort()
            elif way != "drop":
                await stream.aclose()

    def _note(self, kind: str, prompt: tuple[int, ...], tokens: list[int], *, whole: bool) -> None:
        self.report.outcomes[kind] += 1
        self.report.tokens += len(tokens)
        if self._model is not None:
            expected = self._says(prompt, len(tokens))
        else:
            known = self._known.get(prompt, ())
            if whole and len(tokens) > len(known):
                self._known[prompt] = tuple(tokens)
            expected = known[: len(tokens)]
        if tuple(tokens[: len(expected)]) != expected:
            self.report.wrong.append(f"other tokens than alone: {tokens} for {prompt}")

    # -- the load --------------------------------------------------------------------------------------------

    def _may_fail(self, prompt: tuple[int, ...]) -> bool:
        """Whether it is one whose logits were arranged not to be finite, or begins as such a one does."""
        return any(prompt[: len(guilty)] == guilty for guilty in self._guilty)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(32, self._vocabulary) for _ in range(count))

    def _prompt(self) -> tuple[int, ...]:
        stem = self._random.choice(self._stems)
        if self._model is None and self._random.random() < 0.5:
            return stem  # again and again, to be compared
        return (*stem[: self._random.randrange(len(stem))], *self._ids(self._random.randrange(1, 4)))

    @staticmethod
    def _says(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        hashed = HashedTokens()
        tokens = list(prompt)
        for _ in range(min(count, 8)):  # a wrong page shows in the very next token
            tokens.append(hashed(tokens))
        return tuple(tokens[len(prompt) :])

    def _inject(self) -> None:
        """Arrange for a fault in the wave that begins."""
        if self._model is None or self._random.random() < 0.3:
            return
        kind = self._random.choice(["a step raises", "not finite", "no memory"])
        self.report.faults[kind] += 1
        if kind == "not finite":
            prompt = self._prompt()
            self._guilty.add(prompt)
            self._model.not_finite_at(prompt, self._random.randrange(3))
        else:
            self._model.fail_at_step(None, BROKEN if kind == "a step raises" else MemoryError("simulated"))

    # -- what is left ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Look for what the wave has left."""
        collect_garbage()
        try:
            check_nothing_left(self._engine)
        except (AssertionError, asyncllm.IntegrityError) as error:
            self.report.leaks.append(str(error))
        collect_garbage()
        kept = count_objects() - self._kept_before
        if kept > 2:  # the engine thread's own variables may hold the last one
            self.report.leaks.append(f"{kept} objects of requests are left")
        self.report.memory.append((self.report.requests, resident_bytes()))

    async def _watch_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.report.worst_lag_seconds = max(self.report.worst_lag_seconds, time.perf_counter() - before - 0.001)


def count_objects() -> int:
    """Count what there is of requests in the process."""
    return sum(type(each) in {Request, Submission} for each in gc.get_objects())


def resident_bytes() -> int:
    """Return how much memory the process has; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * PAGE_BYTES if statm.exists() else 0


async def soak(
    model: str, *, requests: int | None, seconds: float | None, users: int, wave: int, seed: int, checks: bool
) -> Report:
    """Open an engine, load it, close it."""
    scripted = ScriptedModel() if model == "scripted" else None
    engine = asyncllm.Engine(
        model,
        backend=scripted,
        seed=seed,
        max_running_requests=32,
        min_prefill_chunk=32,
        kv_pool_tokens=2048,
        page_size=8,
        pause_grace_seconds=0.001,
        debug_checks=checks,
        device="auto" if scripted else "cpu",
        dtype="auto" if scripted else "float32",  # in which neighbours change nothing
    )
    async with engine:
        vocabulary = 127 if scripted else 1000
        return await Soak(engine, scripted, users=users, wave=wave, seed=seed, vocabulary=vocabulary).run(
            requests=requests, seconds=seconds
        )


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="scripted", help='a name or folder; "scripted" needs no weights')
    parser.add_argument("--requests", type=int, help="stop after so many")
    parser.add_argument("--seconds", type=float, help="stop after so long; 60 if neither is given")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--wave", type=int, default=1000, help="requests between two idle gaps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--debug-checks", action="store_true", help="check the pages after every step")
    given = parser.parse_args()
    logging.getLogger("asyncllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", ResourceWarning)
    seconds = 60.0 if given.seconds is None and given.requests is None else given.seconds
    report = asyncio.run(
        soak(
            given.model,
            requests=given.requests,
            seconds=seconds,
            users=given.users,
            wave=given.wave,
            seed=given.seed,
            checks=given.debug_checks,
        )
    )
    for name, value in report.row().items():
        print(f"{name:>20}  {value}")
    for problem in [*report.wrong, *report.leaks][:20]:
        print(f"{'!':>20}  {problem}")
    return 1 if report.wrong or report.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
