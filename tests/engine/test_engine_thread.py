"""What waits for the engine is refused on the engine's own thread, where it would wait for ever; the engine goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import trio

from asyncllm import LLM, EngineError, EngineState, WrongThreadError
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from asyncllm import StepRecord, TokenStream

PROMPT: Final = (5, 6, 7)
TOKENS: Final = 6


def says(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the scripted model says to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(HashedTokens()(tokens))
    return tuple(tokens[len(prompt) :])


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


async def _read_all(llm: LLM) -> None:
    async for _ in llm.engine.stream_all([PROMPT]):
        pass


# A loop of another kind can be run on the engine's thread, so the asynchronous calls are tried, too.
WAITING_CALLS: Final[dict[str, Callable[[LLM, TokenStream], object]]] = {
    "check_integrity": lambda llm, _: llm.engine.check_integrity(),
    "reset_prefix_cache": lambda llm, _: llm.engine.reset_prefix_cache(),
    "drain": lambda llm, _: llm.engine.drain(),
    "warmup": lambda llm, _: llm.engine.warmup(),
    "start_blocking": lambda llm, _: llm.engine.start_blocking(),
    "with engine": lambda llm, _: llm.engine.__enter__(),
    "check_nothing_left": lambda llm, _: check_nothing_left(llm.engine),
    "LLM.generate": lambda llm, _: llm.generate([PROMPT], progress=False),
    "LLM.stream": lambda llm, _: next(iter(llm.stream(PROMPT))),
    "LLM.chat": lambda llm, _: next(iter(llm.chat([{"role": "user", "content": "hi"}]))),
    "next_blocking": lambda _, stream: stream.next_blocking(),
    "check_integrity_async": lambda llm, _: trio.run(llm.engine.check_integrity_async),
    "reset_prefix_cache_async": lambda llm, _: trio.run(llm.engine.reset_prefix_cache_async),
    "drain_async": lambda llm, _: trio.run(llm.engine.drain_async),
    "warmup_async": lambda llm, _: trio.run(llm.engine.warmup_async),
    "start": lambda llm, _: trio.run(llm.engine.start),
    "generate": lambda llm, _: trio.run(llm.engine.generate, PROMPT),
    "generate_all": lambda llm, _: trio.run(llm.engine.generate_all, [PROMPT]),
    "generate_samples": lambda llm, _: trio.run(lambda: llm.engine.generate_samples(PROMPT, n=2)),
    "stream_all": lambda llm, _: trio.run(_read_all, llm),
    "async for": lambda _, stream: trio.run(_read, stream),
    "result": lambda _, stream: trio.run(stream.result),
}


def refused(call: Callable[[LLM, TokenStream], object], llm: LLM, neighbour: TokenStream, errors: list[str]) -> None:
    """Make a call that is to be refused, on the engine's thread; later turns of it do nothing."""
    if not errors:
        errors.append("nothing")
        try:
            call(llm, neighbour)
        except WrongThreadError as error:
            errors[0] = str(error)


@pytest.mark.parametrize("name", WAITING_CALLS)
def test_a_step_listener_cannot_wait_for_the_engine(name: str) -> None:
    model = ScriptedModel()
    with model.hold_at_step(0) as held, LLM("scripted", backend=model, debug_checks=True, seed=0) as llm:
        neighbour = llm.engine.stream([9, 9], max_tokens=TOKENS)
        errors: list[str] = []
        llm.engine.add_step_listener(lambda _: refused(WAITING_CALLS[name], llm, neighbour, errors))
        held.release()
        assert llm.generate([PROMPT], max_tokens=TOKENS, progress=False)[0].token_ids == says(PROMPT, TOKENS)
        assert "engine's own thread" in errors[0]
        assert llm.engine.state is EngineState.RUNNING
        neighbour.close()
        check_nothing_left(llm.engine)


@pytest.mark.parametrize("name", ["check_integrity", "drain", "LLM.generate", "next_blocking", "generate", "async for"])
def test_a_logits_hook_cannot_wait_for_the_engine(name: str) -> None:
    model = ScriptedModel()
    with model.hold_at_step(0) as held, LLM("scripted", backend=model, debug_checks=True, seed=0) as llm:
        neighbour = llm.engine.stream([9, 9], max_tokens=TOKENS)
        errors: list[str] = []

        def hook(_ids: Sequence[int], _logits: torch.Tensor) -> None:
            refused(WAITING_CALLS[name], llm, neighbour, errors)

        held.release()
        hooked = llm.generate([PROMPT], max_tokens=TOKENS, logits_hook=hook, progress=False)
        assert hooked[0].token_ids == says(PROMPT, TOKENS)
        assert "engine's own thread" in errors[0]
        neighbour.close()
        check_nothing_left(llm.engine)


def test_a_listener_may_do_what_does_not_wait() -> None:
    with LLM("scripted", backend=ScriptedModel(), debug_checks=True, seed=0) as llm:
        begun: list[TokenStream] = []
        states: list[EngineState] = []

        def listen(_record: StepRecord) -> None:
            if not begun:
                begun.append(llm.engine.stream(PROMPT, max_tokens=3))
                assert not llm.engine.abort("nobody")
            states.append(llm.engine.stats().state)

        remove = llm.engine.add_step_listener(listen)
        llm.generate([[1]], max_tokens=2, progress=False)
        ids = []
        while (token := begun[0].next_blocking()) is not None:
            ids.append(token.id)
        remove()
        assert tuple(ids) == says(PROMPT, 3)
        assert set(states) == {EngineState.RUNNING}


def test_another_engine_can_be_waited_for() -> None:
    """It has a thread of its own; only this one's steps stand meanwhile."""
    with (
        LLM("scripted", backend=ScriptedModel(), seed=0) as llm,
        LLM("scripted", backend=ScriptedModel(), seed=0) as other,
    ):
        answers: list[tuple[int, ...]] = []
        llm.engine.add_step_listener(
            lambda _: answers.append(other.generate([PROMPT], max_tokens=2, progress=False)[0].token_ids)
        )
        llm.generate([[1]], max_tokens=1, progress=False)
        assert answers == [says(PROMPT, 2)]


def test_the_refusal_is_an_engines_and_a_runtime_error() -> None:
    assert issubclass(WrongThreadError, EngineError)
    assert issubclass(WrongThreadError, RuntimeError)
