"""A step's attention in bfloat16 on a processor's matrix unit.

Runs on the device's thread; owns the plan that the kernel reads. Invariant: the arrays of a plan live as long as it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch

from asyncllm.model.native.shared_parts import PART_KEYS, SharedParts

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows
    from asyncllm.model.native.library import NativeLibrary
    from asyncllm.scheduler.batch import Ints

__all__ = ["TileAttention"]

_LANES: Final = 32  # computed together, as in tile_attention.c


class Plan(ctypes.Structure):
    """What a step attends to. An item is up to 32 lanes that attend to the same keys; see tile_attention.c for lanes.

    Pages of a row: page_table [rows, columns]. positions [tokens]: a token's own. Item i has the lanes
    lanes[item_starts[i]] to that of i + 1; its keys are item_firsts[i] to item_ends[i] of the row item_rows[i]. A lane
    writes to its slot of the scratch, or to out where it is -1: a row of one token whose context has several parts,
    part_starts[row] to part_starts[row + 1], is put together of them.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("page_table", "positions", "lanes", "slots", "item_starts")),
        *((name, ctypes.c_void_p) for name in ("item_rows", "item_firsts", "item_ends", "part_starts")),
        *((name, ctypes.c_int64) for name in ("items", "part_rows", "columns", "page_size", "kv_heads")),
        ("scale", ctypes.c_float),
    ]


class TileAttention:
    """Attention of a step's rows, whatever their lengths.

    Args:
        library: built for the model's shape; `can_attend_tiles`.
        rows: the step's.
    """

    def __init__(self, library: NativeLibrary, rows: AttentionRows) -> None:
        self._attend = library.attend_tiles
        self._rows = rows
        self._planned: _Planned | None = None

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        if self._planned is None:  # the same for all layers
            _, heads, head_dim = queries.shape
            self._planned = _Planned(self._rows, heads, head_dim, keys.shape[2])
        out = torch.empty_like(queries)
        self._attend(
            out.data_ptr(),
            self._planned.scratch.data_ptr(),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            ctypes.addressof(self._planned.plan),
        )
        return out


class _Planned:
    """A plan, the arrays that it names, and the scratch memory that it needs."""

    def __init__(self, rows: AttentionRows, heads: int, head_dim: int, kv_heads: int) -> None:
        group = heads // kv_heads
        parts = SharedParts.of(rows, at_most=_LANES // group)
        items = [*_items_of_parts(parts, rows, group), *_items_of_chunks(rows, group)]
        first: Ints = rows.kv_lens - rows.query_lens
        arrays = [
            np.concatenate([np.arange(f, f + n) for f, n in zip(first, rows.query_lens, strict=True)]),
            np.concatenate([item[0] for item in items]),
            np.concatenate([item[1] for item in items]),
            np.cumsum([0, *(len(item[0]) for item in items)]),
            *np.array([item[2:] for item in items]).T,
            parts.starts,
        ]
        self._table = rows.page_table.contiguous()
        self._arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in arrays]
        self.scratch = torch.empty(int(parts.starts[-1]) * heads * (head_dim + 2), dtype=torch.float32, device="cpu")
        self.plan = Plan(
            self._table.data_ptr(),
            *(array.ctypes.data for array in self._arrays),
            len(items),
            rows.one_token_rows,
            self._table.shape[1],
            rows.page_size,
            kv_heads,
            head_dim**-0.5,
        )


Item = tuple["Ints", "Ints", int, int, int]  # lanes, their slots, row, first key, end of keys


def _items_of_parts(parts: SharedParts, rows: AttentionRows, group: int) -> list[Item]:
    heads: Ints = np.arange(group, dtype=np.int32)
    items = []
    for shared in parts.items:
        part, row = shared[0]
        first = (part - int(parts.starts[row])) * PART_KEYS
        lanes = np.concatenate([row * group + heads for _, row in shared])
        alone = parts.starts[row + 1] - parts.starts[row] == 1
        slots = np.full(len(lanes), -1) if alone else np.concatenate([part * group + heads for part, _ in shared])
        items.append((lanes, slots, row, first, min(first + PART_KEYS, int(rows.kv_lens[row]))))
    return items


def _items_of_chunks(rows: AttentionRows, group: int) -> list[Item]:
    items = []
    start = rows.one_token_rows
    for row in range(rows.one_token_rows, len(rows.kv_lens)):
        count, kv_len = int(rows.query_lens[row]), int(rows.kv_lens[row])
        for first in range(0, count * group, _LANES):
            lanes: Ints = np.arange(first, min(first + _LANES, count * group), dtype=np.int32)
            end = kv_len - count + int(lanes[-1]) // group + 1
            items.append((start * group + lanes, np.full(len(lanes), -1), row, 0, end))
        start += count
    return items
