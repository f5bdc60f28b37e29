"""Iterators that never end, errors that reach the wrong reader or none, and inputs that no one thought of.

One test for each kind of fault that engines of this kind were reported for; long, since they are one list.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncllm import (
    LLM,
    EngineFailedError,
    EngineState,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
    SamplingParams,
)
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left, scripted_engine
from helpers.engines import POOL, TinyModelFolder, each_model, small_engine
from helpers.idle import Idle, live_records
from helpers.loops import both_loops, on_loop

if TYPE_CHECKING:
    from asyncllm import Completion
    from asyncllm.backend import OpenBackend, Progress
    from asyncllm.config import EngineConfig
    from asyncllm.text.decoding import DecodeStream
    from asyncllm.text.tokenizer import Tokenizer

PROMPT = [10, 11, 12, 13, 14]


@each_model
@both_loops
def test_interleaved_streams_each_end_once_in_their_own_order(
    library: str, kind: str, tiny_model: TinyModelFolder
) -> None:
    """B22: fifty streams of random lengths, each with one last token, and nothing after it."""

    async def main() -> None:
        rng = random.Random(22)
        async with small_engine(kind, tiny_model) as engine:
            idle = await Idle.watch(engine)
            lengths = [rng.randint(1, 30) for _ in range(50)]

            async def check(place: int) -> None:
                stream = engine.stream([place, 7], max_tokens=lengths[place], ignore_eos=True)
                tokens = [token async for token in stream]
                assert [token.index for token in tokens] == list(range(lengths[place]))
                assert [token.finish_reason for token in tokens] == [None] * (lengths[place] - 1) + ["length"]
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                alone = await engine.generate([place, 7], max_tokens=lengths[place], ignore_eos=True)
                assert tuple(token.id for token in tokens) == alone.token_ids

            async with anyio.create_task_group() as tasks:
                for place in range(50):
                    tasks.start_soon(check, place)
            await idle.check()

    on_loop(library, main)


@both_loops
def test_an_engine_may_be_idle_before_its_first_request(library: str) -> None:
    """B23."""

    async def main() -> None:
        async with scripted_engine({"a": "b"}) as engine:
            for _ in range(20):
                await engine.check_integrity_async()
            assert engine.stats().steps == 0
            assert engine.stats().last_step_age_seconds is None
            assert (await engine.generate("a")).text == "b"

    on_loop(library, main)


@both_loops
def test_a_failed_step_reaches_every_reader_and_every_later_call(library: str) -> None:
    """B24, B38: as many errors as readers, running and waiting; the cause chained; the engine opens again."""

    async def main() -> None:
        model = ScriptedModel()
        engine = scripted_engine(model, max_running_requests=5)
        async with engine:
            model.fail_from_step(3, MemoryError("simulated: out of device memory"))
            outcomes: list[Exception] = []

            async def read(place: int) -> None:
                try:
                    await engine.generate([place] * 3, max_tokens=50)
                except EngineFailedError as error:
                    outcomes.append(error)

            async with anyio.create_task_group() as tasks:
                for place in range(20):
                    tasks.start_soon(read, place)
            assert len(outcomes) == 20
            assert len({id(error) for error in outcomes}) == 20, "each reader gets an error of its own"
            assert all(isinstance(error.__cause__, MemoryError) for error in outcomes)
            with pytest.raises(EngineFailedError) as caught:
                engine.stream(PROMPT)
            assert isinstance(caught.value.__cause__, MemoryError)
        assert engine.state is EngineState.CLOSED
        async with engine:
            assert len((await engine.generate(PROMPT, max_tokens=5)).token_ids) == 5
            check_nothing_left(engine)

    on_loop(library, main)


class Panic(BaseException):
    """As native code raises when it panics: no `Exception`."""


class FaultyTokenizer:
    """A tokenizer that raises for texts with "boom", and in whose completions the byte of "!" has no text.

    It panics for "panic" and the byte of "?".
    """

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: bool) -> list[int]:
        """Raise for some texts."""
        if "boom" in text:
            raise ZeroDivisionError("simulated: no such merge")
        if "panic" in text:
            raise Panic("simulated")
        return self._inner.encode(text, **options)

    def decode_stream(self, *, skip_special_tokens: bool) -> FaultyDecodeStream:
        """Raise for some tokens, later."""
        return FaultyDecodeStream(self._inner.decode_stream(skip_special_tokens=skip_special_tokens))


class FaultyDecodeStream:
    """See `FaultyTokenizer`."""

    def __init__(self, inner: DecodeStream) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the inner one has
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: object, **options: object) -> object:
            if ord("!") in arguments:
                raise ZeroDivisionError("simulated: no such piece")
            if ord("?") in arguments:
                raise Panic("simulated")
            return attribute(*arguments, **options)

        return call


class FaultyTextModel(ScriptedModel):
    """A scripted model with a faulty tokenizer."""

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """See `Backend`."""
        opened = super().open(config, progress)
        assert opened.tokenizer is not None
        return dataclasses.replace(opened, tokenizer=FaultyTokenizer(opened.tokenizer))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ("boom" + "x" * 3000, ZeroDivisionError),
        ("bad", ZeroDivisionError),
        ("panic" + "x" * 3000, Panic),
        ("worse", Panic),
    ],
    ids=["tokenizing", "detokenizing", "panic tokenizing", "panic detokenizing"],
)
@both_loops
def test_a_fault_in_one_requests_text_reaches_its_stream_only(
    library: str, prompt: str, cause: type[BaseException]
) -> None:
    """B25: in the thread that tokenizes long texts, and in the engine's thread."""

    async def main() -> None:
        model = FaultyTextModel({"good": "fine", "bad": "oh!no", "worse": "oh?no"})
        async with scripted_engine(model) as engine:
            good = engine.stream("good")
            bad = engine.stream(prompt)
            with pytest.raises(RequestFailedError) as caught:
                await bad.result()
            assert isinstance(caught.value.__cause__, cause)
            assert caught.value.request_id == bad.request_id
            assert (await good.result()).text == "fine"
            assert (await engine.generate("good")).text == "fine"
            check_nothing_left(engine)

    on_loop(library, main)


def test_a_fault_in_tokenizing_a_short_text_is_raised_at_the_call() -> None:
    """B25: where the caller can see it."""
    with scripted_engine(FaultyTextModel({"good": "fine"})) as engine:
        with pytest.raises(ZeroDivisionError):
            engine.stream("boom")
        check_nothing_left(engine)


@each_model
def test_repeated_batches_are_independent(kind: str, tiny_model: TinyModelFolder) -> None:
    """B26: the second call gives what the first gave."""

    async def main() -> None:
        async with small_engine(kind, tiny_model) as engine:
            idle = await Idle.watch(engine)
            config = engine.model_config
            prompts = [[place, 3, place] for place in range(12)]
            first, second = [await engine.generate_all(prompts, max_tokens=6, ignore_eos=True) for _ in range(2)]
            assert [c.token_ids for c in first] == [c.token_ids for c in second]
            assert engine.model_config == config
            await idle.check()

    asyncio.run(main())


def test_a_fault_in_the_prefix_cache_ends_the_engine_for_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """B27: nobody hangs, and the engine says what happened; it is not clear any more whose pages are whose."""

    async def main() -> None:
        engine = scripted_engine()
        async with engine:
            opening = engine._life.opening
            assert opening is not None
            cache = opening.loop._cache
            store = cache.store

            def faulty_store(pages: Any, tokens: Any, namespace: str) -> None:  # noqa: ANN401
                if namespace == "faulty":
                    raise ZeroDivisionError("simulated: a broken tree")
                store(pages, tokens, namespace)

            monkeypatch.setattr(cache, "store", faulty_store)
            others = [engine.stream([place] * 20, max_tokens=400, buffer_tokens=8) for place in range(4)]
            for stream in others:
                await anext(stream)
            with pytest.raises(EngineFailedError, match="a broken tree"):
                await engine.generate(PROMPT, cache_namespace="faulty")
            for stream in others:
                with pytest.raises(EngineFailedError, match="a broken tree"):
                    await stream.result()
        async with engine:
            assert len((await engine.generate(PROMPT, max_tokens=5)).token_ids) == 5

    asyncio.run(main())


def test_all_kinds_of_requests_run_in_one_batch(tiny_model: TinyModelFolder) -> None:
    """B28: each with the tokens that it has alone."""
    kinds = [
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=6, temperature=1.0, seed=1),
        SamplingParams(max_tokens=6, temperature=0.7, top_k=3, seed=2),
        SamplingParams(max_tokens=6, temperature=1.3, top_p=0.8, min_p=0.01, seed=3),
        SamplingParams(max_tokens=6, stop=["e", "Paris"]),
        SamplingParams(max_tokens=6, stop_token_ids=[17, 40]),
    ]

    async def main() -> None:
        async with small_engine("tiny", tiny_model) as engine:
            idle = await Idle.watch(engine)
            alone = [await engine.generate(PROMPT, params) for params in kinds]
            together = await engine.generate_all([PROMPT] * len(kinds), kinds)
            assert [summary(one) for one in together] == [summary(one) for one in alone]
            await idle.check()

    asyncio.run(main())


def summary(completion: Completion) -> tuple[object, ...]:
    """What must not depend on neighbours."""
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 48])
@each_model
def test_the_same_prompt_again_is_answered_again(kind: str, length: int, tiny_model: TinyModelFolder) -> None:
    """B30, B59: a whole hit leaves the last prompt token to compute, also where pages end."""

    async def main() -> None:
        async with small_engine(kind, tiny_model, page_size=16) as engine:
            idle = await Idle.watch(engine)
            prompt = list(range(40, 40 + length))
            answers = [await engine.generate(prompt, max_tokens=5, ignore_eos=True) for _ in range(3)]
            assert len({answer.token_ids for answer in answers}) == 1
            assert [answer.usage.cached_tokens for answer in answers] == [0, length - 1, length - 1]
            await idle.check()

    asyncio.run(main())


@both_loops
def test_a_request_id_is_used_by_one_live_request(library: str) -> None:
    """B31: the second is refused, the first goes on, and afterwards the id is free."""

    async def main() -> None:
        async with scripted_engine() as engine:
            first = engine.stream(PROMPT, max_tokens=50, request_id="a", buffer_tokens=8)  # paused until it is read
            with pytest.raises(InvalidRequestError, match="'a' is in use") as caught:
                engine.stream(PROMPT, request_id="a")
            assert isinstance(caught.value, ValueError)
            assert len((await first.result()).token_ids) == 50
            assert (await engine.generate(PROMPT, max_tokens=1, request_id="a")).request_id == "a"
            check_nothing_left(engine)

    on_loop(library, main)


@each_model
def test_odd_prompts_touch_nobody_else(kind: str, tiny_model: TinyModelFolder) -> None:
    """B32: nothing, white space, special tokens only: answered, or refused to their caller alone."""

    async def main() -> None:
        async with small_engine(kind, tiny_model) as engine:
            idle = await Idle.watch(engine)
            neighbour = engine.stream(PROMPT, max_tokens=60, ignore_eos=True)
            await anext(neighbour)
            with pytest.raises(InvalidRequestError, match="no tokens"):
                engine.stream([])
            if kind == "tiny":  # its tokenizer begins texts with nothing
                with pytest.raises(InvalidRequestError, match="no tokens"):
                    engine.stream("")
            else:
                assert (await engine.generate("", max_tokens=2)).usage.prompt_tokens == 1
            assert engine.tokenizer is not None
            special = sorted(engine.tokenizer.eos_token_ids)
            for prompt in (" ", "\n\n\t", special, special * 40):
                completion = await engine.generate(prompt, max_tokens=2, ignore_eos=True)
                assert completion.usage.completion_tokens == 2
            with pytest.raises(InvalidRequestError, match="outside of the vocabulary"):
                engine.stream([-1])
            with pytest.raises(InvalidRequestError, match="outside of the vocabulary"):
                engine.stream([10**6])
            assert len((await neighbour.result()).token_ids) == 60
            await idle.check()

    asyncio.run(main())


def test_one_limit_decides_what_fits(tiny_model: TinyModelFolder) -> None:
    """B34: a context above the pool; a prompt just above what fits is refused at the call, with both numbers."""
    for kind in ("scripted", "tiny"):
        with small_engine(kind, tiny_model, kv_pool_tokens=128, page_size=16, max_model_tokens=400) as engine:
            with pytest.raises(PromptTooLongError, match="129") as caught:
                engine.stream([7] * 128, max_tokens=2)
            assert (caught.value.prompt_tokens, caught.value.pool_tokens) == (128, 128)
            assert engine.stats().waiting == 0
            completion = asyncio.run(engine.generate([7] * 128, max_tokens=1))
            assert completion.usage.completion_tokens == 1
            check_nothing_left(engine)


@pytest.mark.parametrize("max_tokens", [64, 65, 10**9])
def test_a_prompt_is_never_cut_for_its_max_tokens(max_tokens: int) -> None:
    """B35: what does not fit the context is refused; what is not said is cut to the room."""
    with scripted_engine(max_model_tokens=64) as engine:
        with pytest.raises(PromptTooLongError, match=str(max_tokens)):
            engine.stream([7] * 10, max_tokens=max_tokens)
        completion = asyncio.run(engine.generate([7] * 10))
        assert completion.usage.prompt_tokens == 10
        assert completion.usage.completion_tokens == completion.usage.max_tokens == 54
        check_nothing_left(engine)


def test_no_tokens_at_all_are_refused() -> None:
    """B37: `max_tokens=0` is an error by name, and holds nothing."""
    with scripted_engine(None, default=None, **POOL) as engine:
        for call in (engine.stream, engine.generate):
            with pytest.raises(InvalidRequestError, match="max_tokens must be an integer >= 1, not 0"):
                asyncio.run(_await(call(PROMPT, max_tokens=0)))
        check_nothing_left(engine)


async def _await(call: Any) -> None:  # noqa: ANN401  # a stream, or a coroutine
    await (call if asyncio.iscoroutine(call) else call.result())


def test_a_failed_device_leaves_the_process_and_other_engines_alone() -> None:
    """B38: the interpreter lives, the engine closes, and one beside it goes on."""

    async def main() -> None:
        model = ScriptedModel()
        async with scripted_engine() as other, scripted_engine(model) as engine:
            model.fail_from_step(0, MemoryError("simulated: out of device memory"))
            stream = other.stream(PROMPT, max_tokens=30)
            with pytest.raises(EngineFailedError):
                await engine.generate(PROMPT)
            await engine.aclose()
            assert len((await stream.result()).token_ids) == 30

    asyncio.run(main())


def test_the_blocking_face_gives_what_the_engine_gives() -> None:
    """B66: same tokens and texts, by stream, by batch, and by the blocking call."""
    hashed = HashedTokens()
    tokens = list(PROMPT)
    for _ in range(7):
        tokens.append(hashed(tokens))
    expected = tuple(tokens[len(PROMPT) :])
    with LLM("scripted", backend=ScriptedModel(), max_running_requests=8) as llm:
        (batch,) = llm.generate([PROMPT], SamplingParams(max_tokens=7))
        streamed = tuple(token.id for token in llm.stream(PROMPT, max_tokens=7))
        check_nothing_left(llm.engine)
    assert batch.token_ids == streamed == expected
    assert batch.text == bytes(expected).decode()


def test_nothing_is_kept_of_requests_that_ended_while_another_runs() -> None:
    """B106: not even their deadlines, though an earlier one is still to come."""

    async def main() -> None:
        async with scripted_engine(kv_pool_tokens=8192) as engine:
            async with engine.stream([1], max_tokens=8000, timeout=100) as long:
                await anext(long)
                for _ in range(200):
                    await engine.generate([2], max_tokens=1, timeout=1000)
                assert live_records(engine) <= 10
                opening = engine._life.opening
                assert opening is not None
                assert len(opening.loop._live._deadlines) <= 70
            check_nothing_left(engine)

    asyncio.run(main())
