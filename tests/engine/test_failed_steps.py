"""A step that raises: who made it raise fails alone, the others go on with their tokens; if none runs, all are told."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING, Any, get_args

import anyio
import pytest

from asyncllm import Engine, EngineFailedError, EngineState, IntegrityError, RequestFailedError
from asyncllm.model.open import TorchBackend
from asyncllm.request import Request
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left, scripted_engine
from asyncllm.testing.engines import collect_garbage
from helpers.engines import TinyModelFolder, each_model, small_engine
from helpers.failing_device import FailingBackend, When
from helpers.idle import Idle
from helpers.lagging_device import LaggingBackend
from helpers.loops import both_loops, on_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm import StepRecord
    from asyncllm.backend import Backend
    from asyncllm.scheduler.batch import Batch

FIELDS: dict[str, Any] = {
    "page_size": 4,
    "kv_pool_tokens": 256,
    "max_running_requests": 8,
    "min_prefill_chunk": 8,
    "step_token_budget": 24,
    "debug_checks": True,
    "seed": 0,
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 7, 7], [8] * 30, [2, 7, 1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.8, "seed": 11}
POISON = [66] * 5
BROKEN = RuntimeError("simulated: the device is broken")


def lagging_engine(
    kind: str,
    tiny_model: TinyModelFolder,
    fault: Callable[[int, Batch], Exception | None],
    when: When,
    **fields: object,
) -> tuple[Engine, FailingBackend]:
    """Make an engine some of whose steps fail, on a device that lags."""
    inner: Backend = ScriptedModel() if kind == "scripted" else TorchBackend()
    outside = when in {"launch", "read"}
    failing = FailingBackend(LaggingBackend(inner) if outside else inner, fault, when)
    backend = failing if outside else LaggingBackend(failing)
    return Engine("scripted" if kind == "scripted" else tiny_model(), backend=backend, **{**FIELDS, **fields}), failing


async def tokens_alone(kind: str, tiny_model: TinyModelFolder) -> list[tuple[int, ...]]:
    """What each prompt gets from an engine without faults."""
    async with small_engine(kind, tiny_model, max_running_requests=1, prefix_cache="none", overlap=False) as engine:
        return [(await engine.generate(prompt, **OPTIONS)).token_ids for prompt in PROMPTS]


@each_model
@pytest.mark.parametrize("when", get_args(When))
@pytest.mark.parametrize("overlap", [True, False])
def test_a_fault_that_passes_costs_nobody_a_token(
    kind: str, when: When, overlap: bool, tiny_model: TinyModelFolder
) -> None:
    """In each step of a run once: chunks, decoding rows, shared prefixes, pages copied and handed out in them."""

    async def main() -> None:
        alone = await tokens_alone(kind, tiny_model)
        failing = -1

        def fault(number: int, _batch: Batch) -> Exception | None:
            return BROKEN if number == failing else None

        engine, backend = lagging_engine(kind, tiny_model, fault, when, overlap=overlap)
        async with engine:
            idle = await Idle.watch(engine)
            for step in range(8):
                engine.reset_prefix_cache()
                failing, failed = backend.launched + step, backend.failed
                completions = await engine.generate_all(PROMPTS, **OPTIONS)
                assert [completion.token_ids for completion in completions] == alone
                assert backend.failed == failed + 1
                check_nothing_left(engine)
            failing = -1
            await idle.check()

    on_loop("asyncio", main)


@both_loops
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("guilty", [1, 3])
def test_who_makes_steps_fail_fails_alone(library: str, overlap: bool, guilty: int) -> None:
    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, overlap=overlap) as engine:
            idle = await Idle.watch(engine)
            neighbours = [[place, place + 1, 7] for place in range(9)]
            alone = [c.token_ids for c in await engine.generate_all(neighbours, max_tokens=12)]
            model.fail_steps_with(POISON, BROKEN)
            prompts = [*neighbours]
            for place in range(guilty):
                prompts.insert(4 * place, [*POISON, place])
            outcomes = await engine.generate_all(prompts, max_tokens=12, return_exceptions=True)
            failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            assert [outcome.token_ids for outcome in outcomes if not isinstance(outcome, Exception)] == alone
            assert all(isinstance(error, RequestFailedError) for error in failed)
            assert [error.__cause__ for error in failed] == [BROKEN] * guilty
            await idle.check()

    on_loop(library, main)


@pytest.mark.parametrize("overlap", [True, False])
def test_who_makes_steps_fail_fails_alone_even_if_nobody_else_is_there(overlap: bool) -> None:
    """Then a step of nobody's tells that the engine works; no listener sees it, no page is kept of it."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, overlap=overlap, kv_pool_tokens=16, max_running_requests=1) as engine:
            idle = await Idle.watch(engine)
            model.fail_steps_with(POISON, BROKEN)
            records: list[StepRecord] = []
            engine.add_step_listener(records.append)
            for _ in range(2):
                with pytest.raises(RequestFailedError, match="the device is broken"):
                    await engine.generate(POISON, max_tokens=12)
            assert records == []
            engine.reset_prefix_cache()
            assert engine.stats().free_pages == 1
            await idle.check()

    on_loop("asyncio", main)


@pytest.mark.parametrize("callers", [1, 2, 20])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", get_args(When))
def test_where_no_step_runs_everybody_is_told_at_once(
    callers: int, overlap: bool, when: When, tiny_model: TinyModelFolder
) -> None:
    """With the first cause, after a few steps, those that wait included."""

    async def main() -> None:
        engine, backend = lagging_engine(
            "scripted",
            tiny_model,
            lambda number, _: RuntimeError(str(number)) if number > 2 else None,
            when,
            overlap=overlap,
        )
        await engine.start()
        calls = [engine.generate([place] * 3, max_tokens=20) for place in range(callers)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, EngineFailedError) for outcome in outcomes)
        assert len({repr(outcome.__cause__) for outcome in outcomes if isinstance(outcome, Exception)}) == 1
        assert backend.failed < 12
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineFailedError):
            engine.stream([1])
        await engine.aclose()

    on_loop("asyncio", main)


def test_a_step_that_raises_what_is_no_exception_fails_the_engine_and_callers_are_told_why() -> None:
    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            model.fail_at_step(2, SystemExit("simulated"))
            with pytest.raises(EngineFailedError) as caught:
                await engine.generate([5], max_tokens=9)
            assert isinstance(caught.value.__cause__, SystemExit)

    on_loop("asyncio", main)


def test_steps_that_fail_though_none_of_their_requests_does_fail_the_engine(tiny_model: TinyModelFolder) -> None:
    """Each request runs alone; two at once never do: it goes on for a while, and says so in the end."""

    async def main() -> None:
        def fault(_number: int, batch: Batch) -> Exception | None:
            return BROKEN if batch.rows > 1 else None

        engine, backend = lagging_engine("scripted", tiny_model, fault, "after")
        await engine.start()
        short = asyncio.ensure_future(engine.generate([1], max_tokens=4))
        long = asyncio.ensure_future(engine.generate([2], max_tokens=100))
        assert len((await short).token_ids) == 4
        assert len((await long).token_ids) == 100
        outcomes = await engine.generate_all([[place] for place in range(3)], max_tokens=50, return_exceptions=True)
        assert all(isinstance(outcome, EngineFailedError) for outcome in outcomes)
        assert backend.failed < 80
        await engine.aclose()

    on_loop("asyncio", main)


def test_without_memory_steps_become_smaller_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, max_running_requests=4, step_token_budget=400) as engine:
            idle = await Idle.watch(engine)
            alone = await engine.generate([7] * 300, max_tokens=20)
            engine.reset_prefix_cache()
            model.fail_steps_above(50, MemoryError("simulated"))
            sizes: list[int] = []
            engine.add_step_listener(lambda record: sizes.append(record.query_tokens))
            with caplog.at_level(logging.WARNING, "asyncllm"):
                for _ in range(2):
                    assert (await engine.generate([7] * 300, max_tokens=20)).token_ids == alone.token_ids
                    engine.reset_prefix_cache()
            assert max(sizes) == 37  # 300, 150, 75, 37
            assert [record.getMessage() for record in caplog.records] == [
                "no memory for a step of 300 tokens: smaller ones from now on"
            ]
            await idle.check()

    on_loop("asyncio", main)


def test_without_memory_for_any_step_the_engine_fails_cleanly() -> None:
    async def main() -> None:
        model = ScriptedModel()
        engine = scripted_engine(model, max_running_requests=4, step_token_budget=400)
        async with engine:
            model.fail_steps_above(0, RuntimeError("simulated: CUDA out of memory"))
            with pytest.raises(EngineFailedError, match="out of memory"):
                await engine.generate([7] * 300, max_tokens=20)
        async with engine:
            assert len((await engine.generate([7] * 300, max_tokens=20)).token_ids) == 20

    on_loop("asyncio", main)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_requests_that_are_left_while_they_are_tried_hold_nobody_up(leaver: int) -> None:
    """The guilty one, and innocent ones before and behind it."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            idle = await Idle.watch(engine)
            alone = (await engine.generate([2, 3], max_tokens=12)).token_ids
            model.fail_steps_with(POISON, BROKEN)
            first = engine.stats().steps
            with model.hold_at_step(first + 2) as held:  # the second of those that are tried
                streams = [engine.stream(prompt, max_tokens=12) for prompt in ([2, 3], POISON, [2, 4])]
                await held.reached()
                await streams[leaver].aclose()
            for place, stream in enumerate(streams):
                if place == leaver:
                    assert (await stream.result()).finish_reason == "aborted"
                elif place == 1:
                    with pytest.raises(RequestFailedError):
                        await stream.result()
                else:
                    assert len((await stream.result()).token_ids) == 12
            assert (await engine.generate([2, 3], max_tokens=12)).token_ids == alone
            await idle.check()

    on_loop("asyncio", main)


def test_a_page_read_wrongly_is_nobodys_fault_and_not_tried_again(tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        engine, backend = lagging_engine(
            "scripted", tiny_model, lambda number, _: IntegrityError("simulated") if number == 2 else None, "after"
        )
        await engine.start()
        with pytest.raises(EngineFailedError) as caught:
            await engine.generate([1], max_tokens=9)
        assert isinstance(caught.value.__cause__, IntegrityError)
        assert backend.failed == 1
        await engine.aclose()

    on_loop("asyncio", main)


def test_what_a_failed_request_had_computed_is_given_to_nobody() -> None:
    """Its KV may be what is wrong; what was shared before it failed stays."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, page_size=4) as engine:
            model.not_finite_at([5] * 8, token=8)
            with pytest.raises(RequestFailedError, match="not finite"):
                await engine.generate([5] * 8, max_tokens=20)
            hashed = HashedTokens()
            whole = [5] * 8
            for _ in range(20):
                whole.append(hashed(whole))
            again = await engine.generate(whole[:14], max_tokens=14)
            assert again.usage.cached_tokens == 8
            assert again.token_ids == tuple(whole[14:])
            check_nothing_left(engine)

    on_loop("asyncio", main)


def test_a_paused_stream_goes_on_after_a_fault_with_its_tokens() -> None:
    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            alone = (await engine.generate([5], max_tokens=30)).token_ids
            stream = engine.stream([5], max_tokens=30, buffer_tokens=3)
            while not engine.stats().paused:
                await engine.check_integrity_async()
            model.fail_at_step(None, BROKEN)
            await engine.generate([6], max_tokens=5)
            assert engine.stats().paused == 1
            assert tuple([token.id async for token in stream]) == alone
            check_nothing_left(engine)

    on_loop("asyncio", main)


def test_who_keeps_the_error_keeps_no_request() -> None:
    """Nor its cause, which says in a note where it was raised."""

    async def main() -> None:
        collect_garbage()
        before = sum(type(each) is Request for each in gc.get_objects())  # of other tests
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            model.fail_steps_with(POISON, RuntimeError("simulated: kept"))
            with pytest.raises(RequestFailedError) as caught:
                await engine.generate_all([[1], POISON, [2]], max_tokens=9)
            cause = caught.value.__cause__
            assert "In the step:" in "".join(getattr(cause, "__notes__", []))
            assert getattr(cause, "__traceback__", None) is None
            check_nothing_left(engine)
            collect_garbage()
            assert sum(type(each) is Request for each in gc.get_objects()) <= before + 1  # engine thread's own

    on_loop("asyncio", main)


@pytest.mark.parametrize("buffer_tokens", [1, 2, 3])
@pytest.mark.parametrize("step", range(6))
def test_a_reader_of_a_stream_whose_tokens_in_flight_were_lost_gets_them(step: int, buffer_tokens: int) -> None:
    """It was paused for them, and nothing was left to read, which would have let it go on."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model) as engine:
            model.fail_at_step(step, BROKEN)
            stream = engine.stream([5], max_tokens=8, buffer_tokens=buffer_tokens)
            assert len([token async for token in stream]) == 8
            check_nothing_left(engine)

    on_loop("asyncio", main)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("buffer_tokens", [1, 2])
def test_who_makes_steps_fail_fails_alone_though_it_is_paused_when_they_do(buffer_tokens: int, overlap: bool) -> None:
    """Its buffer is full with what is in flight, so it is paused whenever its step's failure is read."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine(model, overlap=overlap) as engine:
            alone = await engine.generate([5], max_tokens=60)
            model.fail_steps_with(POISON, BROKEN)
            stream = engine.stream(POISON, max_tokens=9, buffer_tokens=buffer_tokens)
            other = await engine.generate([5], max_tokens=60)
            with pytest.raises(RequestFailedError):
                await stream.result()
            assert other.token_ids == alone.token_ids
            check_nothing_left(engine)

    on_loop("asyncio", main)


def test_an_engine_can_be_closed_while_requests_are_tried() -> None:
    async def main() -> None:
        model = ScriptedModel()
        engine = scripted_engine(model)
        async with engine:
            model.fail_steps_with(POISON, BROKEN)
            with model.hold_at_step(1) as held:
                calls = [asyncio.ensure_future(engine.generate([*POISON, i], max_tokens=9)) for i in range(4)]
                await held.reached()
                closing = asyncio.ensure_future(engine.aclose())
                await asyncio.sleep(0)
            await closing
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(outcome, Exception) for outcome in outcomes)

    on_loop("asyncio", main)


@both_loops
def test_a_random_few_faults_change_no_token(library: str, tiny_model: TinyModelFolder) -> None:
    """One step in seven fails, before or after it ran, while readers leave and prefixes are shared."""

    async def main() -> None:
        alone = await tokens_alone("scripted", tiny_model)
        for when in get_args(When):
            engine, backend = lagging_engine(
                "scripted", tiny_model, lambda number, _: BROKEN if number % 7 == 5 else None, when
            )
            async with engine:

                async def use(place: int, engine: Engine = engine) -> None:
                    for turn in range(4):
                        prompt = PROMPTS[(place + turn) % len(PROMPTS)]
                        expected = alone[(place + turn) % len(PROMPTS)]
                        read = 9 if (place + turn) % 3 else turn
                        async with engine.stream(prompt, **OPTIONS) as stream:
                            assert tuple([(await anext(stream)).id for _ in range(read)]) == expected[:read]

                async with anyio.create_task_group() as tasks:
                    for place in range(10):
                        tasks.start_soon(use, place)
                assert backend.failed > 5
                check_nothing_left(engine)

    on_loop(library, main)
