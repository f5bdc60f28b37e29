"""A scripted model behind a real engine: what users' tests see."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import types
import weakref
from typing import TYPE_CHECKING

import pytest

from asyncllm import (
    ConfigurationError,
    EngineFailedError,
    EngineState,
    RequestFailedError,
)
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left, scripted_engine, vocabulary
from asyncllm.testing import engines as engines_module
from asyncllm.testing.engines import collect_garbage
from asyncllm.testing.tokenizer import make_tokenizer
from helpers.loops import both_loops, on_loop

if TYPE_CHECKING:
    from collections.abc import Callable


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode()


@both_loops
def test_a_prompt_gets_its_reply(library: str) -> None:
    async def main() -> None:
        async with scripted_engine({"ping": "pong", "naïve": "🙂"}, default="?") as engine:
            assert [(await engine.generate(prompt)).text for prompt in ("ping", "naïve", "else")] == ["pong", "🙂", "?"]
            async with engine.stream("ping") as stream:
                tokens = [token async for token in stream]
            assert [token.text for token in tokens] == ["p", "o", "n", "g", ""]
            assert stream.finish_reason == "stop"
            check_nothing_left(engine)

    on_loop(library, main)


def test_a_chat_is_answered_by_its_last_message() -> None:
    async def main() -> None:
        async with scripted_engine({"hi": "hello", "how?": "so"}) as engine:
            first = [{"role": "user", "content": "hi"}]
            assert (await engine.chat(first).result()).text == "hello"
            later = [*first, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "how?"}]
            assert (await engine.chat(later).result()).text == "so"

    asyncio.run(main())


def test_a_chat_can_go_on_with_its_last_message() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hel"}]
    ids = make_tokenizer().render_chat(messages, continue_final_message=True)
    assert vocabulary.prompt_text(ids) == "<|user|>hi<|end|><|assistant|>hel"


def test_the_tokenizer_has_one_token_per_byte_and_begins_a_prompt_once() -> None:
    tokenizer = make_tokenizer()
    text = "".join(map(chr, [*range(256), 0x4E16, 0x1F642]))
    assert tokenizer.encode(text) == [vocabulary.BOS_TOKEN_ID, *text.encode()]
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.vocab_size == vocabulary.VOCAB_SIZE
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [vocabulary.EOS_TOKEN_ID]
    assert tokenizer.eos_token_ids == {vocabulary.EOS_TOKEN_ID}
    assert tokenizer.render_chat([{"role": "user", "content": "<|end|>"}]).count(vocabulary.EOS_TOKEN_ID) == 1


def test_without_replies_a_prompt_gets_the_same_hashed_text_each_time() -> None:
    hashed = HashedTokens()
    with scripted_engine() as engine:
        expected = [7, 8]
        for _ in range(20):
            expected.append(hashed(expected))
        for _ in range(2):
            completion = asyncio.run(engine.generate([7, 8], max_tokens=20))
            assert list(completion.token_ids) == expected[2:]
            assert completion.text == text_of(expected[2:])


def test_a_function_of_the_tokens_decides() -> None:
    model = ScriptedModel(next_token=lambda tokens: tokens[-1] + 1)
    with scripted_engine(model) as engine:
        assert asyncio.run(engine.generate("a", max_tokens=4)).text == "bcde"


def test_ignore_eos_goes_on_with_end_tokens() -> None:
    with scripted_engine({"a": "b"}) as engine:
        completion = asyncio.run(engine.generate("a", max_tokens=4, ignore_eos=True))
    assert completion.token_ids == (ord("b"), *[ScriptedModel.end_token_id] * 3)
    assert completion.text == "b"


@both_loops
def test_a_held_step_stands_until_it_is_released(library: str) -> None:
    async def main() -> None:
        model = ScriptedModel(default="yes")
        async with scripted_engine(model) as engine:
            with model.hold_at_step() as held:
                stream = engine.stream("a")
                await held.reached()
                held.wait_reached(0)
                assert engine.stats().generated_tokens == 0
            assert (await stream.result()).text == "yes"

    on_loop(library, main)


def test_a_held_step_that_is_not_reached_says_so() -> None:
    with pytest.raises(TimeoutError):
        ScriptedModel().hold_at_step(3).wait_reached(0)


def test_a_held_step_that_nobody_releases_fails_instead_of_hanging() -> None:
    model = ScriptedModel()
    with scripted_engine(model) as engine:
        held = model.hold_at_step(0, patience_seconds=0.01)
        assert len(asyncio.run(engine.generate("a", max_tokens=3)).token_ids) == 3  # the step is tried again
        held.wait_reached()


def test_failing_steps_fail_the_engine_and_a_new_start_works() -> None:
    async def main() -> None:
        model = ScriptedModel(default="yes")
        engine = scripted_engine(model)
        async with engine:
            model.fail_from_step(1, MemoryError("no memory on the device"))
            with pytest.raises(EngineFailedError, match="no memory on the device") as caught:
                await engine.generate("a")
            assert isinstance(caught.value.__cause__, MemoryError)
            assert engine.state is EngineState.FAILED
            check_nothing_left(engine)
        async with engine:
            assert (await engine.generate("a")).text == "yes"

    asyncio.run(main())


def test_a_prompt_without_reply_is_told_by_name() -> None:
    with scripted_engine({"a": "b"}) as engine, pytest.raises(EngineFailedError, match="no reply for the prompt 'x'"):
        asyncio.run(engine.generate("x"))


def test_a_token_that_is_not_finite_fails_its_request_alone() -> None:
    async def main() -> None:
        model = ScriptedModel({"good": "fine", "bad": "never"})
        model.not_finite_at("bad", token=2)
        async with scripted_engine(model) as engine:
            good, bad = engine.stream("good"), engine.stream("bad")
            assert (await good.result()).text == "fine"
            assert [(await anext(bad)).text for _ in range(2)] == ["n", "e"]
            with pytest.raises(RequestFailedError):
                await anext(bad)
            assert (await engine.generate("bad")).text == "never"
            check_nothing_left(engine)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ScriptedModel({"a": "b"}, next_token=len), "not both"),
        (lambda: ScriptedModel(lambda _: "b", default="c"), "a function answers every prompt"),
        (lambda: ScriptedModel(next_token=len, default="c"), "a function answers every prompt"),
        (lambda: ScriptedModel(step_seconds=-1.0), "step_seconds must be"),
        (lambda: HashedTokens(eos_one_in=-1), "eos_one_in must be"),
        (lambda: scripted_engine(ScriptedModel(), default="c"), "give the default to the ScriptedModel"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_settings_apply_as_with_any_model() -> None:
    with scripted_engine(kv_pool_tokens=64, page_size=4, max_model_tokens=32) as engine:
        assert engine.stats().total_pages == 16
    with pytest.raises(ConfigurationError, match="multiple of the page size"), scripted_engine(kv_pool_tokens=65):
        pass
    with pytest.raises(TypeError, match="pages"):
        scripted_engine(pages=3)


def test_a_request_that_was_left_is_found() -> None:
    async def main() -> None:
        async with scripted_engine(ScriptedModel(step_seconds=0.01)) as engine:  # it runs for 9 s, if it is not found
            stream = engine.stream("a", max_tokens=900)
            with pytest.raises(AssertionError, match="1 requests run and 0 wait"):
                check_nothing_left(engine)
            await stream.aclose()
            check_nothing_left(engine)

    asyncio.run(main())


def test_a_cycle_is_freed_though_another_thread_was_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile `gc.collect` returns at once."""

    class Held:
        itself: Held

    collecting, tried = threading.Event(), threading.Event()

    def stand(phase: str, _: object) -> None:
        if phase == "start" and threading.current_thread() is other:
            collecting.set()
            tried.wait(300)

    def sleep(seconds: float) -> None:
        tried.set()
        time.sleep(seconds)

    patched = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(engines_module, "time", patched)
    other = threading.Thread(target=gc.collect)
    gc.callbacks.append(stand)
    try:
        other.start()
        collecting.wait(300)
        held = Held()
        held.itself = held
        gone = weakref.ref(held)
        del held
        collect_garbage()
        assert tried.is_set()
        assert gone() is None
    finally:
        gc.callbacks.remove(stand)
        tried.set()
        other.join()
