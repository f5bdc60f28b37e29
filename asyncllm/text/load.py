"""Find and load a model's tokenizer.

Runs where an engine opens, in one thread; owns nothing. Invariant: no code of a model's author runs. A tokenizer.json
is the tokenizer, and alone says what is added to a prompt; its neighbours add names (which token begins and ends a
text), chat templates and a few settings, by transformers' rules.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken

from asyncllm.errors import ModelLoadError
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["load_tokenizer"]

_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
# Tokenizers of before tokenizer.json, which transformers converts.
_OLDER_FILES: Final = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a model's folder; that of a .gguf file is in its header, see `gguf_tokenizer`.

    Args:
        folder: the model's.

    Returns:
        The tokenizer; None if there is none.

    Raises:
        ModelLoadError: a file of the tokenizer cannot be read or is of a kind that is not supported; names it.
    """
    try:
        if (folder / "tokenizer.json").is_file():
            return _from_tokenizer_json(folder)
        if any((folder / name).is_file() for name in _OLDER_FILES):
            return _from_older_files(folder)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    return None


def _from_tokenizer_json(folder: Path) -> Tokenizer:
    try:
        raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"tokenizer.json cannot be read: {error}") from error
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    texts = {name: text for name in _TOKEN_NAMES if (text := _token_text(config.get(name))) is not None}
    _mark_special(raw, [*texts.values(), *_listed_tokens(config)])
    bos, eos = (raw.token_to_id(texts[name]) if name in texts else None for name in ("bos_token", "eos_token"))
    return Tokenizer(
        raw,
        eos_token_ids=() if eos is None else (eos,),
        bos_token_id=bos,
        clean_up_spaces=_cleans_up(raw, config),
        chat_template=_chat_template(folder, config, texts),
    )


def _from_older_files(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and few models need it

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the conversion raise
        needs = "(a SentencePiece model needs the packages sentencepiece and protobuf)"
        raise ModelLoadError(f"the tokenizer cannot be converted {needs}: {error}") from error
    raw = getattr(converted, "backend_tokenizer", None)
    if not isinstance(raw, tokenizers.Tokenizer):
        raise ModelLoadError(f"a tokenizer of type {type(converted).__name__} is not supported, it has no fast form")
    texts = {name: str(text) for name, text in converted.special_tokens_map.items() if name in _TOKEN_NAMES}
    templates = _named_templates(converted.chat_template)
    eos = converted.eos_token_id
    return Tokenizer(
        raw,
        eos_token_ids=() if eos is None else (eos,),
        bos_token_id=converted.bos_token_id,
        clean_up_spaces=_cleans_up(raw, vars(converted)),
        chat_template=ChatTemplate(templates, special_tokens=texts) if templates else None,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} must hold an object")
    return value


def _token_text(value: object) -> str | None:
    """A token as config files name it: its text, or an object with its text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _listed_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _TOKEN_LISTS:
        listed = config.get(name) or ()
        for value in listed.values() if isinstance(listed, dict) else listed:
            if text := _token_text(value):
                yield text


def _mark_special(raw: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Make the tokens that config files name special. One that is not in the vocabulary has no row in any model."""
    known = {token.content for token in raw.get_added_tokens_decoder().values() if token.special}
    new = [text for text in texts if text not in known and raw.token_to_id(text) is not None]
    raw.add_special_tokens([AddedToken(text, normalized=False) for text in new])


def _cleans_up(raw: tokenizers.Tokenizer, config: Mapping[str, Any]) -> bool:
    """Whether decoding cleans up spaces; for BPE, whose spaces are its own, only if the config insists."""
    insists = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    wanted = config.get("clean_up_tokenization_spaces", False)
    return bool(wanted and (insists or not isinstance(raw.model, tokenizers.models.BPE)))


def _chat_template(folder: Path, config: Mapping[str, Any], texts: Mapping[str, str]) -> ChatTemplate | None:
    """The templates: files of their own stand before those in tokenizer_config.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (single := folder / "chat_template.jinja").is_file():
        files["default"] = single
    try:
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"a chat template cannot be read: {error}") from error
    templates = templates or _named_templates(config.get("chat_template"))
    named = config.get("extra_special_tokens")
    more = (
        {name: text for name, value in named.items() if (text := _token_text(value))} if isinstance(named, dict) else {}
    )
    return ChatTemplate(templates, special_tokens={**texts, **more}) if templates else None


def _named_templates(value: object) -> dict[str, str]:
    """A chat template, or several by name, as tokenizer_config.json and transformers write them."""
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case dict():
            return {str(name): str(source) for name, source in value.items()}
        case list() if all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value):
            return {str(item["name"]): str(item["template"]) for item in value}
        case _:
            raise ModelLoadError("tokenizer_config.json: chat_template must be a text or a list of named texts")
