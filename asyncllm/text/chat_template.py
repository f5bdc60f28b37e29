"""Conversations to text, by a model's chat template.

Runs in any thread; owns the template's source and nothing that changes. Invariant: a template sees copies made of
plain values only, runs in a sandbox (transformers' own rendering, so that a conversation reads as it does there), and
whatever it raises is an error of the one request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from asyncllm.errors import InvalidRequestError

__all__ = ["ChatTemplate", "Protect"]

_RESERVED: Final = frozenset(
    {
        "messages",
        "tools",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
# Fields whose values templates compare with words of their own.
_KEYWORDS: Final = frozenset({"role", "type"})


class Protect(Protocol):
    """Prepares a caller's text for a template, so that it can be told from the template's own text afterwards."""

    def __call__(self, text: str, *, keyword: bool) -> str:
        """Return the text, marked where it needs it; a keyword is left as it is if at all possible."""


class ChatTemplate:
    """A model's chat templates.

    Args:
        templates: their sources by name; "default", and "tool_use" if there is another one for tools.
        special_tokens: what a template may call `bos_token`, `eos_token` and so on.
    """

    def __init__(self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def load_renderer() -> None:
        """Import what renders: a second, which a caller's loop would stand still for at its first conversation."""
        _renderer()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        continue_final_message: bool,
        options: Mapping[str, object],
        protect: Protect,
    ) -> str:
        """Write a conversation as the text of a prompt.

        Args:
            messages: the conversation.
            tools: descriptions of functions, as JSON schemas.
            continue_final_message: end in the last message instead of with the header of a new one.
            options: further variables for the template.
            protect: applied to each text that the caller gives, before the template sees it.

        Raises:
            InvalidRequestError: what is given is no conversation of texts, or the template does not take it.
        """
        if taken := _RESERVED.intersection(options):
            raise InvalidRequestError(f"template_options cannot set {', '.join(sorted(taken))}")
        try:
            chat = [_message(index, message, protect) for index, message in enumerate(_items("messages", messages))]
            tool_list = None if tools is None else [_tool(tool, protect) for tool in _items("tools", tools)]
            variables: dict[str, Any] = self._special_tokens | _plain_mapping("template_options", options, protect)
        except RecursionError:
            raise InvalidRequestError("messages, tools and template_options are nested too deeply") from None
        if not chat:
            raise InvalidRequestError("messages must hold at least one message")
        try:
            (text,), _ = _renderer()(
                conversations=[chat],
                tools=tool_list,
                chat_template=self._source(with_tools=bool(tool_list)),
                continue_final_message=continue_final_message,
                add_generation_prompt=not continue_final_message,
                **variables,
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise InvalidRequestError(f"the model's chat template does not take this conversation: {error}") from error
        return text

    def _source(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise InvalidRequestError(f"the model has no default chat template, only {', '.join(self._templates)}")
        return self._templates["default"]


def _renderer() -> Callable[..., tuple[list[str], object]]:
    """Import what renders, when a conversation is there: transformers takes a second, which a scripted model saves."""
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    return cast("Callable[..., tuple[list[str], object]]", render_jinja_template)  # it says that it returns a text


def _items(name: str, value: object) -> Sequence[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be a list of mappings, not {value!r:.80}")
    return value


def _message(index: int, message: object, protect: Protect) -> dict[str, object]:
    """Copy a message; fields that are None are left out, as transformers does."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f'{where} must be a mapping with a text as its "role", not {message!r:.80}')
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        for part in _items(f"{where}: content", content):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
                raise InvalidRequestError(f"{where}: content of type {kind!r} is not supported, only text is")
    return _plain_mapping(where, {key: value for key, value in message.items() if value is not None}, protect)


def _tool(tool: object, protect: Protect) -> dict[str, object]:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(f"tools must be JSON schemas of functions, not {tool!r:.80}")
    return _plain_mapping("tools", tool, protect)


def _plain_mapping(where: str, value: Mapping[Any, object], protect: Protect) -> dict[str, object]:
    return {
        protect(str(key), keyword=True): _plain(where, item, protect, keyword=key in _KEYWORDS)
        for key, item in value.items()
    }


def _plain(where: str, value: object, protect: Protect, *, keyword: bool = False) -> object:
    """Copy a value, its texts protected, refusing what JSON has no word for."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return protect(str.__str__(value), keyword=keyword)  # of a subclass, such as an enum's, the text itself
        case Mapping():
            return _plain_mapping(where, value, protect)
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            return [_plain(where, item, protect, keyword=keyword) for item in value]
        case _:
            raise InvalidRequestError(f"{where}: a value of type {type(value).__name__} is not supported")
