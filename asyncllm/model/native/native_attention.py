"""Attention in bfloat16 on the CPU by the native kernel; rows of several tokens by torch's fused one.

Runs on the device's thread; owns what `PageMemory` does. Invariant: a row's keys are read where they are, through the
page table, in parts at fixed positions, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from asyncllm.model.attention.chunks import attend_chunk, plan_chunks
from asyncllm.model.attention.page_memory import PageMemory

if TYPE_CHECKING:
    from asyncllm.model.attention.chunks import Chunk
    from asyncllm.model.attention.interface import AttentionRows
    from asyncllm.model.native.library import NativeLibrary
    from asyncllm.scheduler.batch import Ints

__all__ = ["NativeAttention"]

_PART_KEYS: Final = 512  # what one thread computes at a time: a long row's parts are spread over threads
_PAGE_SIZE: Final = 256


class NativeAttention:
    """An `AttentionBackend` of a compiled kernel.

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

    def plan(self, rows: AttentionRows) -> _NativeStep:
        """See `AttentionBackend`."""
        return _NativeStep(self._library, self._memory, rows, plan_chunks(rows, torch.bfloat16))


class _NativeStep:
    """A step's rows; a `StepAttention`."""

    def __init__(self, library: NativeLibrary, memory: PageMemory, rows: AttentionRows, chunks: list[Chunk]) -> None:
        self._library = library
        self._memory = memory
        self._chunks = chunks
        self._count = rows.one_token_rows
        self._page_size = rows.page_size
        self._page_table = rows.page_table.contiguous()
        kv_lens: Ints = rows.kv_lens[: self._count].astype(np.int32)
        parts = -(-kv_lens // _PART_KEYS)
        part_starts: Ints = np.concatenate([[0], np.cumsum(parts)]).astype(np.int32)
        part_rows: Ints = np.repeat(np.arange(self._count, dtype=np.int32), parts)
        self._arrays = (kv_lens, part_rows, part_starts)  # the addresses below are theirs
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
        kv_heads = keys.shape[2]
        if self._scratch is None:  # the same for all layers
            size = len(self._arrays[1]) * heads * (head_dim + 2)
            self._scratch = torch.empty(size, dtype=torch.float32, device=queries.device)
        self._library.attend(
            out.data_ptr(),
            self._scratch.data_ptr(),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            self._page_table.data_ptr(),
            *self._addresses,
            self._count,
            self._page_table.shape[1],
            _PART_KEYS,
            self._page_size,
            kv_heads,
            head_dim**-0.5,
        )
