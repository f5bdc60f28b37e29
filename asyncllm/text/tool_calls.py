"""Function calls in a model's answer, as it is written.

Runs on the engine thread; a `ToolCallParser` is owned by one request. Invariant: each piece of the answer is content or
part of a call, and what looks like a call but is none when it ends becomes content.

Three ways to write calls are known, and told apart by how they begin, since a model's files do not name theirs:

- Hermes, Qwen: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, once or more, amid other text;
- Mistral: `[TOOL_CALLS]` and a list of such objects, or in newer models `f[ARGS]{"x": 1}` for each call;
- Llama 3: the answer begins with an object that has a known function's "name", and "parameters"; more may follow, after
  a semicolon. `<|python_tag|>` may stand before.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Final

from asyncllm.outputs import ToolCall, ToolCallDelta
from asyncllm.text.call_object import CallObject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["ToolCallParser", "ToolStep"]

_HERMES: Final = "<tool_call>"
_HERMES_END: Final = "</tool_call>"
_MISTRAL: Final = "[TOOL_CALLS]"
_MISTRAL_ARGUMENTS: Final = "[ARGS]"
_PYTHON_TAG: Final = "<|python_tag|>"
_BARE: Final = ""
_OPENINGS: Final = (_HERMES, _MISTRAL, _PYTHON_TAG)
_SEPARATORS: Final = " \n\r\t,;"  # between the calls of a section
_LONGEST_NAME: Final = 256


@dataclasses.dataclass(frozen=True, slots=True)
class ToolStep:
    """What a piece of the answer brought: text that is not part of a call, and parts of calls."""

    content: str
    deltas: tuple[ToolCallDelta, ...]


class ToolCallParser:
    """Follow one answer.

    Args:
        tokenizer: the model's: marks that are special tokens are told by their ids, since their text may be left out.
        tools: descriptions of the functions that the model knows, as JSON schemas.
        skip_special_tokens: whether the text of special tokens is left out.
        request_id: whose answer; ids of calls are made of it.

    Attributes:
        calls: the calls that are complete.
        content: the pieces of text that are not part of a call.
        marks: tokens whose text is left out and that mark a call, with it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Iterable[Mapping[str, object]],
        *,
        skip_special_tokens: bool,
        request_id: str,
    ) -> None:
        self.calls: list[ToolCall] = []
        self.content: list[str] = []
        self._names = frozenset(_names(tools))
        marks = (*_OPENINGS, _HERMES_END, _MISTRAL_ARGUMENTS)
        self.marks = tokenizer.control_tokens(marks) if skip_special_tokens else {}
        self._request_id = request_id
        self._step = self._begin  # what to do with the buffer; returns whether more may be done with it
        self._buffer = ""
        self._section = _BARE  # how the section of calls began
        self._raw = ""  # of the section: what is not part of a complete call
        self._object = CallObject("")
        self._index = -1  # of the call that is being written, once a part of it was told
        self._told_pieces = 0  # of the content
        self._deltas: list[ToolCallDelta] = []

    def add(self, token_id: int, text: str) -> ToolStep:
        """Take the text that became certain with a token."""
        self._buffer += text + self.marks.get(token_id, "")
        return self._told(final=False)

    def finish(self) -> ToolStep:
        """Take the answer's end: a call that is not complete is content."""
        return self._told(final=True)

    def _told(self, *, final: bool) -> ToolStep:
        while self._step(final):
            pass
        if final:
            self._release(self._raw + self._buffer)
            self._raw = self._buffer = ""
        content, deltas = "".join(self.content[self._told_pieces :]), tuple(self._deltas)
        self._told_pieces, self._deltas = len(self.content), []
        return ToolStep(content, deltas)

    def _release(self, text: str) -> None:
        if text:
            self.content.append(text)

    def _begin(self, final: bool) -> bool:  # noqa: FBT001  # steps are called alike
        """Tell a bare object from other text, at the answer's begin."""
        stripped = self._buffer.lstrip()
        if not stripped:
            return False
        if stripped[0] == "{" and not final:
            self._open(_BARE, len(self._buffer) - len(stripped))
        else:
            self._step = self._text
        return True

    def _text(self, final: bool) -> bool:  # noqa: FBT001
        """Give out text up to a section of calls; hold back what may be its begin."""
        buffer = self._buffer
        place, opening = min((buffer.find(mark) % (len(buffer) + 1), mark) for mark in _OPENINGS)
        if place < len(buffer):
            self._release(buffer[:place])
            self._buffer = buffer[place:]
            self._open(opening, len(opening))
            return True
        held = 0 if final else _beginning_at_end(buffer)
        self._release(buffer[: len(buffer) - held])
        self._buffer = buffer[len(buffer) - held :]
        return False

    def _open(self, opening: str, skipped: int) -> None:
        self._section, self._step = opening, self._between
        self._raw, self._buffer = self._buffer[:skipped], self._buffer[skipped:]

    def _between(self, final: bool) -> bool:  # noqa: FBT001
        """Look for the next call of a section, or its end."""
        self._move(len(self._buffer) - len(self._buffer.lstrip(_SEPARATORS)))
        buffer = self._buffer
        if not buffer:
            if final and not self._raw.strip(_SEPARATORS):
                self._raw = ""  # what follows a complete call
            return False
        if buffer[0] == "{":
            return self._start_object("", 0)
        if self._section == _MISTRAL:
            return self._between_mistral(final=final)
        if self._section == _HERMES:
            if buffer.startswith(_HERMES_END):
                return self._close(_HERMES_END)
            if _HERMES_END.startswith(buffer) and not final:
                return False
        return self._give_up()

    def _between_mistral(self, *, final: bool) -> bool:
        """Look for a list, its end, another section's begin, or a function's name."""
        buffer = self._buffer
        if buffer[0] == "]":
            return self._close("]")
        for begin in (_MISTRAL, "["):
            if begin.startswith(buffer) and begin != buffer and not final:
                return False
            if buffer.startswith(begin):
                self._move(len(begin))
                return True
        place = buffer.find("{")
        if place >= 0:
            return self._start_object(buffer[:place].removesuffix(_MISTRAL_ARGUMENTS).strip(), place)
        return (final or len(buffer) > _LONGEST_NAME) and self._give_up()

    def _move(self, size: int) -> None:
        """Take so many characters of the buffer for the section's."""
        self._raw, self._buffer = self._raw + self._buffer[:size], self._buffer[size:]

    def _close(self, end: str) -> bool:
        self._raw, self._buffer, self._step = "", self._buffer[len(end) :], self._text
        return True

    def _start_object(self, name: str, place: int) -> bool:
        self._object = CallObject(name)
        self._move(place)
        self._step = self._in_object
        return True

    def _in_object(self, final: bool) -> bool:  # noqa: FBT001, ARG002
        """Take in a call's object."""
        call = self._object
        told = call.name_told
        self._move(call.add(self._buffer))
        if self._section == _BARE and (call.is_other or (call.name and call.name not in self._names)):
            return self._give_up()
        if call.name and (not told or call.arguments):
            self._index += not told
            self._deltas.append(
                ToolCallDelta(index=self._index, name=None if told else call.name, arguments="".join(call.arguments))
            )
            call.arguments.clear()
            call.name_told = True
        if not call.complete:
            return False
        value = call.value()
        if value is None:
            return self._give_up()
        name, arguments = value
        digest = hashlib.blake2s(f"{self._request_id}:{len(self.calls)}".encode(), digest_size=5).hexdigest()
        self.calls.append(ToolCall(id=digest[:9], name=name, arguments=arguments))
        self._raw, self._step = "", self._between
        return True

    def _give_up(self) -> bool:
        """Take what the section has beside complete calls for text."""
        self._release(self._raw)
        self._raw, self._step = "", self._text
        return True


def _beginning_at_end(text: str) -> int:
    """How many of the text's last characters may begin a section of calls."""
    longest = min(len(text), max(map(len, _OPENINGS)) - 1)
    ends = (size for size in range(longest, 0, -1) if any(mark.startswith(text[-size:]) for mark in _OPENINGS))
    return next(ends, 0)


def _names(tools: Iterable[Mapping[str, object]]) -> list[str]:
    names = []
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if hasattr(function, "get") else None
        if isinstance(name, str):
            names.append(name)
    return names
