"""Chats: function calls while they are written, a begun answer, conversations that cost only what is new."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from asyncllm import LLM, Conversation, InvalidRequestError, SamplingParams, ToolCall
from asyncllm.testing import ScriptedModel, scripted_engine
from helpers.engines import TinyModelFolder, small_engine
from helpers.idle import Idle
from helpers.loops import both_loops, on_loop
from helpers.scenes import held_engine_thread

if TYPE_CHECKING:
    from asyncllm import Completion, Engine, Token

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL: Final = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
ASKED: Final = [{"role": "user", "content": "How is the weather in Bern?"}]


async def read(engine: Engine, **fields: Any) -> tuple[list[Token], Completion]:  # noqa: ANN401  # fields of a call
    """Ask about the weather."""
    async with engine.chat(ASKED, max_tokens=200, **fields) as stream:
        tokens = [token async for token in stream]
        return tokens, await stream.result()


@both_loops
def test_calls_are_on_the_completion_and_come_in_parts_in_the_stream(library: str) -> None:
    async def main() -> None:
        async with scripted_engine({}, default=CALL) as engine:
            idle = await Idle.watch(engine)
            tokens, completion = await read(engine, tools=[WEATHER])
            (call,) = completion.tool_calls
            assert call == ToolCall(id=call.id, name="weather", arguments={"city": "Bern"})
            parts = [part for token in tokens for part in token.tool_calls]
            assert [part.name for part in parts] == ["weather"] + [None] * (len(parts) - 1)
            assert json.loads("".join(part.arguments for part in parts)) == {"city": "Bern"}
            assert len(parts) > 3
            assert "".join(token.content for token in tokens) == completion.content == "Let me see."
            assert "".join(token.text for token in tokens) == completion.text == CALL
            await idle.check()

    on_loop(library, main)


def test_without_tools_nothing_is_looked_for() -> None:
    async def main() -> None:
        async with scripted_engine({}, default=CALL) as engine:
            none: list[dict[str, Any]] = []
            for tools in (None, none):
                tokens, completion = await read(engine, tools=tools)
                assert completion.tool_calls == ()
                assert completion.content == completion.text == CALL
                assert all(token.content == token.text and token.tool_calls == () for token in tokens)

    anyio.run(main)


def test_a_call_that_is_cut_is_content_and_so_is_what_a_stop_text_leaves() -> None:
    async def main() -> None:
        async with scripted_engine({}, default=CALL) as engine:
            async with engine.chat(ASKED, tools=[WEATHER], max_tokens=40) as stream:
                tokens = [token async for token in stream]
                cut = await stream.result()
            assert "".join(token.content for token in tokens) == cut.content
            assert (cut.finish_reason, cut.tool_calls, cut.content) == ("length", (), CALL[:40])
            _, stopped = await read(engine, tools=[WEATHER], stop="</tool_call>")
            assert [call.name for call in stopped.tool_calls] == ["weather"]
            assert stopped.content == "Let me see."

    anyio.run(main)


def test_an_aborted_answer_has_the_calls_that_were_complete() -> None:
    async def main() -> None:
        async with (
            scripted_engine({}, default=CALL + "and much more" * 9) as engine,
            engine.chat(ASKED, tools=[WEATHER], max_tokens=500) as stream,
        ):
            async for token in stream:
                if token.content == "a":
                    stream.abort()
            assert [call.name for call in (await stream.result()).tool_calls] == ["weather"]

    anyio.run(main)


def test_arguments_can_be_held_to_a_schema_together_with_the_call() -> None:
    """A grammar around a schema gives a call that always parses."""
    grammar = (
        'start: "<tool_call>" call "</tool_call>"\n'
        'call: %json {"type": "object", "properties": {"name": {"const": "weather"}, "arguments": {"type": "object", '
        '"properties": {"city": {"enum": ["Bern", "Thun"]}}, "required": ["city"], "additionalProperties": false}}, '
        '"required": ["name", "arguments"], "additionalProperties": false}'
    )

    async def main() -> None:
        async with scripted_engine({}, default=CALL.replace("Bern", "Lyon")) as engine:
            _, completion = await read(engine, tools=[WEATHER], grammar=grammar)
            (call,) = completion.tool_calls
            assert call.name == "weather"
            assert call.arguments["city"] in {"Bern", "Thun"}

    anyio.run(main)


def test_a_begun_answer_is_continued() -> None:
    async def main() -> None:
        async with scripted_engine(lambda prompt: f"[{prompt}]") as engine:
            begun = [*ASKED, {"role": "assistant", "content": "In Bern"}]
            async with engine.chat(begun, continue_final_message=True, max_tokens=200) as stream:
                prompt = (await stream.result()).text
            assert prompt.endswith("<|assistant|>In Bern]")
            async with engine.chat(begun, max_tokens=200) as stream:
                assert (await stream.result()).text.endswith("<|assistant|>In Bern<|end|><|assistant|>]")

    anyio.run(main)


def test_the_blocking_face_takes_what_chat_takes() -> None:
    with LLM("scripted", backend=ScriptedModel(lambda prompt: f"[{prompt}]"), seed=0) as llm:
        begun = [*ASKED, {"role": "assistant", "content": "In Bern"}]
        tokens = llm.chat(begun, continue_final_message=True, template_options={"name": "value"}, max_tokens=200)
        assert "".join(map(str, tokens)).endswith("<|assistant|>In Bern]")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "image_url"),
        ([{"type": "text", "text": "look"}, {"type": "image", "image": "x.png"}], "image"),
        ([{"type": "input_audio"}], "input_audio"),
        (b"bytes", "bytes"),
    ],
)
def test_images_and_the_like_are_refused_by_name_at_the_call(content: object, named: str) -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            idle = await Idle.watch(engine)
            with pytest.raises(InvalidRequestError, match=named):
                engine.chat([{"role": "user", "content": content}])
            await idle.check()

    anyio.run(main)


def test_a_turn_is_remembered_once_however_often_its_end_is_read() -> None:
    async def main() -> None:
        async with scripted_engine({}, default="hi") as engine:
            talk = Conversation(engine)
            stream = talk.send("a")
            await stream.result()
            assert stream.next_blocking() is None
            assert [token async for token in stream] == []
            await stream.result()
            assert [message["content"] for message in talk.messages] == ["a", "hi"]

    anyio.run(main)


@pytest.mark.parametrize("where", ["tools", "template_options"])
def test_long_tools_are_rendered_on_a_worker_thread_as_long_messages_are(where: str) -> None:
    """What is wrong with them is found there."""
    given: Any = {"a": "long " * 1000, "b": object()}

    async def main() -> None:
        async with scripted_engine() as engine:
            fields: dict[str, Any] = {where: [given] if where == "tools" else given}
            stream = engine.chat(ASKED, **fields)
            with pytest.raises(InvalidRequestError, match="of type object is not supported"):
                await stream.result()

    anyio.run(main)


@pytest.mark.parametrize("value", [5, "text", [5], {"role": "user"}.keys()])
def test_what_is_no_message_is_refused_by_name(value: Any) -> None:  # noqa: ANN401
    with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError, match="messages must be an iterable of mappings"):
            Conversation(engine, value)
        if not isinstance(value, str):
            with pytest.raises(InvalidRequestError, match="message must be an iterable of mappings"):
                Conversation(engine).send(value)
        with pytest.raises(InvalidRequestError, match="continue_final_message must be True or False, not 1"):
            engine.chat([{"role": "user", "content": "a"}], continue_final_message=1)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="timeout must be a number of seconds > 0, not 1000"):
            engine.stream("a", timeout=10**400)


@both_loops
def test_a_conversation_holds_whole_turns_only(library: str) -> None:
    async def main() -> None:
        async with scripted_engine(lambda prompt: str(prompt.count("<|user|>"))) as engine:
            talk = Conversation(engine, system="Count.", params=SamplingParams(max_tokens=9))
            assert (await talk.ask("a")).text == "1"
            async with talk.send("b") as stream:
                assert "".join([str(token) async for token in stream]) == "2"
            turns = list(talk.messages)
            assert [message["content"] for message in turns] == ["Count.", "a", "1", "b", "2"]
            assert [message["role"] for message in turns[1:]] == ["user", "assistant"] * 2
            async with talk.send("left early") as stream:
                await anext(stream)
            with held_engine_thread(engine):
                stream = talk.send("aborted")
                assert stream.abort()
            await stream.result()
            with pytest.raises(InvalidRequestError):
                talk.send("refused", max_tokens=0)
            with pytest.raises(InvalidRequestError):
                await talk.ask([{"role": "user", "content": 3}])
            assert talk.messages == turns
            assert (await talk.ask("c", max_tokens=1)).finish_reason == "length"
            assert talk.messages[len(turns) :] == [
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "3"},
            ]

    on_loop(library, main)


def test_a_conversation_takes_what_functions_return() -> None:
    replies = {"How is it in Bern?": CALL}

    async def main() -> None:
        async with scripted_engine(replies, default="Sunny.") as engine:
            talk = Conversation(engine, tools=[WEATHER])
            (call,) = (await talk.ask("How is it in Bern?", max_tokens=200)).tool_calls
            assert talk.messages[-1] == {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [
                    {"type": "function", "id": call.id, "function": {"name": "weather", "arguments": {"city": "Bern"}}}
                ],
            }
            engine_replies = await talk.ask(call.message({"celsius": 21}), max_tokens=200)
            assert talk.messages[-2] == call.message({"celsius": 21})
            assert engine_replies.text in {"Sunny.", CALL}

    anyio.run(main)


def test_a_conversation_computes_only_what_is_new(tiny_model: TinyModelFolder) -> None:
    async def main() -> None:
        async with small_engine("tiny", tiny_model) as engine:
            talk = Conversation(engine, params=SamplingParams(max_tokens=12, temperature=0.0))
            before = await talk.ask("The capital of France is where streams end")
            for _ in range(3):
                now = await talk.ask("and then?")
                known = before.usage.prompt_tokens + before.usage.completion_tokens
                # All but what follows the answer's last token, and a little where the answer tokenizes otherwise.
                assert now.usage.cached_tokens >= before.usage.prompt_tokens - 1
                assert now.usage.cached_tokens <= known
                before = now

    anyio.run(main)


def test_what_a_conversation_is_given_is_not_changed() -> None:
    async def main() -> None:
        async with scripted_engine({}, default="yes") as engine:
            given: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            talk = Conversation(engine, given)
            await talk.ask("c", max_tokens=5)
            assert len(given) == 2
            assert len(talk.messages) == 4

    anyio.run(main)
