"""Finding a model's tokenizer: folders as transformers writes them, and older ones."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncllm.errors import ModelLoadError
from asyncllm.text.encoding import surround_prompts
from asyncllm.text.load import load_tokenizer
from helpers.tiny_tokenizers import tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer as RawTokenizer

    from asyncllm.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "fox"}]


def write(folder: Path, config: dict[str, Any] | None = None, *, raw: RawTokenizer | None = None) -> Path:
    """Write a folder's tokenizer.json, and a tokenizer_config.json if there is one."""
    (raw or tiny_tokenizer("byte level")).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load(path: Path) -> Tokenizer:
    """Load a tokenizer that is there."""
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def test_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert load_tokenizer(tmp_path) is None


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path))
    assert tokenizer.encode("The fox") == tiny_tokenizer("byte level").encode("The fox").ids
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (frozenset(), None)


@pytest.mark.parametrize("written", ["</s>", {"content": "</s>", "lstrip": False, "special": True}])
def test_eos_and_bos_by_text_or_object(tmp_path: Path, written: object) -> None:
    """B80: the tokenizer's own part of the union."""
    tokenizer = load(write(tmp_path, {"eos_token": written, "bos_token": "<s>"}))
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (frozenset({2}), 1)


def test_names_from_special_tokens_map(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "</s>"}', encoding="utf-8")
    assert load(write(tmp_path, {"bos_token": "<s>"})).bos_token_id == 1  # where both name it: the config
    assert load(tmp_path).eos_token_ids == {2}


def test_token_named_in_the_config_is_special(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, {"additional_special_tokens": ["The", {"content": "<think>"}]}))
    assert tokenizer.decode(tokenizer.encode("The fox<think>")) == " fox"


def test_token_that_the_vocabulary_lacks_gets_no_id(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, {"pad_token": "[PAD]", "eos_token": "[END]"}))
    assert tokenizer.vocab_size == tiny_tokenizer("byte level").get_vocab_size()
    assert tokenizer.eos_token_ids == frozenset()
    assert max(tokenizer.encode("[PAD]")) < tokenizer.vocab_size


@pytest.mark.parametrize("adds", [True, False])
def test_tokenizer_json_says_what_is_added_to_a_prompt(tmp_path: Path, adds: bool) -> None:
    """B81: as in transformers, which does not look at add_bos_token beside it."""
    raw = tiny_tokenizer("byte level")
    if adds:
        surround_prompts(raw, bos_token_id=1, eos_token_id=2)
    folder = write(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": not adds}, raw=raw)
    ids = raw.encode("The fox", add_special_tokens=False).ids
    assert load(folder).encode("The fox") == ([1, *ids, 2] if adds else ids)
    assert load(folder).encode("The fox") == AutoTokenizer.from_pretrained(folder)("The fox")["input_ids"]


@pytest.mark.parametrize(
    ("name", "config", "cleans"),
    [
        ("wordpiece", {}, False),
        ("wordpiece", {"clean_up_tokenization_spaces": True}, True),
        ("byte level", {"clean_up_tokenization_spaces": True}, False),
    ],
)
def test_clean_up_of_spaces_is_as_transformers_decodes(
    tmp_path: Path, name: str, config: dict[str, Any], cleans: bool
) -> None:
    """B70. transformers leaves the spaces of a BPE alone, whatever the setting (from 5.20 on)."""
    raw = tiny_tokenizer(name)
    if name == "wordpiece":
        raw.decoder = None
    tokenizer = load(write(tmp_path, config, raw=raw))
    ids = raw.encode("The fox isn't here . It 's late").ids
    assert (tokenizer.decode(ids) != raw.decode(ids)) == cleans
    if cleans:
        assert tokenizer.decode(ids) == AutoTokenizer.from_pretrained(tmp_path).decode(ids, skip_special_tokens=True)


def test_bpe_whose_config_insists_is_cleaned_up(tmp_path: Path) -> None:
    insist = {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    }
    tokenizer = load(write(tmp_path, insist))
    assert tokenizer.decode(tokenizer.encode("here .")) == "here."


def test_chat_template_of_the_config(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, {"chat_template": "{{ messages[0].content }}!"}))
    assert tokenizer.decode(tokenizer.render_chat(CHAT)) == "fox!"


def test_chat_template_file_stands_before_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}?", encoding="utf-8")
    tokenizer = load(write(tmp_path, {"chat_template": "no", "eos_token": "</s>"}))
    assert tokenizer.decode(tokenizer.render_chat(CHAT), skip_special_tokens=False) == "</s>fox?"


@pytest.mark.parametrize("where", ["config", "files"])
def test_several_templates_by_name(tmp_path: Path, where: str) -> None:
    sources = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].name }}"}
    if where == "config":
        write(tmp_path, {"chat_template": [{"name": name, "template": text} for name, text in sources.items()]})
    else:
        write(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(sources["default"], encoding="utf-8")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(sources["tool_use"], encoding="utf-8")
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.render_chat(CHAT)) == "fox"
    assert tokenizer.decode(tokenizer.render_chat(CHAT, tools=[{"name": "quick"}])) == "quick"


def test_special_tokens_named_by_the_model_reach_the_template(tmp_path: Path) -> None:
    config = {"extra_special_tokens": {"end_token": "</s>"}, "chat_template": "{{ end_token }}"}
    assert load(write(tmp_path, config)).render_chat(CHAT) == [2]


def test_folder_that_transformers_wrote(tmp_path: Path) -> None:
    template = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer("byte level"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    fast.save_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.encode("The <s> fox") == fast("The <s> fox")["input_ids"]
    assert tokenizer.render_chat(CHAT) == fast.apply_chat_template(
        CHAT, tokenize=True, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "\x00"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
    ],
)
def test_broken_file_is_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=f"{tmp_path}: {name}"):
        load_tokenizer(tmp_path)


def test_sentencepiece_folder_is_converted(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["The quick brown fox isn't here.", "The fox is late, and we have seen the end of it."]),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": True,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    own = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = load(tmp_path)
    for text in ("The fox", "two  spaces\n世 ", "isn't"):
        assert tokenizer.encode(text) == [1, *own.encode(text)]
        assert tokenizer.decode(own.encode(text)) == text
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (frozenset({2}), 1)
    assert tokenizer.render_chat(CHAT).count(1) == 1


def test_older_file_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelLoadError, match="cannot be converted"):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n", encoding="utf-8")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelLoadError):
        load_tokenizer(tmp_path)
    assert not ran.exists()
