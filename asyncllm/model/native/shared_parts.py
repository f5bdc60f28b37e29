"""Which keys rows of one token read together: the parts of a context that are the same pages.

Runs on the device's thread, once a step; owns nothing. Invariant: parts lie at fixed positions, so that what a row
computes does not depend on whether it shares them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows
    from asyncllm.scheduler.batch import Ints

__all__ = ["PART_KEYS", "SharedParts"]

PART_KEYS: Final = 256  # what one thread computes at a time: a long row's parts are spread over threads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The contexts of a step's rows of one token, cut into parts.

    Args:
        starts: int32 [rows + 1]: row r has the parts starts[r] to starts[r + 1].
        items: parts that have the same keys, as (part, row) each; together all parts, each once.
    """

    starts: Ints
    items: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, rows: AttentionRows, *, at_most: int) -> SharedParts:
        """Find them.

        Args:
            rows: a step's.
            at_most: parts of an item; the others are left to other threads.
        """
        table, kv_lens = rows.page_table.numpy(), rows.kv_lens[: rows.one_token_rows]
        starts: Ints = np.concatenate([[0], np.cumsum(-(-kv_lens // PART_KEYS))]).astype(np.int32)
        pages, remainder = divmod(PART_KEYS, rows.page_size)
        items: list[list[tuple[int, int]]] = []
        found: dict[bytes, list[tuple[int, int]]] = {}  # by their pages
        for row, kv_len in enumerate(kv_lens):
            whole = 0 if remainder else kv_len // PART_KEYS
            for index, part in enumerate(range(starts[row], starts[row + 1])):
                key = table[row, index * pages : (index + 1) * pages].tobytes()
                item = found.get(key) if index < whole else None
                if item is None or len(item) == at_most:
                    items.append(item := [])
                    if index < whole:
                        found[key] = item
                item.append((part, row))
        return cls(starts=starts, items=items)
