"""Build the tokenizer that a GGUF file describes.

Runs anywhere; owns nothing. Invariant: texts are tokenized as llama.cpp does with the same file; what it does in a
way that is not known here is refused by name. The pre-tokenizers are those of llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from asyncllm.errors import ModelLoadError
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.encoding import surround_prompts
from asyncllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["gguf_tokenizer"]

_PREFIX: Final = "tokenizer.ggml."
_SPACE: Final = "\u2581"  # how SentencePiece writes a space

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}",)
_QWEN2: Final = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}",)
_SMOLLM: Final = (r"\p{N}", _GPT2)
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# tokenizer.ggml.pre: the patterns that split a text, one after the other.
_SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "phi-2": (_GPT2,),
    "mellum": (_GPT2,),
    "olmo": (_GPT2,),
    "mpt": (_GPT2,),
    "exaone4": (_GPT2,),
    "trillion": (_GPT2,),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
    "exaone": _SMOLLM,
    "minerva-7b": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "megrez": _QWEN2,
}
# Models of these take a word that is a token as it is, and begin a prompt with BOS unless told otherwise.
_LLAMA3_LIKE: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3"})
# Models of these bring text into Unicode's composed form first. (llama.cpp leaves that out.)
_COMPOSED: Final = frozenset({"qwen2", "deepseek-r1-qwen"})

# Control tokens that end a turn in every model that has them, for files that name an end of text only.
_END_OF_TURN: Final = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"})

# Templates' names for special tokens, and the file's.
_NAMED_TOKENS: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "cls_token": "cls",
    "mask_token": "mask",
}


def gguf_tokenizer(settings: Mapping[str, object]) -> Tokenizer | None:
    """Build the tokenizer of a GGUF file.

    Args:
        settings: the file's settings by key; those whose keys begin with "tokenizer." are looked at.

    Returns:
        The tokenizer; None if the file has none.

    Raises:
        ModelLoadError: the file's tokenizer is of a kind that is not known here, or its settings contradict each other.
    """
    kind = settings.get(f"{_PREFIX}model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"{_PREFIX}model={kind!r} is not supported; supported are gpt2 and llama")
    vocabulary = _Vocabulary(settings)
    raw = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
    raw.add_special_tokens([_added(text) for text in vocabulary.of_type(_CONTROL, _UNKNOWN)])
    raw.add_tokens([_added(text) for text in vocabulary.of_type(_USER_DEFINED)])
    bos, eos = vocabulary.token_id("bos"), vocabulary.token_id("eos")
    adds_bos = kind == "llama" or vocabulary.text("pre") in _LLAMA3_LIKE
    surround_prompts(
        raw,
        bos_token_id=bos if vocabulary.flag("add_bos_token", default=adds_bos) else None,
        eos_token_id=eos if vocabulary.flag("add_eos_token", default=False) else None,
    )
    ends = {eos, vocabulary.token_id("eot"), vocabulary.token_id("eom")}
    ends |= {vocabulary.ids[text] for text in vocabulary.of_type(_CONTROL) if text in _END_OF_TURN}
    return Tokenizer(
        raw,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        bos_token_id=bos,
        chat_template=_chat_template(settings, vocabulary),
    )


class _Vocabulary:
    """The settings of a file's tokenizer.

    Attributes:
        tokens: text by id.
        types: token type by id.
        ids: id by text, without the tokens that only fill up a model's vocabulary.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self.tokens = [str(text) for text in self.array("tokens")]
        self.types = [int(number) for number in self.array("token_type", default=[_NORMAL] * len(self.tokens))]
        if len(self.types) != len(self.tokens):
            raise ModelLoadError(f"{_PREFIX}token_type is for {len(self.types)} of {len(self.tokens)} tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise ModelLoadError(f"{_PREFIX}tokens are not all different")
        self.ids = {
            text: index
            for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if not (kind == _UNUSED and text == f"[PAD{index}]")
        }

    def array(self, name: str, *, default: Sequence[Any] | None = None) -> Sequence[Any]:
        """Return a list; raise ModelLoadError if there is none and no default."""
        value = self._settings.get(_PREFIX + name, default)
        if value is None or isinstance(value, str) or not hasattr(value, "__iter__"):
            raise ModelLoadError(f"{_PREFIX}{name} must be an array, not {value!r:.80}")
        return list(value)

    def text(self, name: str) -> str:
        return str(self._settings.get(_PREFIX + name, ""))

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._settings.get(_PREFIX + name, default))

    def token_id(self, name: str) -> int | None:
        """The id of "bos", "eos" and so on; None where the file names none."""
        value = self._settings.get(f"{_PREFIX}{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelLoadError(f"{_PREFIX}{name}_token_id={value!r} is no id of {len(self.tokens)} tokens")
        return value

    def of_type(self, *types: int) -> list[str]:
        return [text for text, index in self.ids.items() if self.types[index] in types]


def _added(text: str) -> AddedToken:
    return AddedToken(text, normalized=False)


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """A BPE tokenizer over bytes, as GPT-2's."""
    name = vocabulary.text("pre") or "default"
    if name not in _SPLITS:
        raise ModelLoadError(f"{_PREFIX}pre={name!r} is not supported; supported are {', '.join(_SPLITS)}")
    merges = [_pair(merge) for merge in dict.fromkeys(vocabulary.array("merges"))]
    raw = _bpe(lambda: models.BPE(vocabulary.ids, merges, ignore_merges=name in _LLAMA3_LIKE))
    if name in _COMPOSED:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    return raw


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """A SentencePiece BPE model, as of llama 1 and 2: pieces merge by score, other characters are written in bytes."""
    for setting in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if vocabulary.flag(setting, default=False):
            raise ModelLoadError(f"{_PREFIX}{setting} is not supported for tokenizer.ggml.model='llama'")
    unknown = vocabulary.tokens[vocabulary.token_id("unknown") or 0]
    merges = _merges_by_score(vocabulary)
    raw = _bpe(lambda: models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(_SPACE)] if vocabulary.flag("add_space_prefix", default=True) else []
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    raw.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    raw.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return raw


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, the pieces of the highest scores first."""
    scores = [float(score) for score in vocabulary.array("scores")]
    pieces = {text: scores[vocabulary.ids[text]] for text in vocabulary.of_type(_NORMAL)}
    merged = sorted((text for text in pieces if len(text) > 1), key=lambda text: -pieces[text])
    ranks = [pieces[text] for text in merged]
    if len(set(ranks)) != len(ranks) or not all(rank.is_integer() for rank in ranks):
        raise ModelLoadError(f"{_PREFIX}scores are no ranks of merges: a Unigram model in a GGUF file is not supported")
    return [
        (text[:cut], text[cut:])
        for text in merged
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]


def _bpe(build: Callable[[], models.BPE]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(build())
    except Exception as error:  # of no narrower type: a merge of what is no token, or to it
        raise ModelLoadError(f"{_PREFIX}merges do not fit {_PREFIX}tokens: {error}") from error


def _chat_template(settings: Mapping[str, object], vocabulary: _Vocabulary) -> ChatTemplate | None:
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(f"{key}."): str(text) for name, text in settings.items() if name.startswith(f"{key}.")
    }
    if key in settings:
        templates["default"] = str(settings[key])
    named = {name: vocabulary.token_id(own) for name, own in _NAMED_TOKENS.items()}
    special_tokens = {name: vocabulary.tokens[index] for name, index in named.items() if index is not None}
    return ChatTemplate(templates, special_tokens=special_tokens) if templates else None
