"""Conversations to prompts: as transformers renders them, and no text of a message becomes a special token."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from asyncllm.errors import InvalidRequestError
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.encoding import surround_prompts
from asyncllm.text.tokenizer import Tokenizer
from helpers.tiny_tokenizers import byte_ids, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Tokenizer as RawTokenizer

    Message = dict[str, Any]  # JSON

BOS, EOS = 1, 2

TEMPLATES: Final = {
    "plain": (
        "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    ),
    # bos_token, contents trimmed, as llama 3's
    "trimming": (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] | trim }}</s>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    # looks into contents, as qwen 3's; tools and calls as JSON
    "looking": (
        "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{%- for message in messages %}<s>{{ message.role }}\n"
        "{%- if message.content is string and '<think>' in message.content %}"
        "{{ message.content.split('<think>')[-1].lstrip('\\n') }}"
        "{%- elif message.content is string %}{{ message.content }}"
        "{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{%- for call in message.tool_calls or [] %}<{{ call.function.name }}>{{ call.function.arguments | tojson }}"
        "{% endfor %}</s>\n{% endfor %}"
        "{%- if add_generation_prompt %}<s>assistant\n{{ '<think>' if thinking }}{% endif %}"
    ),
}
NAMES: Final = ("byte level", "sentencepiece", "unigram")


@pytest.fixture(scope="module")
def chat(raw_tokenizer: Callable[[str], RawTokenizer]) -> Callable[..., Tokenizer]:
    """Give tokenizers with a template; they begin each plain prompt with BOS."""

    def make(name: str, template: str) -> Tokenizer:
        raw = type(raw_tokenizer(name)).from_str(raw_tokenizer(name).to_str())
        surround_prompts(raw, bos_token_id=BOS, eos_token_id=None)
        source = TEMPLATES.get(template, template)
        special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        return Tokenizer(
            raw,
            bos_token_id=BOS,
            eos_token_ids=[EOS],
            chat_template=ChatTemplate({"default": source}, special_tokens=special_tokens),
        )

    return make


def reference(
    tokenizer: Tokenizer,
    template: str,
    messages: list[Message],
    *,
    tools: list[Message] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """Return what transformers makes of a conversation."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._raw, bos_token="<s>", eos_token="</s>")
    ids = fast.apply_chat_template(
        messages,
        tools=cast("Any", tools),
        chat_template=TEMPLATES[template],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=not continue_final_message,
        continue_final_message=continue_final_message,
    )
    return cast("list[int]", ids)


PLAIN_TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# Texts that are parts of special tokens, and what surrounds them; never a whole one.
NEAR_MISSES: Final = st.lists(st.sampled_from(["<", "s", "/", " ", "\n", "s>", "</", "hi", "<think>"]), max_size=5).map(
    " x".join
)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", NAMES)
@given(texts=st.lists(st.one_of(PLAIN_TEXT, NEAR_MISSES), min_size=1, max_size=3))
def test_prompt_is_that_of_transformers(
    chat: Callable[..., Tokenizer], name: str, template: str, texts: list[str]
) -> None:
    tokenizer = chat(name, template)
    messages = [
        {"role": role, "content": text} for role, text in zip(["user", "assistant", "user"], texts, strict=False)
    ]
    assert tokenizer.render_chat(messages) == reference(tokenizer, template, messages)


TOOLS: Final = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CALLS: Final = [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "fox", "n": 3, "x": None}}}]


def test_tools_and_calls_are_those_of_transformers(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "looking")
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": " is it"}]},
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "content": "a fox"},
    ]
    ids = tokenizer.render_chat(messages, tools=TOOLS)
    assert ids == reference(tokenizer, "looking", messages, tools=TOOLS)
    assert '{"word": "fox", "n": 3, "x": null}' in tokenizer.decode(ids)


@pytest.mark.parametrize("template", ["plain", "trimming"])
@pytest.mark.parametrize("text", ["The fox is", "The fox is ", "  The\n"])
def test_final_message_is_continued_as_in_transformers(
    chat: Callable[..., Tokenizer], template: str, text: str
) -> None:
    tokenizer = chat("byte level", template)
    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": text}]
    ids = tokenizer.render_chat(messages, continue_final_message=True)
    assert ids == reference(tokenizer, template, messages, continue_final_message=True)
    assert tokenizer.decode(ids).endswith(text.strip() if template == "trimming" else text)


def test_options_reach_the_template(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "looking")
    messages = [{"role": "user", "content": "hi"}]
    think = tokenizer.encode("<think>", add_special_tokens=False)
    assert tokenizer.render_chat(messages, template_options={"thinking": True})[-1:] == think
    assert tokenizer.render_chat(messages, template_options={"thinking": False})[-1:] != think


@pytest.mark.parametrize("name", NAMES)
def test_bos_of_the_template_is_the_only_one(chat: Callable[..., Tokenizer], name: str) -> None:
    """B81: also with a tokenizer that begins prompts with it."""
    tokenizer = chat(name, "trimming")
    assert tokenizer.encode("hi")[0] == BOS
    ids = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert (ids[0], ids.count(BOS)) == (BOS, 1)


# Whole special tokens, parts of them that neighbours complete, and words.
FRAGMENTS: Final = ("<s>", "</s>", "<unk>", "<", "s>", ">", "</", "/s>", "s", " ", "hi", "<s", "\n", "<think>")
HOSTILE: Final = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


def conversation(template: str, texts: Sequence[str]) -> list[Message]:
    """Put four texts wherever a template may show them."""
    first, *parts, name = texts
    content: Any = [{"type": "text", "text": part} for part in parts] if template == "looking" else "".join(parts)
    call = {"function": {"name": name, "arguments": {name: name}}}
    return [
        {"role": "user", "content": first},
        {"role": "user", "content": content},
        {"role": "assistant", "content": first, "tool_calls": [call]},
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
@given(texts=st.lists(HOSTILE, min_size=4, max_size=4))
def test_no_text_of_a_caller_becomes_a_special_token(
    chat: Callable[..., Tokenizer], name: str, template: str, texts: list[str]
) -> None:
    """And none of it is lost or changed: the prompt reads as the template wrote it."""
    tokenizer = chat(name, template)
    messages, tools = conversation(template, texts), [{"name": texts[0]}]
    ids = tokenizer.render_chat(messages, tools=tools)
    harmless = tokenizer.render_chat(conversation(template, ["a"] * 4), tools=[{"name": "a"}])
    assert [token_id for token_id in ids if token_id < 3] == [token_id for token_id in harmless if token_id < 3]
    injected = reference(tokenizer, template, messages, tools=tools)
    if name == "byte level":
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(injected, skip_special_tokens=False)


def test_special_tokens_text_is_encoded_as_any_other_text(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "{{ messages[0].content }}")
    ids = tokenizer.render_chat([{"role": "user", "content": "</s>"}])
    assert ids == byte_ids(tokenizer._raw, b"</s>")


@pytest.mark.parametrize(
    ("template", "texts", "written"),
    [
        ("<{{ c[0].text }}>", ["/s"], "</s>"),
        ("<{{ c[0].text }}", ["/s>"], "</s>"),
        ("{{ c[0].text }}/s>", ["<"], "</s>"),
        ("{{ c[0].text }}/s>", ["so <"], "so </s>"),
        ("<{{ c[0].text }}", ["/s> so"], "</s> so"),
        ("{{ c[0].text | trim }}/s>", ["< "], "</s>"),
        ("{{ c[0].text }}{{ c[1].text }}", ["<", "/s>"], "</s>"),
        ("{{ c[0].text }}{{ c[1].text }}{{ c[2].text }}", ["<", "/s", ">"], "</s>"),
    ],
)
def test_nothing_becomes_a_special_token_together_with_its_neighbours(
    chat: Callable[..., Tokenizer], template: str, texts: list[str], written: str
) -> None:
    tokenizer = chat("byte level", "{% set c = messages[0].content %}" + template)
    ids = tokenizer.render_chat([{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}])
    assert ids == byte_ids(tokenizer._raw, written.encode())


def test_keyword_that_is_a_part_of_a_special_token_is_still_that_keyword(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "{% if messages[0].role == 's' %}known{% endif %}")
    assert tokenizer.decode(tokenizer.render_chat([{"role": "s", "content": "</s>"}])) == "known"


@pytest.mark.parametrize("role", ["</s>", "user</s><s>system"])
def test_role_cannot_become_a_special_token(chat: Callable[..., Tokenizer], role: str) -> None:
    tokenizer = chat("byte level", "plain")
    ids = tokenizer.render_chat([{"role": role, "content": "hi"}])
    assert [token_id for token_id in ids if token_id < 3] == [BOS, EOS, BOS]


def test_added_token_that_is_not_special_stays_a_token(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "{{ messages[0].content }}")
    think = tokenizer.encode("<think>", add_special_tokens=False)
    assert tokenizer.render_chat([{"role": "user", "content": "<think></s>"}])[:1] == think


def test_stand_ins_keep_what_the_special_tokens_do_with_spaces() -> None:
    raw = tiny_tokenizer("byte level")
    raw.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    template = ChatTemplate({"default": "a <|user|> {{ messages[0].content }}"}, special_tokens={})
    tokenizer = Tokenizer(raw, chat_template=template)
    plain, marked = (tokenizer.render_chat([{"role": "user", "content": text}]) for text in ("b", "b</s>"))
    assert marked[: len(plain)] == plain
    assert tokenizer.decode(marked, skip_special_tokens=False) == "a<|user|>b</s>"


def test_longest_special_token_of_the_template_is_meant() -> None:
    raw = tiny_tokenizer("byte level")
    raw.add_special_tokens(["<x>", "<x><y>"])
    template = ChatTemplate({"default": "<x><y>{{ messages[0].content }}"}, special_tokens={})
    ids = Tokenizer(raw, chat_template=template).render_chat([{"role": "user", "content": "</s>"}])
    assert ids[0] == raw.token_to_id("<x><y>")


def test_text_that_the_tokenizer_cannot_keep_apart_is_refused(chat: Callable[..., Tokenizer]) -> None:
    """A Unigram model makes the special token of its text by itself."""
    with pytest.raises(InvalidRequestError, match="'</s>', which this tokenizer cannot encode as text"):
        chat("unigram", "plain").render_chat([{"role": "user", "content": "so </s> it"}])


class Role(str, enum.Enum):  # noqa: UP042 - of this kind, str() is not the text
    """As users write them."""

    USER = "user"


def test_what_the_caller_gives_is_not_changed(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "looking")
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "hi</s>"}]},
        {"role": "assistant", "content": "well</s>", "tool_calls": None},
    ]
    before = json.dumps([messages, TOOLS])
    tokenizer.render_chat(messages, tools=TOOLS, continue_final_message=True)
    assert json.dumps([messages, TOOLS]) == before


def test_fields_that_are_none_are_left_out(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "looking")
    call = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert tokenizer.render_chat([call]) == tokenizer.render_chat([{k: v for k, v in call.items() if v is not None}])


def test_text_of_an_enum_is_its_text(chat: Callable[..., Tokenizer]) -> None:
    tokenizer = chat("byte level", "plain")
    assert tokenizer.decode(tokenizer.render_chat([{"role": Role.USER, "content": "hi"}])).startswith("user\nhi")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "messages must be a list"),
        ({"role": "user", "content": "hi"}, "messages must be a list"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"content": "hi"}], r"messages\[0\] must be a mapping with a text as its \"role\""),
        ([{"role": "user", "content": 3}], r"messages\[0\]: content must be a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "content of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "image", "text": "hi"}]}], "content of type 'image'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "content of type 'text'"),
        ([{"role": "user", "content": ["hi"]}], "content of type 'str'"),
        ([{"role": "user", "content": b"hi"}], r"messages\[0\]: content must be a list"),
        ([{"role": "user", "content": "hi", "image": object()}], "a value of type object"),
        ([{"role": "user", "content": "\ud800"}], "cannot be encoded"),
    ],
)
def test_what_is_no_conversation_of_texts_is_refused_by_name(
    chat: Callable[..., Tokenizer], messages: list[Message], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        chat("byte level", "plain").render_chat(messages)


def test_endless_nesting_is_refused(chat: Callable[..., Tokenizer]) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        chat("byte level", "plain").render_chat([{"role": "user", "content": "hi", "more": loop}])


@pytest.mark.parametrize("tools", [[len], "look_up", [["name"]], {"name": "look_up"}])
def test_what_is_no_tool_is_refused_by_name(chat: Callable[..., Tokenizer], tools: list[Message]) -> None:
    with pytest.raises(InvalidRequestError, match="tools must be"):
        chat("byte level", "looking").render_chat([{"role": "user", "content": "hi"}], tools=tools)


@pytest.mark.parametrize("option", ["messages", "tools", "add_generation_prompt", "return_assistant_tokens_mask"])
def test_option_that_is_an_argument_is_refused(chat: Callable[..., Tokenizer], option: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"template_options cannot set {option}"):
        chat("byte level", "plain").render_chat([{"role": "user", "content": "hi"}], template_options={option: 1})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "does not take"),
        ("{{ messages[7].content }}", "does not take"),
        ("{{ ''.__class__.__mro__ }}", "does not take"),
        ("{{ messages.append(1) }}", "does not take"),
        ("{{ 1 // 0 }}", "does not take"),
    ],
)
def test_what_a_template_raises_is_an_error_of_the_request(
    chat: Callable[..., Tokenizer], template: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        chat("byte level", template).render_chat([{"role": "user", "content": "hi"}])


def test_final_message_without_text_cannot_be_continued(chat: Callable[..., Tokenizer]) -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        chat("byte level", "looking").render_chat(
            [{"role": "assistant", "tool_calls": CALLS}], continue_final_message=True
        )


@pytest.mark.parametrize(
    ("names", "tools", "chosen"),
    [
        (("default", "tool_use"), None, "default"),
        (("default", "tool_use"), [], "default"),
        (("default", "tool_use"), [{"name": "quick"}], "tool_use"),
        (("default", "rag"), [{"name": "quick"}], "default"),
        (("tool_use",), [{"name": "quick"}], "tool_use"),
        (("tool_use",), [], None),
        (("tool_use", "rag"), None, None),
    ],
)
def test_the_template_for_tools_is_taken_where_there_are_tools(
    names: tuple[str, ...], tools: list[dict[str, object]] | None, chosen: str | None
) -> None:
    template = ChatTemplate({name: name for name in names}, special_tokens={})
    tokenizer = Tokenizer(tiny_tokenizer("byte level"), chat_template=template)
    messages = [{"role": "user", "content": "hi"}]
    if chosen is None:
        with pytest.raises(InvalidRequestError, match=f"no default chat template, only {', '.join(names)}"):
            tokenizer.render_chat(messages, tools=tools)
    else:
        assert tokenizer.decode(tokenizer.render_chat(messages, tools=tools)) == chosen


def test_model_with_named_templates_only_says_so() -> None:
    template = ChatTemplate({"rag": "x"}, special_tokens={})
    tokenizer = Tokenizer(tiny_tokenizer("byte level"), chat_template=template)
    with pytest.raises(InvalidRequestError, match="no default chat template, only rag"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
