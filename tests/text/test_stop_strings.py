"""Stop texts in a stream: found wherever they lie, nothing of them given out, nothing else kept back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncllm.text.stop_strings import Released, StopMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text("abc", max_size=6), max_size=8)


def feed(stops: Iterable[str], pieces: Iterable[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Return the text released by each piece, up to the stop, or with what was held at the end; and the stop."""
    matcher = StopMatcher(tuple(stops), include=include)
    texts = []
    for piece in pieces:
        released = matcher.feed(piece)
        texts.append(released.text)
        if released.stop is not None:
            return texts, released.stop
    return [*texts, matcher.finish()], None


def naive(stops: list[str], pieces: list[str], *, include: bool) -> tuple[str, str | None]:
    """Look at the whole text after each piece: of the stops that are complete, take the one that begins first."""
    whole = ""
    for piece in pieces:
        whole += piece
        places = [(whole.find(stop), len(stop), stop) for stop in stops if stop in whole]
        if places:
            start, size, stop = min(places)
            return whole[: start + size if include else start], stop
    return whole, None


@given(stops=STOPS, pieces=PIECES, include=st.booleans())
def test_equals_a_search_of_the_whole_text(stops: list[str], pieces: list[str], *, include: bool) -> None:
    texts, stop = feed(stops, pieces, include=include)
    assert ("".join(texts), stop) == naive(stops, pieces, include=include)


@given(stops=STOPS, pieces=PIECES)
def test_holds_what_could_begin_a_stop_and_no_more(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    whole = given_out = ""
    for piece in pieces:
        whole += piece
        released = matcher.feed(piece)
        if released.stop is not None:
            return
        given_out += released.text
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        held = max((size for size in range(len(whole) + 1) if whole[len(whole) - size :] in beginnings), default=0)
        assert given_out == whole[: len(whole) - held]


@given(text=st.text("ab", max_size=30), stops=STOPS, size=st.sampled_from([1, 3, 8]))
def test_text_before_the_stop_does_not_depend_on_the_pieces(text: str, stops: list[str], size: int) -> None:
    """B69: unless two stops complete within one piece, where the one that begins first wins."""
    longest = max(stops, key=len)
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    assert feed([longest], cut)[1] == feed([longest], [text])[1]
    assert "".join(feed([longest], cut)[0]) == "".join(feed([longest], [text])[0])


@pytest.mark.parametrize("tokens", [["STOP"], ["ST", "OP"], ["S", "TO", "P"], ["S", "T", "O", "P"], ["a S", "TOP b"]])
def test_no_beginning_of_the_stop_is_given_out(tokens: list[str]) -> None:
    """B74: the stop spelt over one to four tokens."""
    texts, stop = feed(["STOP"], ["one ", *tokens, " two"])
    assert stop == "STOP"
    assert "".join(texts) in ("one ", "one a ")


@pytest.mark.parametrize("tokens", [["STOX"], ["ST", "OX"], ["S", "TO", "X"], ["S", "T", "O", "X"]])
def test_near_miss_is_released_as_soon_as_it_is_one(tokens: list[str]) -> None:
    """B74."""
    texts, stop = feed(["STOP"], ["one ", *tokens])
    assert stop is None
    assert "".join(texts[:-1]) == "one " + "".join(tokens)


def test_stop_ends_in_the_middle_of_a_piece() -> None:
    """B75."""
    texts, stop = feed(["lo wo"], ["hel", "lo world"])
    assert ("".join(texts), stop) == ("hel", "lo wo")


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["a", "b", "c"], "ab", ""),  # completes first
        (["abc"], "ab", ""),  # on the same piece: begins first, and of these completes first
        (["xa", "bc"], "ab", "x"),
        (["x", "bc"], "bc", "x"),
        (["bbc"], "bc", "b"),
    ],
)
def test_overlapping_stops(pieces: list[str], stop: str, text: str) -> None:
    """B75."""
    texts, found = feed(["abc", "bc", "ab"], pieces)
    assert ("".join(texts), found) == (text, stop)


def test_on_one_piece_the_stop_that_begins_first_wins_though_it_completes_last() -> None:
    assert feed(["c", "bcd"], ["abcd"]) == (["a"], "bcd")
    assert feed(["c", "bcd"], ["abc", "d"]) == (["ab"], "c")


def test_stop_itself_is_given_out_where_asked() -> None:
    texts, stop = feed(["lo"], ["hel", "lo!"], include=True)
    assert ("".join(texts), stop) == ("hello", "lo")


def test_held_text_is_given_out_at_the_end() -> None:
    """B76."""
    assert feed(["STOP"], ["one S", "TO"]) == (["one ", "", "STO"], None)


def test_looking_ahead_changes_nothing() -> None:
    matcher = StopMatcher(["STOP"], include=False)
    assert matcher.feed("one ST") == Released("one ", None)
    assert matcher.completes("OP")
    assert not matcher.completes("O")
    assert matcher.feed("OX") == Released("STOX", None)


@pytest.mark.timeout(120)
def test_long_stops_and_texts_take_linear_work() -> None:
    """Quadratic work would run into this test's own hang guard."""
    size = 200_000
    texts, stop = feed(["a" * size + "b", "a" * size + "c"], ["a"] * (2 * size) + ["c"])
    assert stop == "a" * size + "c"
    assert "".join(texts) == "a" * size


@example(stops=["aba"], early=["aba"], late=["ba"])
@example(stops=["ab"], early=["a"], late=["b"])
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    early=st.lists(st.text("abc", max_size=4), max_size=6),
    late=st.lists(st.text("abc", max_size=4), max_size=6),
)
def test_a_stop_that_was_passed_over_may_still_begin_one_that_counts(
    stops: list[str], early: list[str], late: list[str]
) -> None:
    """Against a search: there is a stop where one ends after what was passed over, and all before it is shown."""
    matcher = StopMatcher(stops, include=False)
    text, passed = "".join(early) + "".join(late), len("".join(early))
    shown, stop = "".join([matcher.pass_over(piece) for piece in early]), None
    for piece in late:
        released = matcher.feed(piece)
        shown, stop = shown + released.text, released.stop
        if stop is not None:
            break
    else:
        shown += matcher.finish()
    ends = [end for end in range(passed + 1, len(text) + 1) if any(text[:end].endswith(each) for each in stops)]
    assert (stop is not None) is bool(ends)
    if stop is None:
        assert shown == text
    else:
        assert text.startswith(shown + stop)
        assert len(shown) + len(stop) > passed
