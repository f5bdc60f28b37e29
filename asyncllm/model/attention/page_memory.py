"""Reading pages on the CPU: in place where they follow each other, else copied together.

Runs on the device's thread; owns the buffers that pages are copied into. Invariant: what `read` returned is valid
until its next call.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.scheduler.batch import Ints

__all__ = ["PageMemory", "Piece", "runs_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some of a row's positions in order: the first `tokens` of some pages.

    Args:
        page: the first page.
        pages: int64 [pages]; None: they follow each other from `page` on.
        tokens: how many positions.
    """

    page: int
    pages: torch.Tensor | None
    tokens: int

    @classmethod
    def of(cls, pages: Ints, tokens: int) -> Piece:
        """Make a piece of these pages, int32 [pages]."""
        together = len(runs_of(pages)) == 1
        return cls(
            page=int(pages[0]),
            pages=None if together else torch.from_numpy(pages.astype(np.int64)),
            tokens=tokens,
        )


def runs_of(pages: Ints) -> list[Ints]:
    """Split pages where one does not follow the one before."""
    breaks: npt.NDArray[np.intp] = np.flatnonzero(np.diff(pages) != 1) + 1
    return np.split(pages, breaks)


class PageMemory:
    """Give the keys and values of pieces."""

    def __init__(self) -> None:
        self._copied: list[torch.Tensor] = []  # of keys, of values: [pages, page_size, num_kv_heads, head_dim]

    def read(self, keys: torch.Tensor, values: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a piece's keys and values: 2 x [1, num_kv_heads, tokens, head_dim].

        Args:
            keys: [pages, page_size, num_kv_heads, head_dim].
            values: likewise.
            piece: what to read.
        """
        page = piece.page
        if piece.pages is not None:
            keys, values = self._copy(keys, values, piece.pages)
            page = 0
        stride = keys.stride()
        size = (1, keys.shape[2], piece.tokens, keys.shape[3])
        strides, start = (0, stride[2], stride[1], stride[3]), page * stride[0]
        return keys.as_strided(size, strides, start), values.as_strided(size, strides, start)

    def _copy(self, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(pages)
        if not self._copied or len(self._copied[0]) < count:
            shape = (2 * count, *keys.shape[1:])
            self._copied = [torch.empty(shape, dtype=keys.dtype, device=keys.device) for _ in range(2)]
        for pool, copied in zip((keys, values), self._copied, strict=True):
            torch.index_select(pool, 0, pages, out=copied[:count])
        return self._copied[0], self._copied[1]
