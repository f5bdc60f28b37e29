"""Small trained tokenizers, one of every kind of decoder that the package follows.

Runs in the tests. Owns nothing: each call trains a new one. (The library breaks ties in training as they come, so two
of the same name need not be equal, but for "byte level".)
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BOS", "EOS", "SPECIALS", "TINY_TOKENIZERS", "UNK", "byte_ids", "tiny_tokenizer"]

UNK: Final = "<unk>"
BOS: Final = "<s>"
EOS: Final = "</s>"
SPECIALS: Final = (UNK, BOS, EOS)
_SPACE: Final = "\u2581"
_BYTE_TOKENS: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))
_PLAIN: Final = "The quick brown fox isn't here . Hello , world ! It 's late , and we 've seen the 'end' of it ?"
_CORPUS: Final = (
    _PLAIN,
    "def add(a, b):\n    return a + b  # 12 345\n\tnaïve café",
    "你好世界 नमस्ते दुनिया สวัสดีชาวโลก 👩\u200d👩\u200d👧\u200d👦 🇩🇪 👍🏽",
)


def tiny_tokenizer(name: str) -> Tokenizer:
    """Train the tokenizer of this name, one of `TINY_TOKENIZERS`.

    `SPECIALS` are its special tokens, with the ids from 0 on; "<think>" and "<two words>" are added tokens that are
    not special.
    """
    raw = TINY_TOKENIZERS[name]()
    raw.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "<two words>")])
    return raw


def byte_ids(raw: Tokenizer, data: bytes) -> list[int]:
    """Return a token for each byte, which must be one that UTF-8 uses."""
    if raw.token_to_id(_BYTE_TOKENS[0]) is not None:
        names = dict(enumerate(_BYTE_TOKENS))
    else:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        characters = [
            chr(code) for code in (*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000))
        ]
        names = {
            byte: name
            for text in characters
            for byte, name in zip(text.encode(), split.pre_tokenize_str(text)[0][0], strict=True)
        }
    found = [raw.token_to_id(names[byte]) for byte in data]
    return [token_id for token_id in found if token_id is not None]


def _byte_level() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_CORPUS, trainer)
    return raw


def _sentencepiece(*, strip: bool) -> Tokenizer:
    """A BPE with byte fallback; `strip`: a space is put before a text and taken away again (llama 2; else: gemma)."""
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNK, fuse_unk=True))
    prepend = [normalizers.Prepend(_SPACE)] if strip else []
    raw.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if strip else []
    raw.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=[*SPECIALS, *_BYTE_TOKENS], show_progress=False)
    raw.train_from_iterator([_PLAIN], trainer)
    state = json.loads(raw.to_str())  # the trainer makes special tokens of the byte tokens, which real models do not
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIALS]
    return Tokenizer.from_str(json.dumps(state))


def _unigram() -> Tokenizer:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=list(SPECIALS), unk_token=UNK, show_progress=False)
    raw.train_from_iterator(_CORPUS, trainer)
    return raw


def _wordpiece() -> Tokenizer:
    raw = Tokenizer(models.WordPiece(unk_token=UNK))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=list(SPECIALS), show_progress=False)
    raw.train_from_iterator(_CORPUS, trainer)
    return raw


def _no_decoder() -> Tokenizer:
    raw = _wordpiece()
    raw.decoder = None
    return raw


TINY_TOKENIZERS: Final[dict[str, Callable[[], Tokenizer]]] = {
    "byte level": _byte_level,
    "sentencepiece": lambda: _sentencepiece(strip=True),
    "gemma": lambda: _sentencepiece(strip=False),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "no decoder": _no_decoder,
}
