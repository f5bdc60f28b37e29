"""Token ids to text, one at a time.

Runs on the engine thread; a `Detokenizer` is owned by one request. Invariant: what `add` and `finish` return, joined,
is what decoding the prompt and the completion together adds to decoding the prompt alone, and no returned text could
be changed by a later token: incomplete characters, and what the tokenizer's decoder may still rewrite, are held back.

The tokenizer says how its decoder treats a token (`text/decoding.py`), so a token costs a table look-up, not a call
of the decoder. `tokenizers.decoders.DecodeStream` does not do: it has no end, so that held text is lost, and it raises
where a later byte token turns text that it has given out into replacement characters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turn a completion's ids into text, continuing its prompt.

    Args:
        tokenizer: whose decoder applies; ids outside its vocabulary have no text.
        prompt_ids: the prompt's tokens; only its last ones are looked at.
        skip_special_tokens: leave out the text of special tokens.
    """

    __slots__ = ("_clean_up", "_stream")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._stream = tokenizer.decode_stream(skip_special_tokens=skip_special_tokens)
        self._stream.prime(prompt_ids)
        self._clean_up = tokenizer.clean_up_stream()

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that became certain with it, often empty."""
        text = self._stream.add(token_id)
        return text if self._clean_up is None else self._clean_up.add(text)

    def pending(self) -> str:
        """Return the text held back that `finish` would add now; empty in the middle of a character."""
        text = self._stream.pending()
        return text if self._clean_up is None else self._clean_up.settle(text)

    def finish(self) -> str:
        """Return the rest; bytes that never completed a character are replacement characters in it."""
        text = self._stream.finish()
        return text if self._clean_up is None else self._clean_up.settle(text)
