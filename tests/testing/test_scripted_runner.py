"""The scripted device: steps in order on a thread of its own, replies, and arranged faults."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from asyncllm.scheduler.batch import SAMPLED_LAST_STEP
from asyncllm.testing import vocabulary
from asyncllm.testing.faults import StepFaults
from asyncllm.testing.paged_tokens import PagedTokens
from asyncllm.testing.script import FunctionScript, HashedTokens, HashScript, Replies, ReplyScript, Script
from asyncllm.testing.scripted_model import ScriptedRunner
from helpers.batches import Row, make_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EOS = vocabulary.EOS_TOKEN_ID


@pytest.fixture
def faults() -> StepFaults:
    return StepFaults()


@pytest.fixture
def make_runner(faults: StepFaults) -> Iterator[Callable[[Script], ScriptedRunner]]:
    """Give the maker of runners with 4 slots of 4 pages of 8 tokens, slot s having pages 4s to 4s + 3."""
    runners: list[ScriptedRunner] = []

    def make(script: Script) -> ScriptedRunner:
        pages = PagedTokens(num_pages=16, page_size=8, num_slots=4, max_pages_per_request=4)
        runners.append(ScriptedRunner(pages, script, faults))
        table = [(slot, column, 4 * slot + column) for slot in range(4) for column in range(4)]
        runners[-1].launch(make_batch(0, [Row(0, 0, [0], sample=False)], table=table))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def say(runner: ScriptedRunner, prompt: str, *, count: int = 8, slot: int = 0, seed: int = 0) -> list[int]:
    """Run one request alone and return its tokens."""
    return go_on(runner, vocabulary.encode(prompt), count=count, slot=slot, seed=seed)


def go_on(runner: ScriptedRunner, tokens: Sequence[int], *, count: int = 8, slot: int = 0, seed: int = 0) -> list[int]:
    steps = [runner.launch(make_batch(1, [Row(slot, 0, tokens, seed=seed)]))]
    steps += [
        runner.launch(make_batch(1, [Row(slot, place, [SAMPLED_LAST_STEP], seed=seed)]))
        for place in range(len(tokens), len(tokens) + count - 1)
    ]
    return [step.result().token_ids[0] for step in steps]


def text(reply: str, count: int = 8) -> list[int]:
    return [*vocabulary.encode(reply), *[EOS] * count][:count]


@pytest.mark.parametrize("replies", [{"ping": "pong", "pi": "no"}, lambda prompt: {"ping": "pong"}[prompt]])
def test_a_prompt_gets_its_reply_and_then_end_of_sequence(
    make_runner: Callable[[Script], ScriptedRunner], replies: Replies
) -> None:
    runner = make_runner(ReplyScript(replies=replies, default=None))
    assert say(runner, "ping", count=7) == [*b"pong", EOS, EOS, EOS]


def test_a_reply_of_ids_is_given_exactly(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    runner = make_runner(ReplyScript(replies={"x": [0xF0, 0x9F, 7]}, default=None))
    assert say(runner, "x", count=4) == [0xF0, 0x9F, 7, EOS]


def test_an_unknown_prompt_gets_the_default(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    runner = make_runner(ReplyScript(replies={"x": "y"}, default="?"))
    assert say(runner, "anything", count=2) == text("?", 2)


def test_an_unknown_prompt_without_default_names_itself(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    runner = make_runner(ReplyScript(replies={"x": "y"}, default=None))
    with pytest.raises(LookupError, match=r"no reply for the prompt 'anything'.*'x'"):
        say(runner, "anything")


def test_an_id_outside_the_vocabulary_is_refused(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    runner = make_runner(ReplyScript(replies={"x": [vocabulary.VOCAB_SIZE]}, default=None))
    with pytest.raises(ValueError, match="must be from 0 to"):
        say(runner, "x")


def test_a_chat_is_answered_by_its_last_user_message(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    user, assistant = (vocabulary.VOCAB_SIZE - 3, vocabulary.VOCAB_SIZE - 2)
    first = [vocabulary.BOS_TOKEN_ID, user, *b"hi", EOS, assistant, *b"lo", EOS]
    runner = make_runner(ReplyScript(replies={"hi": "lo", "how": "so"}, default=None))
    assert go_on(runner, [*first, user, *b"how", EOS, assistant], count=3) == [*b"so", EOS]


def test_a_function_is_told_the_prompt_with_its_special_tokens(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return "ok"

    user, assistant = (vocabulary.VOCAB_SIZE - 3, vocabulary.VOCAB_SIZE - 2)
    go_on(
        make_runner(ReplyScript(replies=reply, default=None)),
        [vocabulary.BOS_TOKEN_ID, user, *"ä".encode(), EOS, assistant],
    )
    assert seen == ["<|user|>ä<|end|><|assistant|>"]


def test_the_same_prompt_again_is_asked_again(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    """So that a function may answer a retry differently."""
    answers = iter(["first", "second"])
    runner = make_runner(ReplyScript(replies=lambda _: next(answers), default=None))
    assert [say(runner, "x"), say(runner, "x")] == [text("first"), text("second")]


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_continues_a_whole_reply_is_a_new_prompt(
    make_runner: Callable[[Script], ScriptedRunner], count: int
) -> None:
    """Whether the reply ended by its length or by its end."""
    runner = make_runner(ReplyScript(replies={"a": "b", "ab": "c"}, default=None))
    assert [say(runner, "a", count=count), say(runner, "ab", count=2)] == [text("b", count), text("c", 2)]


def test_a_reply_cut_short_goes_on_in_another_slot_under_its_seed(
    make_runner: Callable[[Script], ScriptedRunner],
) -> None:
    """A parked request comes back with what it said as part of its prompt."""
    runner = make_runner(ReplyScript(replies={"ask": "answer"}, default="new"))
    said = say(runner, "ask", count=3, seed=5)
    say(runner, "another", slot=0, seed=6)
    assert go_on(runner, [*b"ask", *said], slot=2, seed=5, count=4) == [*b"wer", EOS]
    assert go_on(runner, [*b"ask", *said], slot=3, seed=7, count=4) == [*b"new", EOS]


def test_many_replies_leave_bounded_memory(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    script = ReplyScript(replies={}, default="x")
    runner = make_runner(script)
    for seed in range(5000):
        step = runner.launch(make_batch(1, [Row(0, 0, [65], seed=seed)]))
    step.result()
    assert len(script._by_key) <= 4096


def test_a_function_of_the_tokens_sees_the_whole_sequence(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    runner = make_runner(FunctionScript(len))
    assert say(runner, "abc", count=3) == [3, 4, 5]


def test_hashed_tokens_are_the_same_by_row_and_by_function(make_runner: Callable[[Script], ScriptedRunner]) -> None:
    hashed = HashedTokens(eos_one_in=3)
    expected = list(b"ab")
    for _ in range(12):
        expected.append(hashed(expected))
    assert say(make_runner(HashScript(hashed)), "ab", count=12) == expected[2:]
    assert EOS in expected
    assert set(expected) - {EOS} <= set(range(32, 127))


def test_hashed_tokens_differ_after_any_difference() -> None:
    hashed = HashedTokens()
    base = list(range(40, 60))
    changed = [[*base[:place], 99, *base[place + 1 :]] for place in range(len(base))]
    swapped = [base[1], base[0], *base[2:]]
    assert len({hashed([*tokens, extra]) for tokens in [base, swapped, *changed] for extra in range(9)}) > 50
    assert [hashed([*swapped, extra]) for extra in range(9)] != [hashed([*base, extra]) for extra in range(9)]


def test_steps_end_in_launch_order_and_call_back_once(
    make_runner: Callable[[Script], ScriptedRunner], faults: StepFaults
) -> None:
    runner = make_runner(HashScript(HashedTokens()))
    order: list[int] = []
    last = threading.Event()
    with faults.hold(1, patience_seconds=60) as held:
        steps = [runner.launch(make_batch(i, [Row(0, 0, [65, 66])])) for i in range(3)]
        for place, step in enumerate(steps):
            assert step.call_when_done(lambda place=place: order.append(place))  # type: ignore[misc]
        steps[-1].call_when_done(last.set)
        held.wait_reached()
        assert [step.done() for step in steps] == [False] * 3
        assert order == []
    assert last.wait(300)
    assert order == [0, 1, 2]
    steps[0].call_when_done(lambda: order.append(9))
    assert order == [0, 1, 2, 9]
    assert [step.result().index for step in steps] == [0, 1, 2]


def test_a_failing_step_raises_where_its_result_is_read_and_then_the_next_one_runs(
    make_runner: Callable[[Script], ScriptedRunner], faults: StepFaults
) -> None:
    """What was launched behind it is not run: it counts on what the failed one did not do."""
    runner = make_runner(HashScript(HashedTokens()))
    faults.fail(2, MemoryError("device"))
    steps = [runner.launch(make_batch(i, [Row(0, 0, [65])])) for i in range(3)]
    steps[1].wait()
    with pytest.raises(MemoryError, match="device"):
        steps[1].result()
    with pytest.raises(RuntimeError, match="step 2 was not run: the step before it failed"):
        steps[2].result()
    assert len(steps[0].result().token_ids) == 1
    assert len(runner.launch(make_batch(3, [Row(0, 0, [65])])).result().token_ids) == 1


def test_close_lets_held_steps_go_and_runs_what_is_launched(
    make_runner: Callable[[Script], ScriptedRunner], faults: StepFaults
) -> None:
    runner = make_runner(HashScript(HashedTokens()))
    held = [faults.hold(1, patience_seconds=60), faults.hold(3, patience_seconds=60)]
    steps = [runner.launch(make_batch(i, [Row(0, 0, [65])])) for i in range(3)]
    held[0].wait_reached()
    runner.close()
    runner.close()
    assert all(step.done() for step in steps)


def test_only_the_spoilt_row_is_not_finite_and_only_once(
    make_runner: Callable[[Script], ScriptedRunner], faults: StepFaults
) -> None:
    runner = make_runner(HashScript(HashedTokens()))
    faults.spoil((65, 66), 1)
    runner.launch(make_batch(1, [Row(0, 0, [65, 66]), Row(1, 0, [65, 67])]))
    second = make_batch(2, [Row(1, 2, [SAMPLED_LAST_STEP]), Row(0, 2, [SAMPLED_LAST_STEP])])
    assert runner.launch(second).result().finite == (True, False)
    assert not faults.spoils
