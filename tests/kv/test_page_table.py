"""The page table: rows on the host, and exactly what the device lacks of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncllm.kv.page_table import PageTable
from helpers.tokens import ids


def cells(table: PageTable) -> list[tuple[int, int, int]]:
    """Take the writes as slot, column, page."""
    return [(slot, column, page) for slot, column, page in table.take_writes().T.tolist()]


def test_pages_are_appended_to_several_rows_at_once() -> None:
    table = PageTable(4, 5)
    first, second = table.take_slot(), table.take_slot()
    assert (first, second) == (0, 1)
    table.extend([1, 0], [2, 1], ids([7, 8, 9]))
    table.extend([0, 1], [2, 1], ids([4, 5, 6]))
    assert table.row(0).tolist() == [9, 4, 5]
    assert table.row(1).tolist() == [7, 8, 6]
    assert cells(table) == [(0, 0, 9), (0, 1, 4), (0, 2, 5), (1, 0, 7), (1, 1, 8), (1, 2, 6)]


def test_writes_are_taken_once() -> None:
    table = PageTable(1, 2)
    table.extend([table.take_slot()], [1], ids([3]))
    assert cells(table) == [(0, 0, 3)]
    assert cells(table) == []


def test_of_two_writes_to_a_cell_the_last_wins_and_stands_alone() -> None:
    table = PageTable(1, 3)
    table.extend([table.take_slot()], [3], ids([3, 4, 5]))
    table.rewrite(0, 1, ids([8]))
    table.rewrite(0, 1, ids([9, 7]))
    assert cells(table) == [(0, 0, 3), (0, 1, 9), (0, 2, 7)]


def test_a_released_slot_drops_its_writes_and_nobody_elses() -> None:
    table = PageTable(2, 3)
    gone, stays = table.take_slot(), table.take_slot()
    table.extend([gone, stays], [2, 1], ids([3, 4, 5]))
    table.release_slot(gone)
    assert cells(table) == [(stays, 0, 5)]
    assert table.free_slots == 1


def test_a_slot_taken_again_writes_its_new_row_only() -> None:
    """The old owner had three columns, the new one has one: two cells are nobody's."""
    table = PageTable(1, 3)
    table.extend([table.take_slot()], [3], ids([3, 4, 5]))
    table.release_slot(0)
    assert table.take_slot() == 0
    assert table.row(0).tolist() == []
    table.extend([0], [1], ids([6]))
    assert cells(table) == [(0, 0, 6)]


def test_writes_are_int32_and_empty_writes_keep_their_shape() -> None:
    table = PageTable(1, 1)
    assert table.take_writes().shape == (3, 0)
    table.extend([table.take_slot()], [1], ids([0]))
    writes = table.take_writes()
    assert writes.shape == (3, 1)
    assert writes.dtype == np.int32


@pytest.mark.parametrize(("num_slots", "max_pages"), [(0, 1), (1, 0)])
def test_a_table_has_rows_and_columns(num_slots: int, max_pages: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PageTable(num_slots, max_pages)


class TableAgainstLists(RuleBasedStateMachine):
    """The table and a device that applies its writes, against plain lists."""

    SLOTS, COLUMNS = 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(self.SLOTS, self.COLUMNS)
        self.rows: dict[int, list[int]] = {}
        self.device = np.full((self.SLOTS, self.COLUMNS), -1)
        self.pages = iter(range(10**6))

    @precondition(lambda self: len(self.rows) < self.SLOTS)
    @rule()
    def take(self) -> None:
        """Take a slot."""
        slot = self.table.take_slot()
        assert slot not in self.rows
        self.rows[slot] = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Release a slot, its writes taken or not."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.table.release_slot(slot)
        del self.rows[slot]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Append pages to some rows."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        counts = [data.draw(st.integers(0, self.COLUMNS - len(self.rows[slot]))) for slot in slots]
        pages = [next(self.pages) for _ in range(sum(counts))]
        self.table.extend(slots, counts, ids(pages))
        for slot, count in zip(slots, counts, strict=True):
            self.rows[slot] += [pages.pop(0) for _ in range(count)]

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        """Replace some pages of a row."""
        slot = data.draw(st.sampled_from(sorted(slot for slot, row in self.rows.items() if row)))
        first = data.draw(st.integers(0, len(self.rows[slot]) - 1))
        count = data.draw(st.integers(1, len(self.rows[slot]) - first))
        pages = [next(self.pages) for _ in range(count)]
        self.table.rewrite(slot, first, ids(pages))
        self.rows[slot][first : first + count] = pages

    @rule()
    def launch(self) -> None:
        """Apply the writes to the device and compare its live rows."""
        writes = [tuple(write) for write in self.table.take_writes().T.tolist()]
        assert len({(slot, column) for slot, column, _ in writes}) == len(writes)
        for slot, column, page in writes:
            assert column < len(self.rows.get(slot, [])), "a write outside of every live row"
            self.device[slot, column] = page
        for slot, row in self.rows.items():
            assert self.device[slot, : len(row)].tolist() == row

    @invariant()
    def host_rows_are_right(self) -> None:
        """Compare the host's rows."""
        assert self.table.free_slots == self.SLOTS - len(self.rows)
        for slot, row in self.rows.items():
            assert self.table.row(slot).tolist() == row


TestTableAgainstLists = TableAgainstLists.TestCase
TestTableAgainstLists.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
