"""Admission: who starts when, and that nobody waits for ever or breaks the engine for others.

One test for each kind of fault that engines of this kind were reported for.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncllm import (
    LLM,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    StepRecord,
)
from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine
from helpers.engines import POOL, TinyModelFolder, each_model, small_engine
from helpers.idle import Idle
from helpers.loops import both_loops, on_loop
from helpers.scenes import held_engine_thread

if TYPE_CHECKING:
    from asyncllm import Engine

PROMPT = [10, 11, 12, 13, 14]


def listen(engine: Engine) -> list[StepRecord]:
    """Collect the records of all later steps."""
    records: list[StepRecord] = []
    engine.add_step_listener(records.append)
    return records


def order_of_starts(records: list[StepRecord]) -> list[str]:
    """The requests, in the order in which steps first named them."""
    return list(dict.fromkeys(name for record in records for name in record.request_ids))


@each_model
def test_what_needs_more_than_the_pool_is_refused_and_the_whole_pool_can_be_had(
    kind: str, tiny_model: TinyModelFolder
) -> None:
    """B39: one page more than there are raises at the call; exactly the pool runs, and blocks nobody behind it."""

    async def main() -> None:
        async with small_engine(kind, tiny_model, **POOL, max_model_tokens=400) as engine:
            with pytest.raises(PromptTooLongError) as caught:
                engine.stream([7] * 100, max_tokens=30)
            assert caught.value.pool_tokens == 128
            whole = engine.stream([7] * 100, max_tokens=29, ignore_eos=True)
            behind = engine.stream(PROMPT, max_tokens=3, ignore_eos=True)
            assert len((await whole.result()).token_ids) == 29
            assert len((await behind.result()).token_ids) == 3
            check_nothing_left(engine)

    asyncio.run(main())


@each_model
def test_a_batch_with_a_prompt_that_never_fits_says_which(kind: str, tiny_model: TinyModelFolder) -> None:
    """B44: by the blocking call too; the others have their answers, and a retry does not hang."""
    fields = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, **POOL}
    backend, model = (ScriptedModel(), "scripted") if kind == "scripted" else (None, tiny_model())
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(model, backend=backend, **fields) as llm:
        for _ in range(2):
            with pytest.raises(PromptTooLongError) as caught:
                llm.generate([PROMPT, [7] * 200, PROMPT], params)
            assert caught.value.index == 1
        assert [len(one.token_ids) for one in llm.generate([PROMPT] * 3, params)] == [4, 4, 4]
        check_nothing_left(llm.engine)


@each_model
def test_a_request_starts_only_when_its_worst_case_fits(kind: str, tiny_model: TinyModelFolder) -> None:
    """B41: of two that need 60% of the pool each, the second starts after the first has ended."""

    async def main() -> None:
        async with small_engine(kind, tiny_model, **POOL) as engine:
            records = listen(engine)
            with held_engine_thread(engine):
                streams = [
                    engine.stream([place] * 40, max_tokens=37, request_id=str(place), ignore_eos=True)
                    for place in range(2)
                ]
            for stream in streams:
                assert len((await stream.result()).token_ids) == 37
            assert all(len(record.request_ids) == 1 for record in records)
            assert order_of_starts(records) == ["0", "1"]
            assert max(record.waiting for record in records) == 1
            check_nothing_left(engine)

    asyncio.run(main())


@pytest.mark.parametrize("overlap", [True, False])
def test_a_full_pool_is_only_a_reason_to_wait(overlap: bool) -> None:
    """B40, B42: thousands of steps of random requests in a pool that is too small for them; all end."""

    async def main() -> None:
        rng = random.Random(42)
        async with scripted_engine(None, default=None, **POOL, overlap=overlap, max_running_requests=16) as engine:
            idle = await Idle.watch(engine)
            records = listen(engine)

            async def user() -> None:
                while engine.stats().steps < 1500:
                    prompt = [rng.randrange(3)] * rng.randint(1, 70)
                    max_tokens = rng.randint(1, 129 - len(prompt))
                    async with engine.stream(prompt, max_tokens=max_tokens) as stream:
                        for _ in range(rng.choice([max_tokens, rng.randint(0, max_tokens)])):
                            await anext(stream)

            async with anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(user)
            assert sum(record.waiting > 0 for record in records) > 100
            assert engine.stats().preemptions == 0
            await idle.check()

    asyncio.run(main())


@both_loops
def test_the_higher_priority_starts_next(library: str) -> None:
    """B46: a full batch, thirty that wait, and one of a higher class that comes last."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, max_running_requests=1) as engine:
            records = listen(engine)
            with model.hold_at_step() as held:
                streams = [engine.stream([1], max_tokens=4, request_id="runs")]
                await held.reached()
                streams += [engine.stream([2], max_tokens=4, request_id=f"low {place}") for place in range(30)]
                streams.append(engine.stream([3], max_tokens=4, request_id="high", priority=1))
            for stream in streams:
                await stream.result()
            assert order_of_starts(records) == ["runs", "high", *(f"low {place}" for place in range(30))]
            check_nothing_left(engine)

    on_loop(library, main)


@each_model
def test_a_long_prompt_stops_no_running_stream(kind: str, tiny_model: TinyModelFolder) -> None:
    """B47: each chunk of it shares its step with one token of every stream that runs."""

    async def main() -> None:
        settings = {"step_token_budget": 12, "min_prefill_chunk": 8, "max_running_requests": 4, "page_size": 16}
        async with small_engine(kind, tiny_model, **settings) as engine:
            records = listen(engine)
            with held_engine_thread(engine):
                running = [
                    engine.stream([place] * 3, max_tokens=120, request_id=str(place), ignore_eos=True)
                    for place in range(3)
                ]
                long = engine.stream(list(range(8)) * 50, max_tokens=2, request_id="long", ignore_eos=True)
            for stream in [*running, long]:
                await stream.result()
            chunks = [record for record in records if "long" in record.request_ids and record.kind != "decode"]
            assert len(chunks) >= 400 // 9
            assert all({"0", "1", "2"} <= set(record.request_ids) for record in chunks)
            assert {record.kind for record in chunks[1:]} == {"mixed"}  # in the first, the three begin too
            check_nothing_left(engine)

    asyncio.run(main())


@both_loops
def test_the_queue_and_the_time_in_it_are_bounded_on_request(library: str) -> None:
    """B48: the third waiting request is refused; one whose time passes while it waits is told, and never runs."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, max_running_requests=1, max_waiting_requests=2) as engine:
            records = listen(engine)
            with pytest.raises(InvalidRequestError, match="timeout"):
                engine.stream(PROMPT, timeout=0)
            with pytest.raises(InvalidRequestError, match="timeout"):
                engine.stream(PROMPT, timeout=-1.0)
            with model.hold_at_step() as held:
                first = engine.stream(PROMPT, max_tokens=10)
                await held.reached()
                for _ in range(2):  # turns of the engine's loop: it tells what it has admitted at the end of each
                    await engine.check_integrity_async()
                patient, left = (engine.stream(PROMPT, max_tokens=10, timeout=3600) for _ in range(2))
                with pytest.raises(QueueFullError, match="max_waiting_requests=2"):
                    engine.stream(PROMPT)
                assert left.abort()
                assert (await left.result()).token_ids == ()
                hurried = engine.stream(PROMPT, max_tokens=10, request_id="hurried", timeout=0.05)
                with pytest.raises(DeadlineExceededError) as caught:
                    await hurried.result()
                assert caught.value.completion.finish_reason == "timeout"
                assert caught.value.completion.token_ids == ()
                fourth = engine.stream(PROMPT, max_tokens=10)
            for stream in (first, patient, fourth):
                assert len((await stream.result()).token_ids) == 10
            assert "hurried" not in order_of_starts(records)
            check_nothing_left(engine)

    on_loop(library, main)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step_token_budget": 40, "min_prefill_chunk": 33, "max_running_requests": 8}, "8 . 33 = 41"),
        ({"step_token_budget": 1}, "step_token_budget=1"),
        ({"step_token_budget": 0}, "step_token_budget must be an integer >= 1"),
        ({"kv_pool_tokens": 100, "page_size": 16}, "96 or 112"),
        ({"page_size": 0}, "page_size must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, object], words: str) -> None:
    """B49: at construction where that is possible, else at the start."""
    with pytest.raises(ConfigurationError, match=words), scripted_engine(None, default=None, **fields):
        pass


@pytest.mark.parametrize("budget", [5, 7, 17, 50])
@each_model
def test_a_step_budget_needs_to_be_no_multiple_of_the_page(kind: str, budget: int, tiny_model: TinyModelFolder) -> None:
    """B49: chunks end inside pages, and the answer is that of one chunk."""

    async def main() -> None:
        bounds = {"page_size": 16, "max_running_requests": 4, "min_prefill_chunk": 1}
        answers = []
        for step_token_budget in (budget, 200):
            async with small_engine(kind, tiny_model, **bounds, step_token_budget=step_token_budget) as engine:
                answers.append(await engine.generate(list(range(90)), max_tokens=4, ignore_eos=True))
                check_nothing_left(engine)
        assert answers[0].token_ids == answers[1].token_ids

    asyncio.run(main())


def test_a_prefill_step_is_filled_from_the_next_prompt() -> None:
    """B51: the first prompt's last chunk takes the second one's first tokens along."""

    async def main() -> None:
        async with scripted_engine(step_token_budget=32, min_prefill_chunk=16, max_running_requests=16) as engine:
            records = listen(engine)
            outcomes = await engine.generate_all([[1] * 40, [2] * 40], max_tokens=1)
            assert [len(one.token_ids) for one in outcomes] == [1, 1]
            assert [record.query_tokens for record in records] == [32, 32, 16]

    asyncio.run(main())


def test_nobody_waits_while_nothing_runs() -> None:
    """B40: whenever a step ends with requests waiting, some run, or one starts in the very next step."""

    async def main() -> None:
        rng = random.Random(40)
        async with scripted_engine(None, default=None, **POOL, max_running_requests=3) as engine:
            records = listen(engine)
            prompts = [[rng.randrange(4)] * rng.randint(1, 90) for _ in range(80)]
            params = [SamplingParams(max_tokens=rng.randint(1, 30)) for _ in prompts]
            streams = [engine.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
            for place, stream in enumerate(streams):
                if place % 3 == 0:
                    await stream.aclose()
                else:
                    await stream.result()
            assert all(record.running for record in records if record.waiting)
            assert all(second.index == first.index + 1 for first, second in itertools.pairwise(records))
            check_nothing_left(engine)

    asyncio.run(main())
