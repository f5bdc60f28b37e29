"""The JSON object of one function call, as it is written.

Runs on the engine thread; owned by the parser of one answer. Invariant: the function's name and the text of its
arguments are known as soon as they stand there, before the object is complete.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CallObject"]

_ARGUMENTS: Final = ("arguments", "parameters")
_CALL_KEYS: Final = ("name", "type", "id", *_ARGUMENTS)


class CallObject:
    """A JSON object that says which function is called with what, read character by character.

    Args:
        name: the function's, where it stood before; then the whole object is its arguments.

    Attributes:
        name: the function's, as soon as it is known.
        name_told: whether the caller knows it.
        arguments: the text of the arguments that the caller does not know.
        complete: whether the object has ended.
        is_other: whether it has a key that calls do not have.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.name_told = False
        self.arguments: list[str] = []
        self.complete = self.is_other = False
        self._is_arguments = bool(name)
        self._text: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._part: list[str] = []  # of the key or value that is being read

    def add(self, text: str) -> int:
        """Take characters up to the object's end; returns how many."""
        for place, character in enumerate(text, 1):
            self._text.append(character)
            structural = not self._in_string
            self._follow(character)
            if self._is_arguments:
                self.arguments.append(character)
            else:
                self._sort(character, structural=structural)
            if self._depth == 0:
                self.complete = True
                return place
        return len(text)

    def value(self) -> tuple[str, dict[str, object]] | None:
        """Return the function's name and arguments; None if the object is no call."""
        try:
            value = json.loads("".join(self._text), strict=False)
            name, arguments = self.name, value
            if not self._is_arguments:
                name = value.get("name")
                arguments = next((value[key] for key in _ARGUMENTS if key in value), {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return name, arguments

    def _follow(self, character: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _sort(self, character: str, *, structural: bool) -> None:
        """Put a character where it belongs: a key, or the value of one."""
        if structural and self._depth == 1 and character in "{:,":
            if character == ":" and self._key is None:
                self._key, self._part = _text_of(self._part), []
                self.is_other = self.is_other or self._key not in _CALL_KEYS
            elif character != ":":
                self._end_value()
        elif self._depth == 0:
            self._end_value()
        elif self._part or not character.isspace():
            self._part.append(character)
            if self._key in _ARGUMENTS:
                self.arguments.append(character)

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _text_of(self._part)
        self._key, self._part = None, []


def _text_of(characters: Sequence[str]) -> str:
    """Return a JSON string's text; nothing if it is none."""
    try:
        value = json.loads("".join(characters), strict=False)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
