"""Attention in bfloat16 on the CPU by native kernels.

Runs on the device's thread; owns what `PageMemory` does. Invariant: a row's keys are read where they are, through the
page table, in parts at fixed positions, so that a row's result does not depend on the rows beside it, also where it
reads a part together with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from asyncllm.model.attention.chunks import attend_chunk, plan_chunks
from asyncllm.model.attention.page_memory import PageMemory
from asyncllm.model.native.shared_parts import PART_KEYS, SharedParts
from asyncllm.model.native.tile_attention import TileAttention

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows, StepAttention
    from asyncllm.model.native.library import NativeLibrary
    from asyncllm.scheduler.batch import Ints

__all__ = ["NativeAttention"]

_SHARED: Final = 8  # rows that read a part together, at most: the others are left to other threads
_PAGE_SIZE: Final = 256


class NativeAttention:
    """An `AttentionBackend` of compiled kernels.

    Args:
        library: built for the model's shape.
    """

    name: Final = "native"
    default_page_size: Final = _PAGE_SIZE

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._memory = PageMemory()

    def check_page_size(self, page_size: int) -> None:
        """Take every page size."""

    def plan(self, rows: AttentionRows) -> StepAttention:
        """See `AttentionBackend`."""
        if self._library.can_attend_tiles:
            return TileAttention(self._library, rows)
        return _VectorAttention(self._library, self._memory, rows)


class _VectorAttention:
    """A `StepAttention` on vector registers; rows of several tokens by torch's fused kernel."""

    def __init__(self, library: NativeLibrary, memory: PageMemory, rows: AttentionRows) -> None:
        self._library = library
        self._memory = memory
        self._chunks = plan_chunks(rows, torch.bfloat16)
        self._count = rows.one_token_rows
        self._page_size = rows.page_size
        self._page_table = rows.page_table.contiguous()
        parts = SharedParts.of(rows, at_most=_SHARED)
        shared: Ints = np.array([pair for item in parts.items for pair in item], dtype=np.int32).reshape(-1, 2).T
        self._items, self._parts = len(parts.items), int(parts.starts[-1])
        self._arrays = (  # the addresses below are theirs
            rows.kv_lens[: self._count].astype(np.int32),
            parts.starts,
            np.cumsum([0, *map(len, parts.items)], dtype=np.int32),
            *np.ascontiguousarray(shared),
        )
        self._addresses = tuple(array.ctypes.data for array in self._arrays)
        self._scratch: torch.Tensor | None = None

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if self._count:
            self._one_token_rows(out, queries, keys, values)
        for chunk in self._chunks:
            out[chunk.first : chunk.last] = attend_chunk(chunk, self._memory, queries, keys, values)
        return out

    def _one_token_rows(
        self, out: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        _, heads, head_dim = queries.shape
        if self._scratch is None:  # the same for all layers
            size = self._parts * heads * (head_dim + 2)
            self._scratch = torch.empty(size, dtype=torch.float32, device=queries.device)
        self._library.attend(
            out.data_ptr(),
            self._scratch.data_ptr(),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            self._page_table.data_ptr(),
            *self._addresses,
            self._items,
            self._count,
            self._page_table.shape[1],
            PART_KEYS,
            self._page_size,
            keys.shape[2],
            head_dim**-0.5,
        )
