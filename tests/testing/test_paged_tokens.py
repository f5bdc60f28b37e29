"""The scripted model's pages hold what was written, and refuse every read that a real KV cache would get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from asyncllm.errors import IntegrityError
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP
from asyncllm.testing.paged_tokens import PagedTokens
from helpers.batches import Row, make_batch

PAGE = 4
TABLE = [(0, 0, 5), (0, 1, 2)]  # slot 0 has pages 5 and 2


@pytest.fixture
def pages() -> PagedTokens:
    return PagedTokens(num_pages=8, page_size=PAGE, num_slots=4, max_pages_per_request=3)


def test_a_row_reads_back_its_whole_sequence_through_the_page_table(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2, 3, 4, 5])], table=TABLE))
    rows = pages.step(make_batch(1, [Row(3, 0, [9]), Row(0, 5, [6, 7])], table=[(3, 0, 0)]))
    assert [rows.sequence(row).tolist() for row in (0, 1)] == [[9], [1, 2, 3, 4, 5, 6, 7]]


def test_the_token_sampled_last_is_filled_in_on_the_device(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2])], table=TABLE))
    pages.keep_sampled(np.array([0]), np.array([2]), np.array([77]))
    rows = pages.step(make_batch(1, [Row(0, 2, [SAMPLED_LAST_STEP])]))
    assert rows.sequence(0).tolist() == [1, 2, 77]


def test_a_token_sampled_for_another_position_is_refused(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2])], table=TABLE))
    pages.keep_sampled(np.array([0]), np.array([3]), np.array([77]))
    with pytest.raises(IntegrityError, match="no token sampled"):
        pages.step(make_batch(1, [Row(0, 2, [SAMPLED_LAST_STEP])]))


def test_the_same_tokens_have_the_same_digest_wherever_they_lie(pages: PagedTokens) -> None:
    whole = pages.step(make_batch(0, [Row(0, 0, [1, 2, 3, 4, 5])], table=TABLE))
    pages.step(make_batch(1, [Row(1, 0, [1, 2, 3])], table=[(1, 0, 7), (1, 1, 0)]))
    chunked = pages.step(make_batch(2, [Row(1, 3, [4, 5])]))
    assert whole.digests[0] == chunked.digests[0]


def test_a_shared_prefix_page_is_read_by_two_rows(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2, 3, 4, 5])], table=TABLE))
    rows = pages.step(make_batch(1, [Row(1, 4, [8])], table=[(1, 0, 5), (1, 1, 3)]))
    assert rows.sequence(0).tolist() == [1, 2, 3, 4, 8]


def test_a_copied_page_carries_its_head(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2, 3])], table=TABLE))
    rows = pages.step(make_batch(1, [Row(1, 2, [8])], table=[(1, 0, 6)], copies=[(5, 6)]))
    assert rows.sequence(0).tolist() == [1, 2, 8]


def test_a_page_that_was_never_copied_is_refused(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2, 3])], table=TABLE))
    with pytest.raises(IntegrityError, match="slot 1 reads position 0 from page 6"):
        pages.step(make_batch(1, [Row(1, 2, [8])], table=[(1, 0, 6)]))


def test_another_sequences_page_is_refused_even_where_the_token_is_the_same(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2, 3, 4, 9]), Row(1, 0, [7, 2, 3, 4])], table=[*TABLE, (1, 0, 0)]))
    with pytest.raises(IntegrityError, match="another sequence"):
        pages.step(make_batch(1, [Row(1, 5, [3])], table=[(1, 1, 2)]))


def test_a_page_overwritten_by_its_next_owner_is_refused(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2, 3])], table=TABLE))
    with pytest.raises(IntegrityError, match=r"slot 0 reads position 2 .* another sequence"):
        pages.step(make_batch(1, [Row(0, 3, [4]), Row(1, 0, [8, 8])], table=[(1, 0, 5)]))


def test_a_poisoned_page_is_refused_until_it_is_written(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2])], table=TABLE))
    pages.poison_pages(np.array([5]))
    with pytest.raises(IntegrityError, match="nothing was written to"):
        pages.step(make_batch(1, [Row(0, 2, [3])]))
    assert pages.step(make_batch(2, [Row(1, 0, [4])], table=[(1, 0, 5)])).sequence(0).tolist() == [4]


def test_a_poisoned_slot_has_no_pages_and_no_sampled_token(pages: PagedTokens) -> None:
    pages.step(make_batch(0, [Row(0, 0, [1, 2])], table=TABLE))
    pages.keep_sampled(np.array([0]), np.array([2]), np.array([77]))
    pages.poison_slots(np.array([0]))
    with pytest.raises(IntegrityError, match="slot 0 has no token sampled"):
        pages.step(make_batch(1, [Row(0, 2, [SAMPLED_LAST_STEP])]))
    with pytest.raises(IntegrityError, match="slot 0 has no page for position 2"):
        pages.step(make_batch(2, [Row(0, 2, [3])]))


@pytest.mark.parametrize(
    ("row", "table", "copies", "words"),
    [
        (Row(0, 0, [1]), [(0, 0, 8)], [], "page 8, but they are 0..7"),
        (Row(0, 0, [1]), [(0, 0, -1)], [], "page -1"),
        (Row(0, 0, [1]), [(4, 0, 1)], [], "slot 4"),
        (Row(0, 0, [1]), [(0, 3, 1)], [], "column 3"),
        (Row(0, 0, [1]), [(0, 0, 1), (0, 0, 2)], [], "names a cell twice"),
        (Row(-1, 0, [1]), [(0, 0, 1)], [], "slot -1"),
        (Row(0, 0, [1]), [(0, 0, 1)], [(8, 2)], "copy reads page 8"),
        (Row(0, 0, [1]), [(0, 0, 1)], [(2, 8)], "copy writes page 8"),
        (Row(0, 0, [1]), [(0, 0, 1)], [(2, 3), (4, 3)], "writes a page twice"),
        (Row(0, 0, [1]), [(0, 0, 1)], [(2, 3), (3, 4)], "source and target"),
        (Row(0, 0, [1]), [], [], "slot 0 has no page for position 0"),
        (Row(0, 12, [1]), [(0, 0, 1)], [], "behind the end of its row"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    pages: PagedTokens, row: Row, table: list[tuple[int, int, int]], copies: list[tuple[int, int]], words: str
) -> None:
    with pytest.raises(IntegrityError, match=words):
        pages.step(make_batch(0, [row], table=table, copies=copies))


def test_two_rows_that_write_one_cell_are_refused(pages: PagedTokens) -> None:
    with pytest.raises(IntegrityError, match="two query tokens share a cell"):
        pages.step(make_batch(0, [Row(0, 0, [1]), Row(1, 0, [1])], table=[(0, 0, 3), (1, 0, 3)]))


def test_one_slot_in_two_rows_is_refused(pages: PagedTokens) -> None:
    with pytest.raises(IntegrityError, match="two rows name one slot"):
        pages.step(make_batch(0, [Row(0, 0, [1]), Row(0, 1, [2])], table=TABLE))
