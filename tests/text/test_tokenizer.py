"""Encoding and decoding whole texts."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import warnings
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from asyncllm.errors import InvalidRequestError
from asyncllm.text.encoding import surround_prompts
from asyncllm.text.tokenizer import Tokenizer
from helpers.tiny_tokenizers import TINY_TOKENIZERS, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    Tokenizers = Callable[[str], Tokenizer]


@pytest.fixture
def with_bos(raw_tokenizer: Callable[[str], RawTokenizer]) -> Tokenizer:
    """Give a tokenizer that begins each prompt with its BOS, id 1."""
    raw = RawTokenizer.from_str(raw_tokenizer("byte level").to_str())
    surround_prompts(raw, bos_token_id=1, eos_token_id=None)
    return Tokenizer(raw, bos_token_id=1, eos_token_ids=[2])


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
def test_encodes_and_decodes_as_the_library_does(
    tokenizer: Tokenizers, raw_tokenizer: Callable[[str], RawTokenizer], name: str
) -> None:
    raw = raw_tokenizer(name)
    text = "The quick fox</s>"
    ids = tokenizer(name).encode(text)
    assert ids == raw.encode(text).ids
    assert tokenizer(name).decode(ids) == raw.decode(ids, skip_special_tokens=True)
    assert tokenizer(name).decode(ids, skip_special_tokens=False) == raw.decode(ids, skip_special_tokens=False)


def test_bos_is_added_to_a_prompt_unless_told_otherwise(with_bos: Tokenizer) -> None:
    assert with_bos.encode("The") == [1, *with_bos.encode("The", add_special_tokens=False)]


def test_doubled_bos_gives_a_warning(with_bos: Tokenizer) -> None:
    """B81."""
    with pytest.warns(UserWarning, match="'<s>'.* twice"):
        assert with_bos.encode("<s>The")[:2] == [1, 1]


def test_single_bos_gives_no_warning(with_bos: Tokenizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_bos.encode("The")
        with_bos.encode("The <s><s>")
        with_bos.encode("<s><s>The", add_special_tokens=False)  # asked for as it stands


def test_truncation_and_padding_of_the_file_are_off() -> None:
    raw = tiny_tokenizer("byte level")
    raw.enable_truncation(2)
    raw.enable_padding(length=100)
    text = "The quick brown fox"
    assert Tokenizer(raw).encode(text) == tiny_tokenizer("byte level").encode(text).ids


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb" * 1000])
def test_half_a_surrogate_pair_is_refused_by_name(tokenizer: Tokenizers, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        tokenizer("byte level").encode(text)


def test_vocabulary_and_named_ids(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    assert byte_level.vocab_size == tiny_tokenizer("byte level").get_vocab_size()
    assert byte_level.eos_token_ids == {2}
    assert byte_level.bos_token_id == 1


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizers) -> None:
    """B103: in the middle of the work, not only before and after it; on a busy machine not every time."""
    seen: list[float] = []
    over = threading.Event()

    def ran_in_the_middle() -> bool:
        start = time.perf_counter()
        tokenizer("byte level").encode("The quick brown fox isn't here. " * 15_000)
        end = time.perf_counter()
        quarter = (end - start) / 4
        return any(start + quarter < moment < end - quarter for moment in seen)

    def watch() -> None:
        while not over.is_set():
            seen.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert any(ran_in_the_middle() for _ in range(20))
    finally:
        over.set()
        watcher.join()


def test_any_number_of_threads_at_once(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    texts = [f"The quick brown fox {number}" * 20 for number in range(64)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: byte_level.decode(byte_level.encode(text)), texts)) == texts


def test_chat_without_a_template_is_refused_by_name(tokenizer: Tokenizers) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer("byte level").render_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("name", ["byte level", "sentencepiece", "gemma", "unigram", "wordpiece"])
@given(ids=st.lists(st.integers(3, 80), max_size=12))
def test_the_bytes_of_tokens_are_what_they_add_to_a_text(tokenizer: Tokenizers, name: str, ids: list[int]) -> None:
    own = tokenizer(name)
    before = own.encode("The")
    data = b"".join(own.token_bytes()[token_id] for token_id in ids)
    added = own.decode([*before, *ids], skip_special_tokens=False)[len(own.decode(before, skip_special_tokens=False)) :]
    assert len(own.token_bytes()) == own.vocab_size
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return  # half a character: decoding has a replacement for it
    assert text == added


def test_special_tokens_are_told_from_others(tokenizer: Tokenizers) -> None:
    own = tokenizer("sentencepiece")
    assert sorted(own.control_token_ids) == [0, 1, 2]
    assert own.control_tokens(["</s>", "<think>", "nothing"]) == {2: "</s>"}
