"""Tokenizers of GGUF files: as llama.cpp and SentencePiece tokenize."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.errors import ModelLoadError
from asyncllm.text.gguf_tokenizer import gguf_tokenizer

if TYPE_CHECKING:
    from asyncllm.text.tokenizer import Tokenizer

# What llama.cpp makes of "texts" with the demo model's file, special tokens recognised, nothing added: its ids by
# tokenizer.ggml.pre, "smollm" being the file as it is. (Made with llama-cpp-python 0.3.36.)
LLAMA_CPP: Final = json.loads((Path(__file__).parent / "llama_cpp_ids.json").read_text(encoding="utf-8"))


def tokenizer_of(settings: dict[str, object]) -> Tokenizer:
    """Return the tokenizer of a file that has one."""
    tokenizer = gguf_tokenizer(settings)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"])
def test_ids_are_those_of_llama_cpp(demo_settings: dict[str, object], pre: str) -> None:
    tokenizer = tokenizer_of({**demo_settings, "tokenizer.ggml.pre": pre})
    for text, ids in zip(LLAMA_CPP["texts"], LLAMA_CPP[pre], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_text_of_qwen2_is_composed_first(demo_settings: dict[str, object]) -> None:
    """As its own tokenizer does; llama.cpp leaves it out."""
    tokenizer = tokenizer_of({**demo_settings, "tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("y\u0300") == tokenizer.encode("\u1ef3")


@given(text=st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=60))
def test_demo_models_text_comes_back(demo_tokenizer: Tokenizer, text: str) -> None:
    assert demo_tokenizer.decode(demo_tokenizer.encode(text), skip_special_tokens=False) == text


def test_demo_models_special_tokens(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.eos_token_ids == {2}
    assert demo_tokenizer.bos_token_id == 1
    assert demo_tokenizer.vocab_size == 49152
    ids = demo_tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert (ids[0], ids[-2]) == (1, 2)
    assert demo_tokenizer.decode(ids) == "user\nhi\n"


def test_demo_models_conversation(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [token_id for token_id in ids if token_id < 3] == [1, 2, 1, 2, 1]


def test_unknown_pre_tokenizer_is_refused_by_name(demo_settings: dict[str, object]) -> None:
    with pytest.raises(
        ModelLoadError, match=r"tokenizer\.ggml\.pre='kimi-k2' is not supported; supported are .*smollm"
    ):
        gguf_tokenizer({**demo_settings, "tokenizer.ggml.pre": "kimi-k2"})


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "gemma4", 7])
def test_unknown_kind_of_model_is_refused_by_name(model: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.ggml\.model={model!r} is not supported"):
        gguf_tokenizer({"tokenizer.ggml.model": model})


@pytest.mark.parametrize("settings", [{}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}])
def test_file_without_a_tokenizer_has_none(settings: dict[str, object]) -> None:
    assert gguf_tokenizer(settings) is None


# The tokens of single bytes.
PRINTABLE: Final = [chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
ALPHABET: Final = [*PRINTABLE, *(chr(256 + index) for index in range(256 - len(PRINTABLE)))]


def small_file(**settings: object) -> dict[str, object]:
    """Return the settings of a small byte-level file, with these changed; None takes one away."""
    tokens = [*ALPHABET, "ab", "<s>", "</s>", "<tool>", "[PAD260]", "<|im_end|>"]
    own: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 257 + [3, 3, 4, 5, 3],
        "merges": ["a b"],
        "bos_token_id": 257,
        "eos_token_id": 258,
        **settings,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in own.items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["1", "2", "3", "4", "1", "2", "3", "4"]),
        ("gpt-2", ["1234", "1234"]),
        ("llama-bpe", ["123", "4", "12", "34"]),
        ("qwen2", ["1", "2", "3", "4", "1", "2", "3", "4"]),
        ("default", ["123", "4", "12", "34"]),
        ("", ["123", "4", "12", "34"]),
    ],
)
def test_digits_are_split_as_llama_cpp_splits_them(pre: str, tokens: list[str]) -> None:
    """Its own output for this vocabulary; the demo model's has single digits only. No name means "default"."""
    vocabulary = [*ALPHABET, "12", "123", "1234", "34"]
    file = small_file(
        pre=pre,
        tokens=vocabulary,
        token_type=None,
        merges=["1 2", "12 3", "123 4", "3 4"],
        add_bos_token=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    assert [vocabulary[token_id] for token_id in tokenizer_of(file).encode("12341234")] == tokens


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("llama-bpe", "xyz", ["xyz"]),  # a whole word that is a token is taken, whatever merges there are
        ("qwen2", "xyz", ["x", "y", "z"]),
        ("llama-bpe", "A'Sb", ["A", "'", "S", "b"]),  # contractions in capitals too
        ("gpt-2", "A'Sb", ["A", "'", "Sb"]),
        ("gpt-2", "abc", ["ab", "c"]),  # of a merge that is there twice, the first counts
    ],
)
def test_words_are_merged_as_llama_cpp_merges_them(pre: str, text: str, tokens: list[str]) -> None:
    """Its own output for this vocabulary."""
    vocabulary = [*ALPHABET, "xyz", "Sb", "ab", "bc"]
    merges = ["S b", "a b", "b c", "a b"]
    file = small_file(
        pre=pre, tokens=vocabulary, token_type=None, merges=merges, add_bos_token=False, bos_token_id=0, eos_token_id=0
    )
    assert [vocabulary[token_id] for token_id in tokenizer_of(file).encode(text)] == tokens


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, [256]),
        ({"add_bos_token": True}, [257, 256]),
        ({"add_bos_token": True, "add_eos_token": True}, [257, 256, 258]),
        ({"pre": "llama-bpe"}, [257, 256]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [256]),
        ({"add_bos_token": True, "bos_token_id": None}, [256]),
    ],
)
def test_what_the_file_says_is_added_to_a_prompt(settings: dict[str, object], ids: list[int]) -> None:
    assert tokenizer_of(small_file(**settings)).encode("ab") == ids
    assert tokenizer_of(small_file(**settings)).encode("ab", add_special_tokens=False) == [256]


def test_kinds_of_tokens() -> None:
    tokenizer = tokenizer_of(small_file())
    assert tokenizer.encode("<tool></s>") == [259, 258]
    assert tokenizer.decode([256, 258, 259]) == "ab<tool>"  # a control token is special, a user-defined one is not
    assert tokenizer.decode([256, 260]) == "ab"  # fills up the model's vocabulary, is no token
    assert tokenizer.encode("[PAD260]") != [260]


def test_every_id_that_ends_a_turn_is_eos() -> None:
    """B80: those that the file names, and control tokens that can mean nothing else."""
    assert tokenizer_of(small_file()).eos_token_ids == {258, 261}
    assert tokenizer_of(small_file(eot_token_id=256, eom_token_id=0)).eos_token_ids == {258, 261, 256, 0}
    assert tokenizer_of(small_file(token_type=[1] * 257 + [3, 3, 4, 5, 1])).eos_token_ids == {258}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": None}, r"tokenizer\.ggml\.tokens must be an array"),
        ({"merges": None}, r"tokenizer\.ggml\.merges must be an array"),
        ({"merges": ["a zz"]}, r"merges do not fit"),
        ({"token_type": [1]}, r"token_type is for 1 of 262 tokens"),
        ({"eos_token_id": 262}, r"eos_token_id=262 is no id of 262 tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, r"tokens are not all different"),
    ],
)
def test_broken_settings_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        gguf_tokenizer(small_file(**settings))


def test_templates_of_a_file() -> None:
    file = small_file(add_bos_token=True) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ eos_token }}{{ messages[0].content }}",
    }
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer_of(file).render_chat(messages) == [257, 256]  # B81: one BOS
    assert tokenizer_of(file).render_chat(messages, tools=[{"type": "function"}]) == [258, 256]


@pytest.fixture(scope="module")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """Train a SentencePiece BPE model as llama's were: bytes for rare characters, nothing normalised."""
    sentences = (Path(__file__).parent / "test_detokenizer.py").read_text(encoding="utf-8").splitlines()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in sentences if line.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<|user|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def as_gguf(model: sentencepiece.SentencePieceProcessor, **settings: object) -> dict[str, object]:
    """Write a SentencePiece model as a GGUF file has it."""
    pieces = range(model.get_piece_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in pieces]
    kinds[model.piece_to_id("<|user|>")] = 4
    own: dict[str, object] = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in pieces],
        "scores": [model.get_score(i) for i in pieces],
        "token_type": kinds,
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        **settings,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


@given(
    text=st.one_of(
        st.text(max_size=30),
        st.text(alphabet="aeinorst _.(\n", max_size=40),
        st.lists(st.sampled_from(["tokenizer", "def ", "  ", "test", "ids", "世", "1234"]), max_size=8).map("".join),
    )
)
def test_sentencepiece_ids_are_sentencepieces_own(
    sentencepiece_model: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    own = sentencepiece_model.encode(text.replace("<|user|>", ""))
    tokenizer = tokenizer_of(as_gguf(sentencepiece_model))
    assert tokenizer.encode(text.replace("<|user|>", "")) == [sentencepiece_model.bos_id(), *own]
    assert tokenizer.decode(own) == text.replace("\u2581", " ").replace("<|user|>", "")


def test_sentencepiece_special_tokens(sentencepiece_model: sentencepiece.SentencePieceProcessor) -> None:
    """As llama.cpp has it: each stretch of text between them begins with a space of its own."""
    tokenizer = tokenizer_of(as_gguf(sentencepiece_model))
    user = sentencepiece_model.piece_to_id("<|user|>")
    word = sentencepiece_model.encode("def")
    assert tokenizer.encode("def</s>def<|user|>def", add_special_tokens=False) == [*word, 2, *word, user, *word]
    bare = tokenizer_of(as_gguf(sentencepiece_model, add_space_prefix=False, add_bos_token=False))
    assert bare.encode(" def") == word
    assert bare.decode(word) == " def"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": [-0.25 - 0.5 * index for index in range(900)]}, "a Unigram model"),
        ({"scores": [-1.0] * 900}, "a Unigram model"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_sentencepiece_models_of_other_kinds_are_refused_by_name(
    sentencepiece_model: sentencepiece.SentencePieceProcessor, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        gguf_tokenizer(as_gguf(sentencepiece_model, **settings))
