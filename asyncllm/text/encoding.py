"""One text to token ids.

Runs in any thread; owns nothing. Invariant: other threads run while a text is encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import processors

from asyncllm.errors import InvalidRequestError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["encode_text", "surround_prompts"]


def encode_text(raw: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode a text.

    Raises:
        InvalidRequestError: it is no text, or holds half a surrogate pair, which stands for no character.
    """
    try:
        # `encode` would hold the GIL all the time; for a batch, of one text too, it is let go.
        (encoding,) = raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except TypeError:
        raise InvalidRequestError(f"{text!r:.80} cannot be encoded: it must be a text of whole characters") from None
    ids: list[int] = encoding.ids
    return ids


def surround_prompts(raw: tokenizers.Tokenizer, *, bos_token_id: int | None, eos_token_id: int | None) -> None:
    """Make `raw` put these ids around a prompt, in place of what it did until now; None adds nothing."""
    ends = {"bos": bos_token_id, "eos": eos_token_id}
    special_tokens = [
        {"id": name, "ids": [token_id], "tokens": [raw.id_to_token(token_id)]}
        for name, token_id in ends.items()
        if token_id is not None
    ]
    names = ["bos"] * (bos_token_id is not None) + ["$A"] + ["eos"] * (eos_token_id is not None)
    raw.post_processor = processors.TemplateProcessing(single=names, special_tokens=special_tokens)
