"""Batches written by hand."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.scheduler.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Row", "make_batch"]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One request in a step."""

    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool = True
    seed: int = 0


def make_batch(
    index: int,
    rows: Sequence[Row],
    *,
    table: Sequence[tuple[int, int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> Batch:
    """Build a greedy batch; `table` holds (slot, column, page), `copies` (source, target)."""
    sampled = [row for row in rows if row.sample]
    return Batch(
        index=index,
        slots=np.array([row.slot for row in rows], dtype=np.int32),
        starts=np.array([row.start for row in rows], dtype=np.int32),
        query_lens=np.array([len(row.tokens) for row in rows], dtype=np.int32),
        token_ids=np.array([token for row in rows for token in row.tokens], dtype=np.int32),
        sample_rows=np.array([place for place, row in enumerate(rows) if row.sample], dtype=np.int32),
        temperatures=np.zeros(len(sampled), dtype=np.float32),
        top_ps=np.ones(len(sampled), dtype=np.float32),
        top_ks=np.zeros(len(sampled), dtype=np.int32),
        min_ps=np.zeros(len(sampled), dtype=np.float32),
        seeds=np.array([row.seed for row in sampled], dtype=np.int64),
        table_writes=np.array(table, dtype=np.int32).reshape(-1, 3).T,
        page_copies=np.array(copies, dtype=np.int32).reshape(-1, 2).T,
    )
