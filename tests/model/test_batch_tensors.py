"""Staging: what arrives on the device, and that no buffer is written while somebody may still read it."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.model.batch_tensors import BatchTensors, StagedBatch, StepInputs
from helpers.batches import Row, make_batch

CPU = torch.device("cpu")
GUARD = 300.0


def staging(*, buffers: int = 2, slots: int = 8, pages: int = 16, tokens: int = 256) -> BatchTensors:
    """Make buffers for small steps."""
    return BatchTensors(
        num_slots=slots, max_pages=pages, max_step_tokens=tokens, vocab_size=100, pinned=False, buffers=buffers
    )


class HeldReader:
    """A step that reads its inputs only when it is let go: as late as a device may."""

    def __init__(self, staged: StagedBatch) -> None:
        self._staged = staged
        self._go, self._done = threading.Event(), threading.Event()
        self._read = queue.SimpleQueue[list[int]]()
        threading.Thread(target=self._run, daemon=True).start()
        staged.read_by(self)

    def _run(self) -> None:
        self._go.wait(GUARD)
        self._read.put(self._staged.on_device(CPU).token_ids.tolist())
        self._done.set()

    def wait(self) -> None:
        """Block until it has read; whoever waits lets it go, as time would."""
        self._go.set()
        assert self._done.wait(GUARD)

    def tokens(self) -> list[int]:
        """Return what it read."""
        self.wait()
        return self._read.get(timeout=GUARD)


@pytest.mark.parametrize("buffers", [2, 3])
def test_a_buffer_is_written_again_only_after_the_step_that_reads_it(buffers: int) -> None:
    """Every reader is as late as it may be: it reads when its buffer is wanted again, and still sees its own step."""
    tensors = staging(buffers=buffers)
    steps = [make_batch(step, [Row(0, 0, [step] * 5)]) for step in range(3 * buffers + 1)]
    readers = [HeldReader(tensors.stage(batch)) for batch in steps]
    assert [reader.tokens() for reader in readers] == [[step] * 5 for step in range(3 * buffers + 1)]


@pytest.mark.parametrize("buffers", [2, 3])
def test_as_many_steps_as_there_are_buffers_are_staged_without_waiting(buffers: int) -> None:
    class Forever:
        def wait(self) -> None:
            raise AssertionError("waited for a step although a buffer was free")

    tensors = staging(buffers=buffers)
    for step in range(buffers):
        tensors.stage(make_batch(step, [Row(0, 0, [step])])).read_by(Forever())
    with pytest.raises(AssertionError, match="waited"):
        tensors.stage(make_batch(buffers, [Row(0, 0, [1])]))


def test_one_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        staging(buffers=1)


def test_a_step_that_does_not_fit_is_refused_and_nothing_is_overwritten() -> None:
    tensors = staging(slots=1, pages=1, tokens=4)
    with pytest.raises(RuntimeError, match="does not fit"):
        tensors.stage(make_batch(0, [Row(0, 0, [1] * 400)]))


def test_the_largest_step_fits() -> None:
    """Every row new, each with its whole row of the table and a partial page to copy."""
    slots, pages = 8, 16
    tensors = staging(slots=slots, pages=pages, tokens=slots)
    table = [(slot, column, slot * pages + column) for slot in range(slots) for column in range(pages)]
    copies = [(slot, slots + slot) for slot in range(slots)]
    staged = tensors.stage(make_batch(0, [Row(slot, 0, [slot]) for slot in range(slots)], table=table, copies=copies))
    inputs = staged.on_device(CPU)
    assert inputs.table_writes.T.tolist() == [list(write) for write in table]
    assert inputs.page_copies.T.tolist() == [list(copy) for copy in copies]


def rows_of(inputs: StepInputs) -> dict[int, tuple[int, list[int], list[int]]]:
    """Read the staged rows back: slot -> (positions after the step, token ids, positions)."""
    rows = {}
    starts = inputs.query_starts.tolist()
    for row, slot in enumerate(inputs.slots.tolist()):
        part = slice(starts[row], starts[row + 1])
        assert set(inputs.slot_of_token[part].tolist()) == {slot}
        rows[slot] = (int(inputs.kv_lens[row]), inputs.token_ids[part].tolist(), inputs.positions[part].tolist())
    return rows


@settings(max_examples=100)
@given(data=st.data())
def test_every_row_arrives_whole_whatever_the_order(data: st.DataObject) -> None:
    rows = []
    for slot in data.draw(st.permutations(range(8)))[: data.draw(st.integers(1, 8))]:
        length = data.draw(st.sampled_from([1, 1, 2, 5]))
        tokens = [100 * slot + place for place in range(length)]
        rows.append(Row(slot, data.draw(st.integers(0, 30)), tokens, sample=data.draw(st.booleans()), seed=slot))
    padded = data.draw(st.integers(0, 3))
    staged = staging().stage(make_batch(4, rows), padded_rows=padded)
    inputs = staged.on_device(CPU)

    found = rows_of(inputs)
    for row in rows:
        end = row.start + len(row.tokens)
        assert found[row.slot] == (end, list(row.tokens), list(range(row.start, end)))
    assert inputs.slots.tolist().count(8) == padded, "padded rows have the row behind the last slot"
    assert len(inputs.slots) == len(rows) + padded

    last = {slot: place for place, slot in enumerate(inputs.slot_of_token.tolist())}
    sampled = [row.slot for row in rows if row.sample]
    assert inputs.sampled_slots.tolist() == sampled, "samples keep the batch's order"
    assert inputs.sampled.tolist() == [last[slot] for slot in sampled]

    one_token = staged.one_token_rows
    assert (staged.query_lens[:one_token] == 1).all()
    assert (staged.query_lens[one_token:] > 1).all()
    assert (np.diff(staged.kv_lens[:one_token]) >= 0).all(), "short before long"
    assert staged.kv_lens.tolist() == inputs.kv_lens.tolist()
    assert staged.index == 4


def test_each_value_has_its_dtype_and_device() -> None:
    inputs = staging().stage(make_batch(0, [Row(0, 0, [1, 2])])).on_device(CPU)
    expected = {"query_starts": torch.int32, "kv_lens": torch.int32}
    expected |= dict.fromkeys(("temperatures", "top_ps", "min_ps", "uniforms"), torch.float32)
    for name in StepInputs.__dataclass_fields__:
        tensor = getattr(inputs, name)
        assert tensor.dtype == expected.get(name, torch.int64), name
        assert tensor.device == CPU, name
