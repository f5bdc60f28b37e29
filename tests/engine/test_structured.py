"""Structured output through the engine: what comes out fits, and nobody else notices."""

from __future__ import annotations

import functools
import json
import threading
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import jsonschema
import pytest

from asyncllm import (
    DeadlineExceededError,
    Engine,
    EngineClosedError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
)
from asyncllm.engine_loop import PREPARING_THREADS
from asyncllm.intake import SHORT_TEXT_CHARACTERS
from asyncllm.model.open import TorchBackend
from asyncllm.scheduler.scheduler import Scheduler
from asyncllm.structured.compiler import StructureCompiler
from asyncllm.structured.grammar_constraint import GrammarConstraint
from asyncllm.testing import ScriptedModel, scripted_engine
from asyncllm.text.tokenizer import Tokenizer
from helpers.engines import TinyModelFolder, each_model, small_engine
from helpers.idle import Idle
from helpers.lagging_device import LaggingBackend
from helpers.loops import both_loops, on_loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from asyncllm import Completion, StepRecord
    from asyncllm.structure import Structure

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DRAWN: Final[dict[str, Any]] = {"temperature": 1.0, "seed": 4, "max_tokens": 120}


def ask(reply: str, **fields: Any) -> Completion:  # noqa: ANN401  # fields of SamplingParams
    """Ask a scripted engine whose model would like to say `reply`."""

    async def main() -> Completion:
        async with scripted_engine({}, default=reply) as engine:
            return await engine.generate("a", **fields)

    return anyio.run(main)


@each_model
@both_loops
def test_each_way_to_say_it_gives_a_text_that_fits(kind: str, library: str, tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with small_engine(kind, tiny_model) as engine:
            idle = await Idle.watch(engine)
            person = await engine.generate("a", json_schema=PERSON, **DRAWN)
            jsonschema.validate(json.loads(person.text), PERSON)
            number = await engine.generate("a", regex="-?[0-9]{1,3}", **DRAWN)
            assert -999 <= int(number.text) <= 999
            color = await engine.generate("a", choices=["red", "green", "blue"], **DRAWN)
            assert color.text in {"red", "green", "blue"}
            pairs = await engine.generate("a", grammar='start: "[" start? "]"', **DRAWN)
            assert pairs.text == "[" * (len(pairs.text) // 2) + "]" * (len(pairs.text) // 2)
            for completion in (person, number, color):
                assert completion.finish_reason == "stop"
                assert completion.stop_reason is None
            await idle.check()

    on_loop(library, main)


def test_a_reply_that_fits_is_given_as_it_is_and_any_other_is_made_to_fit() -> None:
    fits = ask('{"name": "ann", "age": 7}', json_schema=PERSON, max_tokens=60)
    assert fits.text == '{"name": "ann", "age": 7}'
    assert fits.finish_reason == "stop"
    assert ask("Certainly! Here it is.", json_schema=PERSON, max_tokens=60).text.startswith("{")


@each_model
def test_overlap_company_cache_and_pauses_change_no_token(kind: str, tiny_model: TinyModelFolder) -> None:
    """Alone without overlap; with it, twice, beside others that are free or bound, and read as slowly as can be."""

    async def alone() -> list[tuple[int, ...]]:
        async with small_engine(kind, tiny_model, overlap=False) as engine:
            return [
                (await engine.generate("a", json_schema=PERSON, **{**DRAWN, "seed": n})).token_ids for n in range(4)
            ]

    async def together() -> list[tuple[int, ...]]:
        inner = ScriptedModel() if kind == "scripted" else TorchBackend()
        model = "scripted" if kind == "scripted" else tiny_model()
        fields: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "kv_pool_tokens": 4096}
        async with Engine(model, backend=LaggingBackend(inner), debug_checks=True, **fields) as engine:
            idle = await Idle.watch(engine)
            await engine.generate("a", json_schema=PERSON, **DRAWN)
            found: dict[int, tuple[int, ...]] = {}

            async def read(seed: int, buffer_tokens: int | None) -> None:
                params = {**DRAWN, "seed": seed}
                stream = engine.stream("a", json_schema=PERSON, buffer_tokens=buffer_tokens, **params)
                async with stream:
                    found[seed] = tuple([token.id async for token in stream])

            async with anyio.create_task_group() as tasks:
                for seed in range(4):
                    tasks.start_soon(read, seed, 1 if seed % 2 else None)
                    tasks.start_soon(functools.partial(engine.generate, f"b{seed}", max_tokens=40))
            await idle.check()
            return [found[seed] for seed in range(4)]

    assert anyio.run(together) == anyio.run(alone)


def test_a_parked_request_goes_on_within_its_structure() -> None:
    async def main() -> None:
        fields: dict[str, Any] = {"page_size": 4, "kv_pool_tokens": 64, "max_running_requests": 4}
        fields |= {"min_prefill_chunk": 4, "step_token_budget": 16, "pause_grace_seconds": 0.0}
        async with scripted_engine(ScriptedModel(), **fields) as engine:
            params: dict[str, Any] = {"regex": "([a-d][0-9]){20}", "max_tokens": 50}
            alone = (await engine.generate([5, 6], **params)).token_ids
            engine.reset_prefix_cache()
            async with engine.stream([5, 6], buffer_tokens=4, **params) as slow:
                first = [(await anext(slow)).id for _ in range(3)]
                while engine.stats().paused < 1:
                    await engine.check_integrity_async()
                await engine.generate([20, 21], max_tokens=40, ignore_eos=True)
                assert engine.stats().preemptions == 1
                assert (*first, *[token.id async for token in slow]) == alone

    anyio.run(main)


def test_only_bound_rows_wait_for_their_token() -> None:
    """With overlap a free row is in every step, a bound one in every second; alone it is in every step."""

    async def main() -> None:
        model = ScriptedModel(lambda _: "a" * 30)
        async with scripted_engine(model) as engine:
            await engine.generate("x", regex="a{12}")  # compiled
            records: list[StepRecord] = []
            remove = engine.add_step_listener(records.append)
            with model.hold_at_step() as held:
                free = engine.stream("free", max_tokens=24, request_id="free")
                bound = engine.stream("bound", regex="a{12}", request_id="bound")
                await held.reached()
            await free.result()
            await bound.result()
            names = [set(record.request_ids) for record in records]
            both = names.index({"free", "bound"})
            assert names[both : both + 12] == [{"free", "bound"}, {"free"}] * 6
            records.clear()
            await engine.generate("x", regex="a{12}", request_id="alone")
            remove()
            assert len(records) == 13

    anyio.run(main)


def test_an_engine_whose_rows_all_wait_does_not_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    schedule = Scheduler.schedule

    def counting(self: Scheduler, *arguments: Any) -> Any:  # noqa: ANN401  # as the original
        calls[0] += 1
        return schedule(self, *arguments)

    monkeypatch.setattr(Scheduler, "schedule", counting)

    async def main() -> None:
        model = ScriptedModel(lambda _: "a" * 30)
        async with scripted_engine(model) as engine:
            await engine.generate("x", regex="a{12}")
            with model.hold_at_step() as held:
                async with engine.stream("x", regex="a{12}") as stream:
                    await held.reached()
                    await engine.reset_prefix_cache_async()  # answered while the step stands
                    before = calls[0]
                    for _ in range(20):
                        await engine.reset_prefix_cache_async()
                    assert calls[0] <= before + 1
                    held.release()
                    assert (await stream.result()).text == "a" * 12

    anyio.run(main)


def test_what_is_wrong_is_raised_by_the_call_and_leaves_nothing() -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            wrong: list[dict[str, Any]] = [
                {"regex": "["},
                {"json_schema": {"not": {}}},
                {"grammar": "start: missing"},
                {"choices": []},
            ]
            for fields in wrong:
                with pytest.raises(InvalidRequestError):
                    engine.stream("a", **fields)
                with pytest.raises(InvalidRequestError):
                    engine.chat([{"role": "user", "content": "a"}], **fields)
                with pytest.raises(InvalidRequestError):
                    await engine.generate("a", **fields)
            with pytest.raises(PromptTooLongError):
                engine.stream("a", regex="b", max_tokens=10**6)
            await idle.check()

    anyio.run(main)


def test_a_structure_is_compiled_on_a_worker_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    compile_ = StructureCompiler.compile

    def noting(self: StructureCompiler, structure: Structure) -> GrammarConstraint:
        threads.append(threading.current_thread())
        return compile_(self, structure)

    monkeypatch.setattr(StructureCompiler, "compile", noting)

    async def main() -> None:
        engine_threads: list[threading.Thread] = []
        async with scripted_engine({}, default="ab") as engine:
            engine.add_step_listener(lambda _: engine_threads.append(threading.current_thread()))
            for _ in range(3):
                assert (await engine.generate("a", choices=["ab"])).text == "ab"
            (thread,) = threads
            assert thread not in {threading.current_thread(), *engine_threads}

    anyio.run(main)


def hold_slow(monkeypatch: pytest.MonkeyPatch, method: str) -> tuple[threading.Semaphore, threading.Event, list[str]]:
    """Have a method of the compiler stand at structures that are called slow: reached, let go, the sources it got."""
    reached, let_go = threading.Semaphore(0), threading.Event()
    got: list[str] = []
    original = getattr(StructureCompiler, method)

    def holding(self: StructureCompiler, structure: Structure) -> object:
        got.append(structure.source)
        if structure.source.startswith("slow"):
            reached.release()
            let_go.wait()
        return original(self, structure)

    monkeypatch.setattr(StructureCompiler, method, holding)
    return reached, let_go, got


def test_a_slow_structure_holds_up_nobody_else_and_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held while they compile: one holds up no other structure, several hold up no text, all can be left and closed."""
    reached, let_go, compiled = hold_slow(monkeypatch, "_matcher")

    async def main() -> None:
        async with scripted_engine({}, default="ab", kv_pool_tokens=16384) as engine:
            idle = await Idle.watch(engine)
            slow = [engine.stream("a", regex="slow1")]
            await anyio.to_thread.run_sync(reached.acquire)
            assert (await engine.generate("a", choices=["ab"])).text == "ab"
            slow += [engine.stream("a", regex=f"slow{number}") for number in range(2, 6)]
            await anyio.to_thread.run_sync(reached.acquire)
            long_text = "a" * (SHORT_TEXT_CHARACTERS + 1)
            for completion in await engine.generate_all([long_text] * 3, max_tokens=4):
                assert completion.usage.prompt_tokens > SHORT_TEXT_CHARACTERS
            for stream in slow[:2]:
                assert stream.abort()
                assert (await stream.result()).finish_reason == "aborted"
            with pytest.raises(DeadlineExceededError):
                await engine.generate("a", regex="slow6", timeout=0.01)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await slow[2].result()
            await slow[2].aclose()
            assert not let_go.is_set()
            assert len([source for source in compiled if source.startswith("slow")]) == 2
            assert slow[3].abort()
            engine.abort(slow[4].request_id)
            await idle.check()
            waiting = engine.stream("a", regex="slow7")
        with pytest.raises(EngineClosedError):  # closed while two are held
            await waiting.result()

    try:
        anyio.run(main)
    finally:
        let_go.set()


def test_who_left_before_a_thread_was_free_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, let_go, compiled = hold_slow(monkeypatch, "compile")

    async def main() -> None:
        async with scripted_engine({}, default="ab") as engine:
            slow = [engine.stream("a", regex=f"slow{number}") for number in range(PREPARING_THREADS)]
            for _ in slow:
                await anyio.to_thread.run_sync(reached.acquire)
            left, stays = engine.stream("a", regex="left"), engine.stream("a", regex="stays")
            await left.aclose()
            await engine.check_integrity_async()  # answered after the engine has heard of it
            let_go.set()
            assert (await stays.result()).text == "stays"
            for stream in slow:
                await stream.aclose()
        assert "left" not in compiled

    try:
        anyio.run(main)
    finally:
        let_go.set()


def test_warming_up_reads_the_vocabulary(tiny_model: TinyModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]
    token_bytes = Tokenizer.token_bytes

    def noting(self: Tokenizer) -> list[bytes]:
        read[0] += 1
        return token_bytes(self)

    monkeypatch.setattr(Tokenizer, "token_bytes", noting)

    async def main() -> None:
        async with small_engine("tiny", tiny_model) as engine:
            assert read == [0]
            await engine.warmup_async()
            assert read == [1]
            engine.warmup()
            await engine.generate("a", choices=["red"])
            assert read == [1]

    anyio.run(main)


def test_a_long_structure_is_checked_by_a_worker_and_refused_by_the_stream() -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            with pytest.raises(InvalidRequestError, match="regex"):
                await engine.generate("a", regex="a" * 5000 + "[")
            await idle.check()

    anyio.run(main)


def test_max_tokens_cuts_a_structure_and_says_length() -> None:
    completion = ask('{"name": "ann", "age": 7}', json_schema=PERSON, max_tokens=10)
    assert completion.text == '{"name": "'
    assert completion.finish_reason == "length"


def test_a_stop_text_ends_it_as_any_other_text() -> None:
    completion = ask('{"name": "ann", "age": 7}', json_schema=PERSON, stop='"age"', max_tokens=60)
    assert completion.text == '{"name": "ann", '
    assert completion.stop_reason == '"age"'


def test_samples_each_keep_to_it(tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with small_engine("tiny", tiny_model) as engine:
            samples = await engine.generate_samples("a", n=4, json_schema=PERSON, **DRAWN)
            for sample in samples:
                jsonschema.validate(json.loads(sample.text), PERSON)
            assert len({sample.token_ids for sample in samples}) > 1

    anyio.run(main)


def test_a_structure_that_cannot_be_followed_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = GrammarConstraint.mask

    def failing(self: GrammarConstraint, generated: Sequence[int]) -> npt.NDArray[np.int32]:
        if len(generated) == 3:
            self.failure = "its structure cannot be followed: too complex"
        return mask(self, generated)

    monkeypatch.setattr(GrammarConstraint, "mask", failing)

    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            async with engine.stream("free", max_tokens=30, ignore_eos=True) as free:
                with pytest.raises(RequestFailedError, match="too complex"):
                    await engine.generate("bound", regex="[a-z]{10}")
                assert len((await free.result()).token_ids) == 30
            await idle.check()

    anyio.run(main)
