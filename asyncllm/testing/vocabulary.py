"""The scripted model's vocabulary: one token per byte of UTF-8, and a few special ones.

Runs anywhere; owns nothing that changes. Invariant: the ids 0..255 are the bytes, so that every text has exactly
one tokenization.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import SupportsIndex

__all__ = [
    "BOS_TOKEN_ID",
    "BYTES",
    "CHAT_TEMPLATE",
    "EOS_TOKEN_ID",
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "encode",
    "last_message",
    "plain_ids",
    "prompt_text",
]

BYTES: Final = 256
SPECIAL_TOKENS: Final = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""The texts of the special tokens, from id 256 on."""

BOS_TOKEN_ID: Final = BYTES
EOS_TOKEN_ID: Final = BYTES + 1
_USER: Final = BYTES + SPECIAL_TOKENS.index("<|user|>")
VOCAB_SIZE: Final = BYTES + len(SPECIAL_TOKENS)

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if not (loop.last and continue_final_message) %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def encode(text: str) -> tuple[int, ...]:
    """Return the text's ids; the names of special tokens are text here."""
    return tuple(text.encode())


def prompt_text(ids: Sequence[int]) -> str:
    """Return a prompt's text as its caller gave it: special tokens by name, without the first begin token."""
    ids = ids[1:] if ids and ids[0] == BOS_TOKEN_ID else ids
    parts = [bytes((i,)) if i < BYTES else SPECIAL_TOKENS[i - BYTES].encode() for i in ids]
    return b"".join(parts).decode(errors="replace")


def last_message(ids: Sequence[int]) -> str | None:
    """Return what the last user message of a rendered chat says; None where there is none."""
    if _USER not in ids:
        return None
    start = len(ids) - list(reversed(ids)).index(_USER)
    end = next((place for place in range(start, len(ids)) if ids[place] >= BYTES), len(ids))
    return prompt_text(ids[start:end])


def plain_ids(ids: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return ids as plain integers.

    Raises:
        TypeError: one of them is no integer.
        ValueError: the vocabulary does not have one of them.
    """
    plain = tuple(operator.index(token) for token in ids)
    for token in plain:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"a scripted token must be from 0 to {VOCAB_SIZE - 1}, not {token}")
    return plain
