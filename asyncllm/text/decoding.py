"""How a tokenizer's decoder turns tokens into text, in a form that can be followed token by token.

Runs anywhere; a `Decoding` is shared by all requests and only fills its memos, a stream is owned by one request.
Invariant: for each kind of decoder known here, the text of a token depends on nothing but the token itself, whether
any token stands before it, and the run of byte tokens that it stands in. Other kinds are refused by name.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Final, Protocol

from asyncllm.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers

__all__ = ["DecodeStream", "Decoding"]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT: Final = "\ufffd"
_MOST_HELD_BYTES: Final = 3  # of a UTF-8 character whose last byte is missing


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


class DecodeStream(Protocol):
    """Follows one completion; `Detokenizer` says what its methods return."""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Start after this prompt."""

    def add(self, token_id: int) -> str:
        """Take the next token."""

    def pending(self) -> str:
        """Return text that is whole now and may still change."""

    def finish(self) -> str:
        """Return the rest."""


class Decoding:
    """The decoder of one tokenizer.

    Args:
        raw: the tokenizer; not changed afterwards.

    Raises:
        ModelLoadError: its decoder is of a kind that cannot be followed token by token.
    """

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        stages = _stages(raw)
        kinds = [str(stage["type"]) for stage in stages]
        skipped = frozenset(token_id for token_id, token in raw.get_added_tokens_decoder().items() if token.special)
        self._pieces: dict[bool, _BytePieces] | dict[bool, _TextPieces]
        if kinds == ["ByteLevel"]:
            self._pieces = {True: _BytePieces(raw, skipped), False: _BytePieces(raw, frozenset())}
        elif _is_followable(stages):
            context = _Context(raw, strips="Strip" in kinds, has_byte_tokens="ByteFallback" in kinds)
            self._pieces = {True: _TextPieces(context, skipped), False: _TextPieces(context, frozenset())}
        else:
            raise ModelLoadError(f"a tokenizer with the decoder {' + '.join(kinds)} is not supported")

    def stream(self, *, skip_special_tokens: bool) -> DecodeStream:
        """Return a new stream, to be primed with a prompt."""
        pieces = self._pieces[skip_special_tokens]
        return _ByteStream(pieces) if isinstance(pieces, _BytePieces) else _TextStream(pieces)

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """Return what each token adds to a text that has begun, special tokens' names included."""
        pieces = self._pieces[False]
        return [_as_bytes(pieces[token_id]) for token_id in range(vocab_size)]


def _as_bytes(piece: str | bytes | int | None) -> bytes:
    match piece:
        case str():
            return piece.encode()
        case int():
            return bytes((piece,))
        case _:
            return piece or b""


def _stages(raw: tokenizers.Tokenizer) -> list[dict[str, object]]:
    """The decoder's parts, in order; none for a tokenizer without a decoder (its tokens are joined by spaces)."""
    if raw.decoder is None:
        return []
    state = json.loads(raw.decoder.__getstate__())
    stages: list[dict[str, object]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return stages


def _is_followable(stages: Sequence[dict[str, object]]) -> bool:
    """Whether the decoder is one part that looks at each token alone, or a SentencePiece model's sequence of parts."""
    kinds = [stage["type"] for stage in stages]
    if not kinds or kinds in (["Metaspace"], ["WordPiece"]):
        return True
    plain_replacements = all("String" in stage["pattern"] for stage in stages if stage["type"] == "Replace")  # type: ignore[operator]
    strips = [(stage["content"], stage["start"], stage["stop"]) for stage in stages if stage["type"] == "Strip"]
    in_order = re.fullmatch(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?", "".join(f"{kind} " for kind in kinds))
    return plain_replacements and strips in ([], [(" ", 1, 0)]) and in_order is not None


class _BytePieces(dict[int, "str | bytes"]):
    """Memo of a byte-level tokenizer's tokens: their text, or their bytes where these are not whole characters."""

    def __init__(self, raw: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._raw = raw
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._bytes(token_id)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece

    def _bytes(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._raw.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token, which is written as it is
            return token.encode()


class _ByteStream:
    """Bytes of a byte-level tokenizer to text; malformed ones become replacement characters."""

    __slots__ = ("_decoder", "_holding", "_pieces", "_shown")

    def __init__(self, pieces: _BytePieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holding = False  # the decoder holds the beginning of a character
        self._shown = ""  # ... which began in the prompt, whose own text ends with these replacement characters for it

    def prime(self, prompt_ids: Sequence[int]) -> None:
        tail = b""
        for token_id in reversed(prompt_ids):
            piece = self._pieces[int(token_id)]
            tail = (piece.encode() if isinstance(piece, str) else piece) + tail
            if len(tail) >= _MOST_HELD_BYTES:
                break
        self._decoder.decode(tail[-_MOST_HELD_BYTES:])
        held = self._decoder.getstate()[0]
        self._holding = bool(held)
        self._shown = held.decode(errors="replace")

    def add(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._holding:
                return piece
            piece = piece.encode()
        text = self._own(self._decoder.decode(piece))
        self._holding = bool(self._decoder.getstate()[0])
        return text

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """Leave out the replacement characters that belong to the prompt's text."""
        if self._shown and text:
            text, self._shown = text.removeprefix(self._shown), ""
        return text


class _Context:
    """Asks the decoder itself what tokens add after others, with one ordinary token standing for these."""

    def __init__(self, raw: tokenizers.Tokenizer, *, strips: bool, has_byte_tokens: bool) -> None:
        self.raw = raw
        self.has_byte_tokens = has_byte_tokens
        self.strips = strips  # the first space of the whole text is left out, not that of the first token
        self._anchor: list[int] = []
        self._anchor_text = ""
        for token_id in range(raw.get_vocab_size()):
            token = raw.id_to_token(token_id)
            if token is None or _BYTE_TOKEN.fullmatch(token):
                continue
            if text := self.first([token_id]):
                self._anchor, self._anchor_text = [token_id], text
                return

    def first(self, token_ids: list[int]) -> str:
        """The text of tokens at the very beginning."""
        return self.raw.decode(token_ids, skip_special_tokens=False)

    def after(self, token_ids: list[int]) -> str:
        """The text of tokens after others."""
        return self.first(self._anchor + token_ids)[len(self._anchor_text) :]


class _TextPieces(dict[int, "str | int | None"]):
    """Memo of the tokens' texts after others; a byte token's byte; None for tokens that are left out."""

    def __init__(self, context: _Context, skipped: frozenset[int]) -> None:
        self.context = context
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | int | None:
        token = None if token_id in self._skipped else self.context.raw.id_to_token(token_id)
        piece: str | int | None
        if token is None:
            piece = None
        elif self.context.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            piece = int(match[1], 16)
        else:
            piece = self.context.after([token_id])
        self[token_id] = piece
        return piece


class _TextStream:
    """Tokens that are text, and runs of byte tokens.

    A run that is not UTF-8 as a whole becomes one replacement character per byte, so none of it is certain
    before the first token after it.
    """

    __slots__ = ("_first", "_pieces", "_prompt_bytes", "_run", "_run_bytes")

    def __init__(self, pieces: _TextPieces) -> None:
        self._pieces = pieces
        self._first = True  # no token before the run, or before the next one where there is no run
        self._run: list[int] = []
        self._run_bytes = bytearray()
        self._prompt_bytes = 0  # how many of the run's bytes belong to the prompt

    def prime(self, prompt_ids: Sequence[int]) -> None:
        for token_id in map(int, reversed(prompt_ids)):
            piece = self._pieces[token_id]
            if isinstance(piece, str):
                self._first = False
                break
            if piece is not None:
                self._run.append(token_id)
                self._run_bytes.append(piece)
        self._run.reverse()
        self._run_bytes.reverse()
        self._prompt_bytes = len(self._run)

    def add(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(token_id)
            self._run_bytes.append(piece)
            return ""
        before = self.finish() if self._run else ""
        if self._first:
            self._first = False
            piece = self._pieces.context.first([token_id])
        return before + piece

    def pending(self) -> str:
        if not self._run:
            return ""
        try:
            return self._valid_run_text(self._run_bytes.decode())
        except UnicodeDecodeError:
            return ""

    def finish(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._valid_run_text(self._run_bytes.decode())
        except UnicodeDecodeError:
            text = _REPLACEMENT * (len(self._run) - self._prompt_bytes)
        self._first = False
        self._run, self._run_bytes, self._prompt_bytes = [], bytearray(), 0
        return text

    def _valid_run_text(self, text: str) -> str:
        if self._prompt_bytes:  # its whole characters belong to the prompt, one that it only begins does not
            return text[len(self._run_bytes[: self._prompt_bytes].decode(errors="ignore")) :]
        return text.removeprefix(" ") if self._first and self._pieces.context.strips else text
