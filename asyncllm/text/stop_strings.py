"""Find stop texts in a stream of text.

Runs on the engine thread; a `StopMatcher` is owned by one request. Invariant: text that could be the beginning of
a stop text is held back, all other text is released at once, and each character is looked at once per stop text
(a Knuth-Morris-Pratt automaton each), however the stream is cut into pieces.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Released", "StopMatcher"]


@dataclasses.dataclass(frozen=True, slots=True)
class Released:
    """What one piece of text set free.

    Args:
        text: text that is certain to belong to the output.
        stop: the stop text that ended the stream with this piece; None while it goes on.
    """

    text: str
    stop: str | None


class _Pattern:
    """One stop text, and how much of it the end of the stream spells already."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # _fallback[n]: length of the longest proper prefix of `text` that also ends its first n characters.
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self._fallback[length]
            length += text[end] == text[length]
            self._fallback[end + 1] = length

    def advance(self, piece: str) -> int | None:
        """Follow `piece`; return the index in it just after the first full match, or None."""
        text, matched = self.text, self.matched
        if not matched and text[0] not in piece:
            return None
        for index, character in enumerate(piece):
            while matched and character != text[matched]:
                matched = self._fallback[matched]
            matched += character == text[matched]
            if matched == len(text):
                return index + 1
        self.matched = matched
        return None

    def pass_over(self, piece: str) -> None:
        """Follow `piece` as if full matches were none; what ends it may still begin one."""
        rest: str | None = piece
        while rest and (end := self.advance(rest)) is not None:
            self.matched = self._fallback[len(self.text)]
            rest = rest[end:]


class StopMatcher:
    """Release text up to a stop text, the first that completes; on the same piece, the one that begins first.

    Args:
        stops: the stop texts, none empty.
        include: whether the stop text itself is released too.
    """

    __slots__ = ("_held", "_include", "_patterns", "stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self._patterns = [_Pattern(stop) for stop in self.stops]
        self._include = include
        self._held = ""

    def feed(self, text: str) -> Released:
        """Take the next piece of the stream. Not to be called again once a stop was found."""
        if not text:
            return Released("", None)
        if not self._patterns:
            return Released(text, None)
        buffer = self._held + text
        found: tuple[int, int, str] | None = None
        longest = 0
        for pattern in self._patterns:
            end = pattern.advance(text)
            if end is not None:
                end += len(self._held)
                match = (end - len(pattern.text), end, pattern.text)
                found = match if found is None else min(found, match)
            elif pattern.matched > longest:
                longest = pattern.matched
        if found is not None:
            start, end, stop = found
            self._held = ""
            return Released(buffer[: end if self._include else start], stop)
        return Released(self._release(buffer, longest), None)

    def pass_over(self, text: str) -> str:
        """Take the next piece of the stream, in which no stop may complete; return the text that is certain."""
        for pattern in self._patterns:
            pattern.pass_over(text)
        return self._release(self._held + text, max((each.matched for each in self._patterns), default=0))

    def _release(self, buffer: str, held: int) -> str:
        """Hold back so many characters of the buffer; return those before."""
        certain = len(buffer) - held
        self._held = buffer[certain:]
        return buffer[:certain]

    def break_off(self) -> str:
        """Return the text still held back: no stop reaches over this place."""
        for pattern in self._patterns:
            pattern.matched = 0
        return self.finish()

    def completes(self, text: str, *, after: int = 0) -> bool:
        """Whether `text`, if it came next, would complete a stop after so many of its characters; changes nothing."""
        buffer = self._held + text
        end = len(self._held) + after
        return any(buffer.find(stop, max(end - len(stop) + 1, 0)) >= 0 for stop in self.stops)

    def finish(self) -> str:
        """Return the text still held back: the stream ended without a stop."""
        held, self._held = self._held, ""
        return held
