"""Function calls in answers, in each way that models write them, however the answer is cut into pieces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from asyncllm.outputs import ToolCall
from asyncllm.testing.tokenizer import make_tokenizer
from asyncllm.text.advance import TextProgress
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.tool_calls import ToolCallParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.outputs import ToolCallDelta

TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"name": "add", "parameters": {"type": "object"}},
]
NESTED: Final = '{"city": "Zür\\"ich {", "days": [1, {"a": []}], "none": null}'

# An answer, its content, and its calls.
ANSWERS: Final[dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]]] = {
    "no call": ("Plain text, 1 < 2, [TOOL and <tool_ are not calls.", "", []),
    "Hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        "",
        [("weather", {"city": "Bern"})],
    ),
    "Hermes, two amid text": (
        'I look.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call> and '
        '<tool_call>{"arguments": ' + NESTED + ', "name": "weather"}</tool_call>\ndone',
        "I look.\n and \ndone",
        [("add", {"a": 1, "b": 2}), ("weather", json.loads(NESTED))],
    ),
    "Hermes, arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", {"a": 1})],
    ),
    "Hermes, none": ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    "Hermes, broken": (
        'a<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>b',
        'a<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>b',
        [],
    ),
    "Hermes, no object": ("<tool_call>soon</tool_call>", "<tool_call>soon</tool_call>", []),
    "Hermes, cut": (
        'a <tool_call>{"name": "add", "arguments": {"a": 1',
        'a <tool_call>{"name": "add", "arguments": {"a": 1',
        [],
    ),
    "Mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "weather", "arguments": {}}]',
        "",
        [("add", {"a": 1}), ("weather", {})],
    ),
    "Mistral, newer": (
        'Well.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]weather{"city": "Bern"}',
        "Well.",
        [("add", {"a": 1}), ("weather", {"city": "Bern"})],
    ),
    "Mistral, broken": ("[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
    "Llama": ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    "Llama, two": (
        ' {"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "weather", "parameters": {}}',
        "",
        [("add", {"a": 1}), ("weather", {})],
    ),
    "Llama, tagged": ('<|python_tag|>{"name": "other", "parameters": {"a": 1}}', "", [("other", {"a": 1})]),
    "Llama, code": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "an object of another kind": ('{"answer": 3, "name": "add"}', '{"answer": 3, "name": "add"}', []),
    "a function that there is not": ('{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
    "an object later on": ('So: {"name": "add", "parameters": {}}', 'So: {"name": "add", "parameters": {}}', []),
    "an object, cut": ('{"name": "add", "param', '{"name": "add", "param', []),
}
each_answer: Final = pytest.mark.parametrize("name", list(ANSWERS))


def parser() -> ToolCallParser:
    """Return a parser for a model without such special tokens."""
    return ToolCallParser(make_tokenizer(), TOOLS, skip_special_tokens=True, request_id="r")


def read(pieces: Sequence[str]) -> tuple[str, list[ToolCall], list[ToolCallDelta]]:
    """Parse an answer that comes in pieces."""
    parsing = parser()
    steps = [*(parsing.add(0, piece) for piece in pieces), parsing.finish()]
    content = "".join(step.content for step in steps)
    assert content == "".join(parsing.content)
    return content, parsing.calls, [delta for step in steps for delta in step.deltas]


def expected_content(name: str) -> str:
    """Return the content that an answer has."""
    answer, content, calls = ANSWERS[name]
    return content if calls or content else answer if name == "no call" else content


@each_answer
def test_calls_and_content_are_told_apart(name: str) -> None:
    answer, _, calls = ANSWERS[name]
    for pieces in ([answer], list(answer)):
        content, found, _ = read(pieces)
        assert content == expected_content(name)
        assert [(call.name, call.arguments) for call in found] == calls


@given(data=st.data())
@settings(max_examples=80)
def test_how_an_answer_is_cut_into_pieces_changes_nothing(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(ANSWERS)))
    answer = ANSWERS[name][0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    content, calls, _ = read(pieces)
    whole, whole_calls, _ = read([answer])
    assert (content, calls) == (whole, whole_calls)


@each_answer
def test_parts_of_a_call_are_told_as_they_come_and_join_to_it(name: str) -> None:
    _, calls, deltas = read(list(ANSWERS[name][0]))
    for index, call in enumerate(calls):
        parts = [delta for delta in deltas if delta.index == index]
        assert [part.name for part in parts] == [call.name] + [None] * (len(parts) - 1)
        text = "".join(part.arguments for part in parts)
        arguments = json.loads(text) if text else {}
        assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == call.arguments


def test_a_part_is_told_before_the_call_is_complete() -> None:
    parsing = parser()
    assert parsing.add(0, '<tool_call>{"na').deltas == ()
    (named,) = parsing.add(0, 'me": "add", "argum').deltas
    assert (named.index, named.name, named.arguments) == (0, "add", "")
    (more,) = parsing.add(0, 'ents": {"a": 1').deltas
    assert (more.index, more.name, more.arguments) == (0, None, '{"a": 1')
    assert parsing.calls == []


def test_text_that_cannot_begin_a_call_is_not_held_back() -> None:
    parsing = parser()
    assert parsing.add(0, "Hello").content == "Hello"
    assert parsing.add(0, " <tool").content == " "
    assert parsing.add(0, "s>").content == "<tools>"


def test_an_object_that_is_no_call_is_not_held_back_to_its_end() -> None:
    parsing = parser()
    assert parsing.add(0, '{"answer": ').content == '{"answer": '
    assert parsing.add(0, "1").content == "1"


def test_marks_that_are_special_tokens_count_though_their_text_is_left_out() -> None:
    raw = make_tokenizer()._raw
    raw.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    tokenizer = Tokenizer(raw)
    mark = raw.token_to_id("[TOOL_CALLS]")
    for skipped in (True, False):
        parsing = ToolCallParser(tokenizer, TOOLS, skip_special_tokens=skipped, request_id="r")
        parsing.add(0, "Well.")
        assert mark is not None
        parsing.add(mark, "" if skipped else "[TOOL_CALLS]")
        parsing.add(0, '[{"name": "add", "arguments": {"a": 1}}]')
        parsing.finish()
        assert [call.name for call in parsing.calls] == ["add"]
        assert "".join(parsing.content) == "Well."


@pytest.mark.parametrize("stop", ["Well.!", "}}}"])
def test_text_that_may_begin_a_stop_stays_on_its_side_of_a_mark(stop: str) -> None:
    """A mark's own text is left out, so the stop text looks for what follows it, and the call must not."""
    raw = make_tokenizer()._raw
    raw.add_special_tokens([AddedToken(mark, special=True) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer = Tokenizer(raw)
    ids = tokenizer.encode(
        'Well.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>!', add_special_tokens=False
    )
    text = TextProgress(
        tokenizer,
        (),
        stop_texts=[stop],
        stop_ids=(),
        eos_token_ids=(),
        include_stop=False,
        skip_special_tokens=True,
        max_tokens=len(ids),
        tools=ToolCallParser(tokenizer, TOOLS, skip_special_tokens=True, request_id="r"),
    )
    steps = [text.advance(token_id) for token_id in ids]
    assert text.tools is not None
    assert [(call.name, call.arguments) for call in text.tools.calls] == [("add", {"a": 1})]
    assert "".join(step.content or "" for step in steps) == "Well.!"
    assert "".join(step.text for step in steps) == 'Well.{"name": "add", "arguments": {"a": 1}}!'
    assert steps[-1].finish_reason == "length"


def test_each_call_has_an_id_of_its_own_that_a_repetition_has_too() -> None:
    _, calls, _ = read(['[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]'])
    _, again, _ = read(['[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]'])
    assert len({call.id for call in calls}) == 2
    assert calls == again
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


@pytest.mark.parametrize(("result", "content"), [("12 °C", "12 °C"), ({"t": 12}, '{"t": 12}'), (None, "null")])
def test_a_result_becomes_a_message(result: object, content: str) -> None:
    call = ToolCall(id="123456789", name="weather", arguments={})
    assert call.message(result) == {
        "role": "tool",
        "name": "weather",
        "tool_call_id": "123456789",
        "content": content,
    }


@given(st.text(alphabet='{}[]"\\:,<>/|abnt tool_callTOOLCALSARG', max_size=60))
@settings(max_examples=150)
def test_nothing_is_lost_whatever_is_written(answer: str) -> None:
    content, calls, _ = read(list(answer))
    whole, whole_calls, _ = read([answer])
    assert (content, calls) == (whole, whole_calls)
    if not calls:
        assert content == answer or "</tool_call>" in answer or "[TOOL_CALLS]" in answer
