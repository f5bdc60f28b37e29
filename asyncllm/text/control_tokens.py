"""Keep a caller's text from turning into special tokens.

Runs in any thread; a `ControlTokens` is shared by all requests and does not change, a `Marks` belongs to one call.

The rule: special tokens of a prompt made from a conversation come from the chat template only. Where the text of a
message, a tool or an option spells one, it is encoded as any other text. (Added tokens that are not special, such as
"<think>", are words that templates look for in contents, and stay tokens.)

How: the caller's texts are marked before the template sees them, by numbers drawn for this one call. A special token's
text is put between marks; so is a text whose end or beginning could become one together with its neighbours'. In the
rendered text, special tokens that lie between no marks are the template's. They are replaced by unguessable stand-ins,
the marks go, and the whole is encoded at once by a tokenizer that knows the stand-ins in place of the special tokens.
A conversation that needed no mark, nearly every one, is encoded as it is.
"""

from __future__ import annotations

import functools
import re
import secrets
from typing import TYPE_CHECKING, Final

import tokenizers
from tokenizers import AddedToken

from asyncllm.errors import InvalidRequestError
from asyncllm.text.encoding import encode_text

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ControlTokens", "Marks"]

_DIGITS: Final = 40


class ControlTokens:
    """The special tokens of one tokenizer.

    Args:
        raw: the tokenizer; not changed.
    """

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self._raw = raw
        self.ids = {token.content: index for index, token in raw.get_added_tokens_decoder().items() if token.special}
        self.pattern = _any_of(self.ids)
        self._longest = max(map(len, self.ids), default=0)
        self._beginnings = {text[:size] for text in self.ids for size in range(1, len(text))}
        self._ends = {text[size:] for text in self.ids for size in range(1, len(text))}

    def touches(self, text: str) -> bool:
        """Whether `text` could be a part of a special token that its neighbours complete."""
        sizes = range(1, min(self._longest, len(text) + 1))
        return any(text[-size:] in self._beginnings or text[:size] in self._ends for size in sizes) or (
            0 < len(text) < self._longest and any(text in special for special in self.ids)
        )

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode a text that is given in parts.

        Args:
            parts: a piece of it and whether special tokens in it are to be taken for text.

        Raises:
            InvalidRequestError: the tokenizer's model makes a special token of its text all the same.
        """
        raw, stand_ins, meanings = self._literal
        text = "".join(
            piece if literal else self.pattern.sub(lambda match: stand_ins[match[0]], piece) for piece, literal in parts
        )
        ids = encode_text(raw, text, add_special_tokens=False)
        for special, token_id in self.ids.items():
            if special in text and token_id in ids and token_id not in meanings:
                raise InvalidRequestError(f"a text holds {special!r}, which this tokenizer cannot encode as text")
        return [meanings.get(token_id, token_id) for token_id in ids]

    @functools.cached_property
    def _literal(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """A tokenizer that shares all but the special tokens, its stand-ins for these, and what its added ids mean."""
        raw = tokenizers.Tokenizer(self._raw.model)
        raw.normalizer = self._raw.normalizer
        raw.pre_tokenizer = self._raw.pre_tokenizer
        secret = secrets.token_hex(16)
        stand_ins: dict[str, str] = {}
        meanings: dict[int, int] = {}
        for index, token in self._raw.get_added_tokens_decoder().items():
            added = token
            if token.special:
                stand_ins[token.content] = f"<{secret}:{index}>"
                added = AddedToken(stand_ins[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            raw.add_tokens([added])
            if (own_index := raw.token_to_id(added.content)) is not None:
                meanings[own_index] = index
        return raw, stand_ins, meanings


class Marks:
    """Marks the texts of one call, and finds them again.

    Args:
        control: the tokenizer's special tokens.

    Attributes:
        used: whether any text needed a mark.
    """

    def __init__(self, control: ControlTokens) -> None:
        number = f"{secrets.randbelow(10**_DIGITS):0{_DIGITS}}"
        self._control = control
        self._begin, self._end = f"{number}1", f"{number}2"  # digits pass through every filter of a template
        self.used = False

    def protect(self, text: str, *, keyword: bool) -> str:
        """Mark a text; one that is a keyword only where it spells out a special token."""
        marked = self._control.pattern.sub(f"{self._begin}\\g<0>{self._end}", text)
        core = marked.strip()
        if not keyword and self._control.touches(core):
            start = marked.index(core)  # outside of the marks, so that a template that strips texts still does
            stop = start + len(core)
            marked = f"{marked[:start]}{self._begin}{core}{self._end}{marked[stop:]}"
        self.used = self.used or marked != text
        return marked

    def encode(self, rendered: str) -> list[int]:
        """Encode what a template made of the marked texts."""
        special = self._control.pattern.pattern
        marks = re.compile(f"{self._begin}({special}){self._end}|{self._begin}|{self._end}")
        pieces = marks.split(rendered)  # text, a special token's text or None for a single mark, text, ...
        return self._control.encode_parts((piece or "", index % 2 == 1) for index, piece in enumerate(pieces))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of the texts that begin at a place; nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
