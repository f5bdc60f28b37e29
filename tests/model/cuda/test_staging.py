"""How a batch becomes the block of memory that a padded step reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.model.cuda.layouts import StepLayouts
from asyncllm.model.cuda.staging import StepStaging
from asyncllm.model.cuda.step_layout import Counts, StepLayout
from helpers.fused_steps import SLOTS, Sampling, random_batch

if TYPE_CHECKING:
    from asyncllm.model.cuda.staging import Staged
    from asyncllm.model.cuda.step_layout import StepSections
    from asyncllm.scheduler.batch import Batch

TILE = 32
MAX_TOKENS = 512


def make_layouts(*, all_in_tiles: bool = False) -> StepLayouts:
    return StepLayouts(max_rows=SLOTS, max_tokens=MAX_TOKENS, tile_tokens=TILE, all_in_tiles=all_in_tiles)


def make_staging(*, all_in_tiles: bool = False) -> StepStaging:
    size = max(layout.size for layout in make_layouts(all_in_tiles=all_in_tiles).all())
    return StepStaging(num_slots=SLOTS, size=size, tile_tokens=TILE, all_in_tiles=all_in_tiles, pinned=False)


def stage(
    batch: Batch, *, all_in_tiles: bool = False, staging: StepStaging | None = None
) -> tuple[StepLayout, Staged, StepSections[torch.Tensor]]:
    """Put a batch into the layout that the engine would choose."""
    staging = staging or make_staging(all_in_tiles=all_in_tiles)
    layout = make_layouts(all_in_tiles=all_in_tiles).choose(batch, staging.tiles(batch))
    staged = staging.stage(batch, layout)
    return layout, staged, layout.device(staged.block)


lens = st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=SLOTS).filter(
    lambda each: sum(each) <= MAX_TOKENS
)


@given(lens=lens, seed=st.integers(0, 1000), all_in_tiles=st.booleans(), twice=st.booleans())
def test_every_token_is_there_with_its_slot_and_position_and_all_else_is_padding(
    lens: list[int], seed: int, all_in_tiles: bool, twice: bool
) -> None:
    """Also in a block that held another step before."""
    staging = make_staging(all_in_tiles=all_in_tiles)
    if twice:
        for number in range(3):
            stage(random_batch([1] * SLOTS, seed=number), all_in_tiles=all_in_tiles, staging=staging)
    batch = random_batch(lens, seed=seed)
    layout, staged, step = stage(batch, all_in_tiles=all_in_tiles, staging=staging)
    rows, tokens = batch.rows, batch.query_tokens
    ends = np.cumsum(batch.query_lens)
    for row in range(rows):
        place = int(staged.places[row])
        own = batch.token_ids[ends[row] - lens[row] : ends[row]].tolist()
        start = int(batch.starts[row])
        first = place if layout.decodes else int(step.query_starts[place])
        span = slice(first, first + lens[row])
        assert step.token_ids[span].tolist() == own
        assert step.positions[span].tolist() == list(range(start, start + lens[row]))
        assert set(step.token_slots[span].tolist()) == {int(batch.slots[row])}
        assert int(step.slots[place]) == batch.slots[row]
        assert int(step.kv_lens[place]) == start + lens[row]
        if not layout.decodes:
            assert int(step.last_tokens[place]) == first + lens[row] - 1
    assert set(step.token_slots[tokens:].tolist()) <= {SLOTS}
    assert set(step.slots[rows:].tolist()) <= {SLOTS}
    assert set(step.kv_lens[rows:].tolist()) <= {1}
    assert set(step.positions[tokens:].tolist()) <= {0}
    assert not step.temperatures[rows:].any()
    assert int(step.counts[Counts.ROWS]) == rows
    assert int(step.counts[Counts.DECODE_ROWS]) == lens.count(1)


@given(lens=lens, seed=st.integers(0, 1000), all_in_tiles=st.booleans())
def test_tiles_cover_each_prompt_token_once(lens: list[int], seed: int, all_in_tiles: bool) -> None:
    layout, _, step = stage(random_batch(lens, seed=seed), all_in_tiles=all_in_tiles)
    if layout.decodes:
        return
    covered = []
    for tile in range(int(step.counts[Counts.TILES])):
        row, first = int(step.tile_rows[tile]), int(step.tile_firsts[tile])
        start, end = int(step.query_starts[row]) + first, int(step.query_starts[row + 1])
        covered += list(range(start, min(start + TILE, end)))
    ones = 0 if all_in_tiles else lens.count(1)  # rows of one token come first
    assert sorted(covered) == list(range(ones, sum(lens)))


def test_long_rows_of_one_token_come_first() -> None:
    batch = random_batch([1] * 9, seed=3)
    _, _, step = stage(batch)
    assert step.kv_lens[:9].tolist() == sorted((batch.starts + 1).tolist(), reverse=True)


def test_sampling_settings_follow_their_rows_and_rows_without_are_greedy() -> None:
    batch = random_batch([1, 7, 1], seed=1, sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1))
    batch = dataclasses.replace(
        batch,
        sample_rows=np.array([0, 2], dtype=np.int32),
        temperatures=np.array([0.5, 0.0], dtype=np.float32),
        seeds=np.array([2**62 + 1, 5], dtype=np.int64),
        **{name: getattr(batch, name)[:2] for name in ("top_ps", "top_ks", "min_ps")},
    )
    _, staged, step = stage(batch)
    first, third = staged.places.tolist()
    assert len({first, third}) == 2
    assert step.temperatures[first] == 0.5
    assert step.seeds[first] == 2**62 + 1
    assert step.top_ks[first] == 3
    assert int((step.temperatures[:3] == 0.0).sum()) == 2


def test_table_writes_that_find_no_room_are_given_back() -> None:
    writes = [(slot % SLOTS, slot // SLOTS, slot) for slot in range(300)]
    batch = random_batch([1, 1], writes=writes)
    layout, staged, step = stage(batch)
    assert int(step.counts[Counts.WRITES]) == layout.writes == 256
    assert step.table_writes.view(3, -1)[:, :256].T.tolist() == [list(write) for write in writes[:256]]
    assert staged.late_writes.T.tolist() == [list(write) for write in writes[256:]]


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=4, max_size=30))
def test_steady_steps_are_staged_as_others_are(steps: list[tuple[int, bool]]) -> None:
    """Whatever came between them: mixed steps, or steps of other rows, of which there are three kinds here."""
    staging = make_staging()
    kinds = [random_batch([1] * rows, seed=rows, sampling=Sampling(temperature=0.7)) for rows in (3, 5, 5 + SLOTS // 2)]
    kinds = [dataclasses.replace(batch, starts=batch.starts // 2) for batch in kinds]
    for number, (kind, mixed) in enumerate(steps):
        batch = kinds[kind]
        writes = np.array([[number % 3], [0], [number]], dtype=np.int32)
        batch = dataclasses.replace(batch, starts=batch.starts + np.int32(number), table_writes=writes)
        if mixed:
            stage(random_batch([1] * batch.rows + [9], seed=number), staging=staging)
        _, staged, got = stage(dataclasses.replace(batch, steady=kind), staging=staging)
        _, expected, fresh = stage(batch)
        assert staged.places.tolist() == expected.places.tolist()
        for name in ("counts", "token_ids", "token_slots", "positions", "slots", "kv_lens", "temperatures"):
            assert getattr(got, name).tolist() == getattr(fresh, name).tolist(), name
        for name in ("top_ps", "top_ks", "min_ps", "seeds"):  # padding is greedy
            assert getattr(got, name)[: batch.rows].tolist() == getattr(fresh, name)[: batch.rows].tolist(), name
        assert got.table_writes.view(3, -1)[:, 0].tolist() == writes[:, 0].tolist()


def test_a_block_is_written_again_only_after_its_reader_is_done() -> None:
    staging, waited = make_staging(), []

    class Reader:
        def __init__(self, number: int) -> None:
            self._number = number

        def wait(self) -> None:
            waited.append(self._number)

    for number in range(5):
        _, staged, _ = stage(random_batch([1], seed=number), staging=staging)
        staged.read_by(Reader(number))
        assert waited == list(range(number - 2))


@pytest.mark.parametrize("all_in_tiles", [False, True])
def test_every_batch_within_the_bounds_fits_a_layout(all_in_tiles: bool) -> None:
    """The hardest: as many rows as there may be, each one token longer than a tile takes, or of one token."""
    layouts, staging = make_layouts(all_in_tiles=all_in_tiles), make_staging(all_in_tiles=all_in_tiles)
    for each in ([2] * SLOTS, [1] * SLOTS, [MAX_TOKENS], [1] * (SLOTS - 1) + [MAX_TOKENS - SLOTS + 1], [21] * SLOTS):
        batch = random_batch([1] * len(each))
        batch = dataclasses.replace(
            batch, query_lens=np.array(each, dtype=np.int32), token_ids=np.zeros(sum(each), dtype=np.int32)
        )
        layout = layouts.choose(batch, staging.tiles(batch))
        assert layout.tokens >= sum(each)
        assert layout.rows >= len(each)
        assert layout.tiles >= staging.tiles(batch)
    too_many = dataclasses.replace(batch, token_ids=np.zeros(MAX_TOKENS + 1, dtype=np.int32))
    with pytest.raises(ValueError, match="exceeds"):
        layouts.choose(too_many, staging.tiles(batch))


def test_sections_start_where_kernels_can_read_sixteen_bytes() -> None:
    for layout in make_layouts().all():
        step = layout.device(torch.zeros(layout.size, dtype=torch.int32))
        for field in dataclasses.fields(step):
            section = getattr(step, field.name)
            assert section.storage_offset() * section.element_size() % 16 == 0
