"""A reader that stopped gives its KV to those that wait, and goes on with exactly the tokens it would have had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncllm import DeadlineExceededError, Engine, EngineClosedError
from asyncllm.model.open import TorchBackend
from asyncllm.testing import ScriptedModel, check_nothing_left
from helpers.engines import TinyModelFolder, each_model
from helpers.idle import Idle
from helpers.lagging_device import LaggingBackend
from helpers.loops import both_loops, on_loop

if TYPE_CHECKING:
    from asyncllm import TokenStream
    from asyncllm.backend import Backend

PROMPT = [5, 6, 7, 8, 9, 10]
# 14 of the pool's 16 pages.
SLOW: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "temperature": 0.9, "seed": 3}


def one_at_a_time(kind: str, tiny_model: TinyModelFolder, **fields: object) -> Engine:
    """Make an engine on a lagging device whose pool holds one slow request, not started."""
    inner: Backend = ScriptedModel() if kind == "scripted" else TorchBackend()
    usual: dict[str, object] = {
        "page_size": 4,
        "kv_pool_tokens": 64,
        "max_running_requests": 4,
        "min_prefill_chunk": 4,
        "step_token_budget": 16,
        "pause_grace_seconds": 0.0,
        "debug_checks": True,
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
    }
    model = "scripted" if kind == "scripted" else tiny_model()
    return Engine(model, backend=LaggingBackend(inner), **{**usual, **fields})


async def until_paused(engine: Engine, count: int = 1) -> None:
    """Let the engine run until so many of its requests are paused and nothing else can run."""
    while engine.stats().paused < count:
        await engine.check_integrity_async()


async def ids(stream: TokenStream) -> tuple[int, ...]:
    """Read a stream to its end."""
    return tuple([token.id async for token in stream])


@each_model
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
def test_a_parked_stream_goes_on_with_the_tokens_that_it_has_unpaused(
    kind: str, overlap: bool, prefix_cache: str, tiny_model: TinyModelFolder
) -> None:
    """One task opens a stream, then another, and drains the second first, in a pool that holds one of them."""

    async def main() -> None:
        async with one_at_a_time(kind, tiny_model, overlap=overlap, prefix_cache=prefix_cache) as engine:
            idle = await Idle.watch(engine)
            alone = (await engine.generate(PROMPT, **SLOW)).token_ids
            engine.reset_prefix_cache()
            async with engine.stream(PROMPT, buffer_tokens=4, **SLOW) as slow:
                first = [(await anext(slow)).id for _ in range(3)]
                await until_paused(engine)
                async with engine.stream([20, 21], max_tokens=40, ignore_eos=True) as other:
                    assert len(await ids(other)) == 40
                assert (engine.stats().preemptions, engine.stats().parked) == (1, 1)
                assert (*first, *await ids(slow)) == alone
                completion = await slow.result()
                assert completion.token_ids == alone
                assert completion.usage.prompt_tokens == len(PROMPT)
            await idle.check()

    on_loop("asyncio", main)


@both_loops
def test_a_reader_that_never_returns_lets_twenty_others_finish(library: str, tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with one_at_a_time("scripted", tiny_model) as engine:
            idle = await Idle.watch(engine)
            async with engine.stream(PROMPT, buffer_tokens=4, **SLOW):
                await until_paused(engine)
                async with anyio.create_task_group() as tasks:
                    for place in range(20):
                        tasks.start_soon(engine.generate, [place] * 9)
                stats = engine.stats()
                assert (stats.running, stats.waiting, stats.parked) == (0, 0, 1)
                assert stats.owned_pages == stats.leased_pages == 0
            await idle.check()

    on_loop(library, main)


def test_the_grace_ends_by_itself(tiny_model: TinyModelFolder) -> None:
    """Nothing else happens meanwhile: the one waits for pages, the other is paused, and no step runs."""

    async def main() -> None:
        async with one_at_a_time("scripted", tiny_model, pause_grace_seconds=0.05) as engine:
            async with engine.stream(PROMPT, buffer_tokens=4, **SLOW):
                await until_paused(engine)
                assert len((await engine.generate([1, 2], max_tokens=40, ignore_eos=True)).token_ids) == 40
            check_nothing_left(engine)

    on_loop("asyncio", main)


def test_within_the_grace_it_keeps_its_pages_and_who_waits_waits(tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with one_at_a_time("scripted", tiny_model, pause_grace_seconds=1e6) as engine:
            async with engine.stream(PROMPT, buffer_tokens=4, **SLOW) as slow:
                await until_paused(engine)
                other = engine.stream([1, 2], max_tokens=40, ignore_eos=True)
                for _ in range(5):
                    await engine.check_integrity_async()
                assert (engine.stats().waiting, engine.stats().paused, engine.stats().parked) == (1, 1, 0)
                assert len(await ids(slow)) == SLOW["max_tokens"]
                assert len(await ids(other)) == 40
            assert engine.stats().preemptions == 0
            check_nothing_left(engine)

    on_loop("asyncio", main)


def test_nobody_is_parked_while_nobody_waits(tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with one_at_a_time("scripted", tiny_model) as engine:
            async with engine.stream(PROMPT, buffer_tokens=4, **SLOW) as slow:
                await until_paused(engine)
                await engine.generate([1], max_tokens=5)  # fits beside it
                assert (engine.stats().paused, engine.stats().parked) == (1, 0)
                assert len(await ids(slow)) == SLOW["max_tokens"]
            check_nothing_left(engine)

    on_loop("asyncio", main)


def test_the_longest_pause_goes_first_and_no_more_than_are_needed(tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with one_at_a_time("scripted", tiny_model, kv_pool_tokens=128) as engine:
            streams = []
            for place in range(2):
                streams.append(engine.stream([place] * 6, buffer_tokens=4, request_id=str(place), **SLOW))
                await until_paused(engine, place + 1)
            await engine.generate([9] * 6, max_tokens=50, ignore_eos=True)
            assert (engine.stats().paused, engine.stats().parked) == (1, 1)
            seen: set[tuple[tuple[str, ...], str]] = set()
            engine.add_step_listener(lambda record: seen.add((record.request_ids, record.kind)))
            assert len(await ids(streams[1])) == SLOW["max_tokens"]  # it has its pages still, and waits for nobody
            assert seen == {(("1",), "decode")}
            assert len(await ids(streams[0])) == SLOW["max_tokens"]
            check_nothing_left(engine)

    on_loop("asyncio", main)


def test_it_goes_on_ahead_of_those_that_never_started(tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with one_at_a_time("scripted", tiny_model) as engine:
            starts: dict[str, None] = {}
            slow = engine.stream(PROMPT, buffer_tokens=4, request_id="slow", **SLOW)
            await until_paused(engine)
            others = [
                engine.stream([place] * 6, request_id=f"other {place}", max_tokens=50, ignore_eos=True, priority=9)
                for place in range(3)
            ]
            await anext(others[0])  # so the slow one is parked
            engine.add_step_listener(lambda record: starts.update(dict.fromkeys(record.request_ids)))
            rest = await ids(slow)
            assert len(rest) == SLOW["max_tokens"]
            for stream in others:
                await stream.result()
            assert list(starts) == ["other 0", "slow", "other 1", "other 2"]
            check_nothing_left(engine)

    on_loop("asyncio", main)


@pytest.mark.parametrize("way", ["close", "abort", "timeout", "engine close"])
def test_a_parked_stream_can_be_left(way: str, clock: list[float], tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with one_at_a_time("scripted", tiny_model) as engine:
            idle = await Idle.watch(engine)
            timeout = 1000 if way == "timeout" else None
            slow = engine.stream(PROMPT, buffer_tokens=4, timeout=timeout, **SLOW)
            await until_paused(engine)
            await engine.generate([9] * 6, max_tokens=50, ignore_eos=True)
            if way == "engine close":
                assert engine.stats().parked == 1
                await engine.aclose()
                with pytest.raises(EngineClosedError):
                    await slow.result()
                return
            if way == "close":
                await slow.aclose()
            elif way == "abort":
                assert slow.abort()
            if way == "timeout":
                clock[0] += 2000  # as if so many seconds had passed
                while engine.stats().parked:
                    await engine.check_integrity_async()
                with pytest.raises(DeadlineExceededError):
                    await slow.result()
            else:
                assert (await slow.result()).finish_reason == "aborted"
            await idle.check()

    on_loop("asyncio", main)
