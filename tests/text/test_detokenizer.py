"""Text from ids, token by token: equal to the tokenizer's own decode of the whole, and never changed afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders

from asyncllm.errors import ModelLoadError
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.tokenizer import Tokenizer
from helpers.tiny_tokenizers import TINY_TOKENIZERS, byte_ids, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    import tokenizers

    Tokenizers = Callable[[str], Tokenizer]

WITH_BYTES: Final = ("byte level", "sentencepiece", "gemma")
ALL: Final = (*TINY_TOKENIZERS, *(f"{name} + clean-up" for name in TINY_TOKENIZERS))
each = pytest.mark.parametrize("name", ALL)
each_with_bytes = pytest.mark.parametrize("name", WITH_BYTES)

REPLACEMENT: Final = "\ufffd"
SCRIPTS: Final = {
    "emoji with joiners": "👩\u200d👩\u200d👧\u200d👦 and 👍🏽",
    "flags": "🇩🇪🇫🇷🇯🇵",
    "CJK": "你好世界。日本語",
    "Thai": "สวัสดีชาวโลก",
    "Devanagari": "नमस्ते दुनिया",
}


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], *, prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    """Return the text of each token, and of the end."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def token(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a token by its own text."""
    token_id = tokenizer._raw.token_to_id(text)
    assert token_id is not None
    return token_id


def id_lists(*, most: int = 16) -> st.SearchStrategy[list[int]]:
    """Lists of ids: special ones, byte tokens, ordinary ones, and beyond the vocabulary of any tiny tokenizer."""
    return st.lists(st.one_of(st.integers(0, 400), st.integers(0, 5), st.integers(0x80, 0xBF)), max_size=most)


@each
@given(ids=id_lists(), skip=st.booleans())
def test_join_of_pieces_is_the_tokenizers_own_decode(
    tokenizer: Tokenizers, name: str, ids: list[int], *, skip: bool
) -> None:
    own = tokenizer(name).decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer(name), ids, skip_special_tokens=skip)) == own


@each
@given(prompt=id_lists(), ids=id_lists(), skip=st.booleans())
def test_text_is_what_the_completion_adds_to_the_prompt(
    tokenizer: Tokenizers, name: str, prompt: list[int], ids: list[int], *, skip: bool
) -> None:
    """B68: wherever decoding both only appends to decoding the prompt, the text is what it appends."""
    alone = tokenizer(name).decode(prompt, skip_special_tokens=skip)
    both = tokenizer(name).decode([*prompt, *ids], skip_special_tokens=skip)
    text = "".join(pieces(tokenizer(name), ids, prompt=prompt, skip_special_tokens=skip))
    if both.startswith(alone):
        assert text == both[len(alone) :]


@each
@given(text=st.text(max_size=40))
def test_texts_come_back_whole(tokenizer: Tokenizers, name: str, text: str) -> None:
    ids = tokenizer(name).encode(text)
    assert "".join(pieces(tokenizer(name), ids)) == tokenizer(name).decode(ids)


@given(data=st.binary(max_size=24), cut=st.integers(0, 24))
def test_bytes_become_text_as_utf8_with_replacements(tokenizer: Tokenizers, data: bytes, cut: int) -> None:
    """Python's own decoder agrees, malformed bytes included, wherever the prompt ends."""
    used = bytes(byte for byte in data if byte not in (0xC0, 0xC1) and byte < 0xF5)
    byte_level = tokenizer("byte level")
    ids = [byte_ids(byte_level._raw, bytes([byte]))[0] for byte in used]
    assert "".join(pieces(byte_level, ids)) == used.decode(errors="replace")
    alone, both = used[:cut].decode(errors="replace"), used.decode(errors="replace")
    if both.startswith(alone):
        assert "".join(pieces(byte_level, ids[cut:], prompt=ids[:cut])) == both[len(alone) :]


@pytest.mark.parametrize("script", SCRIPTS)
@each_with_bytes
def test_no_half_character_is_given_out(tokenizer: Tokenizers, name: str, script: str) -> None:
    """B65: one byte a token, from the first to the last."""
    text = SCRIPTS[script]
    ids = byte_ids(tokenizer(name)._raw, text.encode())
    got = pieces(tokenizer(name), ids)
    assert "".join(got) == text
    assert REPLACEMENT not in "".join(got)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_character_is_given_out_with_its_last_byte(tokenizer: Tokenizers, script: str) -> None:
    data = SCRIPTS[script].encode()
    got = pieces(tokenizer("byte level"), byte_ids(tokenizer("byte level")._raw, data))
    for count in range(len(data) + 1):
        assert "".join(got[:count]) == data[:count].decode(errors="ignore")


@pytest.mark.parametrize("script", SCRIPTS)
@each_with_bytes
def test_character_begun_in_the_prompt_belongs_to_the_completion(tokenizer: Tokenizers, name: str, script: str) -> None:
    data = SCRIPTS[script].encode()
    ids = byte_ids(tokenizer(name)._raw, data)
    for cut in range(len(data)):
        whole = data[:cut].decode(errors="ignore")
        got = pieces(tokenizer(name), ids[cut:], prompt=[*tokenizer(name).encode("so "), *ids[:cut]])
        assert "".join(got) == SCRIPTS[script][len(whole) :]


@each_with_bytes
def test_character_that_the_prompt_began_and_nothing_completes_is_the_prompts(tokenizer: Tokenizers, name: str) -> None:
    half = byte_ids(tokenizer(name)._raw, "世".encode()[:2])
    assert pieces(tokenizer(name), [], prompt=half) == [""]
    prompt = [*tokenizer(name).encode("so"), *half]
    after = tokenizer(name).encode("The")
    text = "".join(pieces(tokenizer(name), after, prompt=prompt))
    assert text == tokenizer(name).decode([*prompt, *after]).removeprefix(tokenizer(name).decode(prompt))
    assert REPLACEMENT not in text


def test_text_ends_a_character_that_the_prompt_began(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    *half, last = byte_ids(byte_level._raw, "世".encode())
    text = "".join(pieces(byte_level, [*byte_level.encode("The"), last], prompt=half))
    assert text == f"The{REPLACEMENT}"


@each
def test_added_token_is_written_as_it_is(tokenizer: Tokenizers, name: str) -> None:
    own = tokenizer(name)
    assert "".join(pieces(own, [token(own, "<two words>")])) == "<two words>"


@each_with_bytes
def test_bytes_that_never_complete_are_replaced_at_the_end(tokenizer: Tokenizers, name: str) -> None:
    ids = byte_ids(tokenizer(name)._raw, b"ok\xe4\xbd")
    *before, last = pieces(tokenizer(name), ids)
    assert REPLACEMENT not in "".join(before)
    assert REPLACEMENT in last
    assert "".join(before) + last == tokenizer(name).decode(ids)


@pytest.mark.parametrize("name", ["sentencepiece", "gemma"])
def test_byte_tokens_are_held_until_their_run_is_over(tokenizer: Tokenizers, name: str) -> None:
    """A malformed byte turns its whole run into replacements, the characters before it in the run too."""
    good, word = byte_ids(tokenizer(name)._raw, "世".encode()), token(tokenizer(name), "T")
    bad = token(tokenizer(name), "<0xFF>")
    assert pieces(tokenizer(name), [word, *good, word]) == ["T", "", "", "", "世T", ""]
    assert pieces(tokenizer(name), [word, *good, bad, word]) == ["T", "", "", "", "", REPLACEMENT * 4 + "T", ""]


@each_with_bytes
def test_special_token_amid_a_character_is_left_out(tokenizer: Tokenizers, name: str) -> None:
    one, two, three = byte_ids(tokenizer(name)._raw, "世".encode())
    assert "".join(pieces(tokenizer(name), [one, 1, two, 400_000, three])) == "世"


@each
def test_special_tokens_are_shown_or_skipped(tokenizer: Tokenizers, name: str) -> None:
    """B72."""
    ids = [*tokenizer(name).encode("The"), 2, *tokenizer(name).encode("fox")]
    assert "</s>" not in "".join(pieces(tokenizer(name), ids, skip_special_tokens=True))
    assert "</s>" in "".join(pieces(tokenizer(name), ids, skip_special_tokens=False))


@each
def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizers, name: str) -> None:
    ids = tokenizer(name).encode("The fox")
    padded = [token for token_id in ids for token in (tokenizer(name).vocab_size, token_id, 2**31 - 1)]
    assert "".join(pieces(tokenizer(name), padded)) == "".join(pieces(tokenizer(name), ids))


@pytest.mark.parametrize("name", ["sentencepiece", "unigram"])
def test_first_space_is_kept_after_a_prompt_and_stripped_without(tokenizer: Tokenizers, name: str) -> None:
    """B68."""
    ids = tokenizer(name).encode("The fox")
    assert "".join(pieces(tokenizer(name), ids, prompt=tokenizer(name).encode("So"))) == " The fox"
    assert "".join(pieces(tokenizer(name), ids)) == "The fox"
    assert "".join(pieces(tokenizer(name), ids, prompt=[1])) == "The fox"


def test_space_in_a_first_byte_token_is_stripped_too(tokenizer: Tokenizers) -> None:
    sentencepiece = tokenizer("sentencepiece")
    ids = byte_ids(sentencepiece._raw, b" \n")
    assert "".join(pieces(sentencepiece, ids)) == "\n" == sentencepiece.decode(ids)
    assert "".join(pieces(sentencepiece, ids, prompt=sentencepiece.encode("The"))) == " \n"


def test_token_that_looks_like_a_byte_is_text_where_the_decoder_knows_no_bytes() -> None:
    raw = tiny_tokenizer("wordpiece")
    raw.add_tokens(["<0x41>"])
    own = Tokenizer(raw)
    assert "".join(pieces(own, [token(own, "<0x41>")])) == "<0x41>"


@pytest.mark.parametrize(
    ("text", "certain"), [("fox", "fox"), ("fox ", "fox"), ("fox n", "fox"), ("fox s", "fox s"), ("it 'v", "it")]
)
def test_clean_up_holds_back_no_more_than_it_may_change(tokenizer: Tokenizers, text: str, certain: str) -> None:
    stream = tokenizer("wordpiece + clean-up").clean_up_stream()
    assert stream is not None
    assert stream.add(text) == certain


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("clean-up")])
def test_clean_up_is_the_whole_texts(tokenizer: Tokenizers, name: str) -> None:
    """B70: by the replacements of transformers, spelled out here."""
    ids = tokenizer(name).encode("here . Hello , world ! It 's late , and we 've ' seen ' it ? isn 't  . .")
    text = tokenizer(name)._raw.decode(ids)
    for pattern in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(pattern, pattern.strip())
    assert "".join(pieces(tokenizer(name), ids)) == text


@given(text=st.text(alphabet=" .?!,'nmsvret", max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_clean_up_does_not_depend_on_the_pieces(tokenizer: Tokenizers, text: str, cuts: list[int]) -> None:
    """B69: the same text for every size of delta."""
    stream = tokenizer("wordpiece + clean-up").clean_up_stream()
    assert stream is not None
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    got = [stream.add(text[start:end]) for start, end in itertools.pairwise(bounds)]
    expected = text
    for pattern in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        expected = expected.replace(pattern, pattern.strip())
    assert "".join(got) + stream.settle("") == expected


def test_text_held_back_is_pending_when_whole(tokenizer: Tokenizers) -> None:
    sentencepiece = tokenizer("sentencepiece")
    detokenizer = Detokenizer(sentencepiece, sentencepiece.encode("So"), skip_special_tokens=True)
    for token_id, pending in zip(byte_ids(sentencepiece._raw, "\n世".encode()), ["\n", "", "", "\n世"], strict=True):
        assert detokenizer.add(token_id) == ""
        assert detokenizer.pending() == pending
    assert detokenizer.finish() == "\n世"


@each_with_bytes
def test_very_long_runs_of_malformed_bytes(tokenizer: Tokenizers, name: str) -> None:
    """Linear: quadratic work would run into the suite's hang guard."""
    count = 300_000
    ids = byte_ids(tokenizer(name)._raw, b"\x80") * count
    assert "".join(pieces(tokenizer(name), ids)) == REPLACEMENT * count


class CountingPrompt(Sequence[np.int32]):
    """A prompt, int32 as requests hold it, that counts how often it is read."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids, dtype=np.int32)
        self.reads = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> np.int32:  # type: ignore[override]  # slices are not asked for
        self.reads += 1
        return np.int32(self._ids[index])


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
def test_long_prompt_is_looked_at_from_its_end_only(tokenizer: Tokenizers, name: str) -> None:
    prompt = CountingPrompt(tokenizer(name).encode("The quick brown fox") * 100)
    pieces(tokenizer(name), [5], prompt=prompt)  # type: ignore[arg-type]
    assert prompt.reads <= 4


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Replace(Regex("a+"), "b"), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("_", 1, 0)]),
    ],
    ids=repr,
)
def test_decoder_that_cannot_be_followed_is_refused_by_name(
    raw_tokenizer: Callable[[str], tokenizers.Tokenizer], decoder: decoders.Decoder
) -> None:
    raw = type(raw_tokenizer("byte level")).from_str(raw_tokenizer("byte level").to_str())
    raw.decoder = decoder
    with pytest.raises(ModelLoadError, match=r"decoder (BPEDecoder|CTC|Fuse|Replace|ByteFallback)"):
        Tokenizer(raw)
