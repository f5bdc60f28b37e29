"""What each token means for the text and for the end of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.text.advance import TextProgress, TextStep
from helpers.tiny_tokenizers import byte_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from asyncllm.text.tokenizer import Tokenizer

    Tokenizers = Callable[[str], Tokenizer]

EOS: Final = 2


def follow(
    tokenizer: Tokenizer | None,
    ids: Sequence[int],
    *,
    prompt: Sequence[int] = (),
    stop_texts: Sequence[str] = (),
    stop_ids: Collection[int] = (),
    eos_token_ids: Collection[int] = (EOS,),
    include_stop: bool = False,
    skip_special_tokens: bool = True,
    max_tokens: int = 1000,
    min_tokens: int = 0,
) -> list[TextStep]:
    """Return the steps up to the one that ends the request."""
    progress = TextProgress(
        tokenizer,
        prompt,
        stop_texts=stop_texts,
        stop_ids=stop_ids,
        eos_token_ids=eos_token_ids,
        include_stop=include_stop,
        skip_special_tokens=skip_special_tokens,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
    )
    steps = []
    for token_id in ids:
        steps.append(progress.advance(token_id))
        if steps[-1].finish_reason is not None:
            break
    return steps


def outcome(steps: list[TextStep]) -> tuple[str, str | None, str | int | None]:
    """Return the whole text and how it ended."""
    return "".join(step.text for step in steps), steps[-1].finish_reason, steps[-1].stop_reason


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per byte."""
    return byte_ids(tokenizer._raw, text.encode())


def test_text_goes_on_until_the_last_token(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    ids = byte_level.encode("The quick brown fox")
    steps = follow(byte_level, ids, max_tokens=len(ids))
    assert outcome(steps) == ("The quick brown fox", "length", None)
    assert len(steps) == len(ids)
    assert all(step.finish_reason is None for step in steps[:-1])


def test_eos_ends_without_text_and_without_a_stop_reason(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    steps = follow(byte_level, [*byte_level.encode("The"), EOS, 7])
    assert outcome(steps) == ("The", "stop", None)
    assert steps[-1].text == ""


@pytest.mark.parametrize(("include", "skip", "shown"), [(True, False, "</s>"), (True, True, ""), (False, False, "")])
def test_text_of_eos_is_shown_only_with_the_stop_and_special_tokens(
    tokenizer: Tokenizers, include: bool, skip: bool, shown: str
) -> None:
    byte_level = tokenizer("byte level")
    ids = [*byte_level.encode("The"), EOS]
    assert outcome(follow(byte_level, ids, include_stop=include, skip_special_tokens=skip)) == (
        f"The{shown}",
        "stop",
        None,
    )


@pytest.mark.parametrize(("include", "skip", "shown"), [(True, False, "#"), (True, True, ""), (False, False, "")])
def test_text_of_an_eos_that_is_no_special_token_follows_the_same_rule(
    tokenizer: Tokenizers, include: bool, skip: bool, shown: str
) -> None:
    byte_level = tokenizer("byte level")
    ids = spell(byte_level, "ab#")
    steps = follow(byte_level, ids, eos_token_ids=ids[-1:], include_stop=include, skip_special_tokens=skip)
    assert outcome(steps) == (f"ab{shown}", "stop", None)


def test_each_of_several_eos_ids_ends(tokenizer: Tokenizers) -> None:
    """B80."""
    for end in (2, 5, 7):
        steps = follow(tokenizer("byte level"), [20, end, 21], eos_token_ids={2, 5, 7})
        assert (len(steps), steps[-1].finish_reason) == (2, "stop")


def test_ignored_eos_is_a_token_like_any_other(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    ids = [*byte_level.encode("The"), EOS, *byte_level.encode(" fox")]
    assert outcome(follow(byte_level, ids, eos_token_ids=(), max_tokens=len(ids))) == ("The fox", "length", None)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab#")])
def test_stop_id_is_the_reason(tokenizer: Tokenizers, include: bool, text: str) -> None:
    byte_level = tokenizer("byte level")
    ids = spell(byte_level, "ab#c")
    steps = follow(byte_level, ids, stop_ids=[ids[2]], include_stop=include)
    assert outcome(steps) == (text, "stop", ids[2])


def test_stop_id_that_is_eos_too_is_named(tokenizer: Tokenizers) -> None:
    assert follow(tokenizer("byte level"), [EOS], stop_ids=[EOS]) == [TextStep("", "stop", EOS)]


@pytest.mark.parametrize("count", range(1, 6))
def test_stop_text_spelt_over_several_tokens(tokenizer: Tokenizers, count: int) -> None:
    """B74: over one to five tokens, one byte each; all are generated, none of their text is shown."""
    byte_level = tokenizer("byte level")
    stop = "#####"[:count]
    ids = [*byte_level.encode("The fox"), *spell(byte_level, stop + "tail")]
    steps = follow(byte_level, ids, stop_texts=[stop])
    assert outcome(steps) == ("The fox", "stop", stop)
    assert len(steps) == len(byte_level.encode("The fox")) + count


def test_stop_text_within_a_token_cuts_there(tokenizer: Tokenizers) -> None:
    """B75."""
    byte_level = tokenizer("byte level")
    (token,) = byte_level.encode(" The")[-1:]
    word = byte_level.decode([token])
    assert outcome(follow(byte_level, [token], stop_texts=[word[1]])) == (word[0], "stop", word[1])
    assert outcome(follow(byte_level, [token], stop_texts=[word[1]], include_stop=True))[0] == word[:2]


@pytest.mark.parametrize("end", ["length", "eos"])
def test_held_text_is_shown_at_the_end(tokenizer: Tokenizers, end: str) -> None:
    """B76: in the last event."""
    byte_level = tokenizer("byte level")
    ids = spell(byte_level, "see ##")
    steps = (
        follow(byte_level, ids, stop_texts=["####"], max_tokens=len(ids))
        if end == "length"
        else follow(byte_level, [*ids, EOS], stop_texts=["####"])
    )
    assert outcome(steps) == ("see ##", "length" if end == "length" else "stop", None)
    assert steps[-1].text.endswith("#")


def test_half_a_character_is_replaced_at_the_end(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    assert outcome(follow(byte_level, [*spell(byte_level, "世")[:2], EOS])) == ("\ufffd", "stop", None)


def test_stop_wins_over_length_on_the_same_token(tokenizer: Tokenizers) -> None:
    byte_level = tokenizer("byte level")
    ids = spell(byte_level, "ab##")
    assert outcome(follow(byte_level, ids, stop_texts=["##"], max_tokens=4)) == ("ab", "stop", "##")
    assert outcome(follow(byte_level, ids, stop_ids=[ids[2]], max_tokens=3)) == ("ab", "stop", ids[2])
    assert outcome(follow(byte_level, [*ids, EOS], max_tokens=5)) == ("ab##", "stop", None)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "gemma"])
def test_with_as_many_least_tokens_as_most_no_stop_text_counts(tokenizer: Tokenizers, kind: str) -> None:
    ids = spell(tokenizer(kind), "a#b\n")
    for stop in ("#", "b\n", "\n"):
        steps = follow(tokenizer(kind), ids, stop_texts=[stop], min_tokens=4, max_tokens=4)
        assert outcome(steps) == ("a#b\n", "length", None)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "gemma"])
@given(data=st.data())
def test_the_first_stop_text_that_completes_after_the_least_tokens_ends(
    tokenizer: Tokenizers, kind: str, data: st.DataObject
) -> None:
    """One byte a token: text is complete where characters are, held back or not."""
    text = data.draw(st.text("ab\né", min_size=1, max_size=8))
    stops = data.draw(st.lists(st.text("ab\né", min_size=1, max_size=3), min_size=1, max_size=3))
    ids = spell(tokenizer(kind), text)
    least, include = data.draw(st.integers(0, len(ids))), data.draw(st.booleans())
    complete = [len(text.encode()[:count].decode(errors="ignore")) for count in range(len(ids) + 1)]
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > complete[least]
    ]
    steps = follow(tokenizer(kind), ids, stop_texts=stops, min_tokens=least, max_tokens=len(ids), include_stop=include)
    if found:
        end, start, stop = min(found)
        assert outcome(steps) == (text[: end if include else start], "stop", stop)
        assert len(steps) == complete.index(end)
    else:
        assert outcome(steps) == (text, "length", None)


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
def test_early_stop_texts_in_a_run_of_bytes_stay_early_whatever_becomes_of_the_run(
    tokenizer: Tokenizers, kind: str
) -> None:
    newline, letter, first, second = spell(tokenizer(kind), "\nbé")
    ends = {"stop_texts": ["\n", "\ufffd"], "min_tokens": 2}
    within = [newline, first, second]  # after two tokens the run ends within a character
    assert outcome(follow(tokenizer(kind), within, **ends, max_tokens=3)) == ("\né", "length", None)  # type: ignore[arg-type]
    assert outcome(follow(tokenizer(kind), within[:2], **ends, max_tokens=2)) == ("\ufffd" * 2, "length", None)  # type: ignore[arg-type]
    broken = [newline, letter, letter, second]  # no text as a whole: nothing of it was certain
    steps = follow(tokenizer(kind), broken, stop_texts=["\n"], min_tokens=2, max_tokens=4)
    assert outcome(steps) == ("\ufffd" * 4, "length", None)
    assert [step.text for step in steps[:-1]] == [""] * 3


def test_stop_in_byte_tokens_ends_at_once(tokenizer: Tokenizers) -> None:
    """A newline is a byte token of llama 2: the request ends with it, not one token later."""
    sentencepiece = tokenizer("sentencepiece")
    ids = [*sentencepiece.encode("The fox"), *spell(sentencepiece, "\n"), *sentencepiece.encode("more")]
    steps = follow(sentencepiece, ids, stop_texts=["\n"])
    assert outcome(steps) == ("The fox", "stop", "\n")
    assert len(steps) == len(sentencepiece.encode("The fox")) + 1


def test_stop_that_only_a_replacement_completes_does_not_count_before_the_end(tokenizer: Tokenizers) -> None:
    sentencepiece = tokenizer("sentencepiece")
    ids = spell(sentencepiece, "世")
    assert outcome(follow(sentencepiece, ids, stop_texts=["\ufffd"], max_tokens=3)) == ("世", "length", None)
    assert outcome(follow(sentencepiece, ids[:2], stop_texts=["\ufffd"], max_tokens=2)) == ("", "stop", "\ufffd")


def test_text_continues_the_prompt(tokenizer: Tokenizers) -> None:
    sentencepiece = tokenizer("sentencepiece")
    prompt, ids = sentencepiece.encode("The"), sentencepiece.encode("fox")
    assert outcome(follow(sentencepiece, [*ids, EOS], prompt=prompt))[0] == " fox"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert outcome(follow(None, [5, 6, EOS])) == ("", "stop", None)
    assert outcome(follow(None, [5, 6, 9], stop_ids=[9])) == ("", "stop", 9)
    assert outcome(follow(None, [5, 6, 9], max_tokens=3)) == ("", "length", None)


@pytest.mark.parametrize("name", ["byte level", "sentencepiece", "unigram", "wordpiece + clean-up"])
@given(
    ids=st.lists(st.integers(3, 400), max_size=20),
    stops=st.lists(st.text("aeht .#", min_size=1, max_size=3), max_size=3),
)
def test_text_is_the_decoded_text_up_to_the_first_stop(
    tokenizer: Tokenizers, name: str, ids: list[int], stops: list[str]
) -> None:
    own = tokenizer(name)
    steps = follow(own, [*ids, EOS], stop_texts=stops)
    text, reason, stop = outcome(steps)
    assert reason == "stop"
    generated = [*ids, EOS][: len(steps)]
    decoded = own.decode(generated)
    assert text == (decoded if stop is None else decoded[: decoded.index(str(stop))])
    assert not any(other in text for other in stops)
