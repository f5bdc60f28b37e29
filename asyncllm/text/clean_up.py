"""The clean-up of spaces that some tokenizers ask for, for a stream of text.

Runs on the engine thread; a `CleanUpStream` is owned by one request. Invariant: what its methods return, joined, is
what the same replacements make of the whole text; text that a replacement could still change is held back.
"""

from __future__ import annotations

from typing import Final

__all__ = ["CleanUpStream"]

# In this order, as transformers' `clean_up_tokenization` has them.
_REPLACEMENTS: Final = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class CleanUpStream:
    """Replace in a stream as `str.replace`, once for each pattern in turn, would in the whole."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = [""] * len(_REPLACEMENTS)  # per pattern: the end of its input, which may be its beginning

    def add(self, text: str) -> str:
        """Take the next text; return what is certain."""
        for index, (pattern, replacement) in enumerate(_REPLACEMENTS):
            if not text:
                return ""
            *done, rest = (self._held[index] + text).split(pattern)
            held = next(size for size in range(len(pattern) - 1, -1, -1) if rest.endswith(pattern[:size]))
            certain = len(rest) - held
            self._held[index] = rest[certain:]
            text = replacement.join([*done, rest[:certain]])
        return text

    def settle(self, text: str) -> str:
        """Return the rest, if `text` is all that still comes; changes nothing."""
        for held, (pattern, replacement) in zip(self._held, _REPLACEMENTS, strict=True):
            text = (held + text).replace(pattern, replacement)
        return text
