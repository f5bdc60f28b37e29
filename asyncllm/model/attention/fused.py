"""Attention in short floating point on the CPU, by torch's fused kernel.

Runs on the device's thread; owns what `PageMemory` does. Invariant: a row of one token is computed in parts of its
keys that lie together, and the parts are put together by their softmax's sums (as FlashDecoding does, Dao et al.
2023). Nothing is copied then, nothing masked, and a part that several rows lease, a shared prefix, is read once for
all of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from asyncllm.model.attention.chunks import attend_chunk, plan_chunks
from asyncllm.model.attention.page_memory import PageMemory, Piece, runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.model.attention.chunks import Chunk
    from asyncllm.model.attention.interface import AttentionRows
    from asyncllm.scheduler.batch import Ints

__all__ = ["FusedAttention"]

_MOST_RUNS: Final = 4  # of pages that lie together; a row that lies in more is copied together first
# The kernel behind scaled_dot_product_attention on a CPU; it also returns the logarithms of the softmax's sums.
_PARTIAL: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Rows of one token, and keys that all of them see."""

    rows: list[int]
    index: torch.Tensor  # the same, int64 [rows]
    piece: Piece


class FusedAttention:
    """Attend by parts.

    Args:
        dtype: of queries, keys and values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory = PageMemory()

    def plan(self, rows: AttentionRows) -> _FusedStep:
        """See `AttentionBackend`."""
        count = rows.one_token_rows
        parts = _parts(rows.page_table.numpy()[:count], rows.kv_lens[:count], rows.page_size)
        return _FusedStep(self._memory, parts, count, plan_chunks(rows, self._dtype))


class _FusedStep:
    """A step's rows; a `StepAttention`."""

    def __init__(self, memory: PageMemory, parts: list[_Part], one_token_rows: int, chunks: list[Chunk]) -> None:
        self._memory = memory
        self._parts = parts
        self._one_token_count = one_token_rows
        self._chunks = chunks
        self._merge = _places(parts, one_token_rows)

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        out = []
        if self._parts:
            out.append(self._one_token_rows(queries[: self._one_token_count], keys, values))
        out.extend(attend_chunk(chunk, self._memory, queries, keys, values) for chunk in self._chunks)
        return torch.cat(out)

    def _one_token_rows(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend with the rows of one token: [rows, num_heads, head_dim].

        The query heads of a key head are rows of the kernel, so that no key is repeated; so are rows that share a part.
        """
        count, heads, head_dim = queries.shape
        grouped = queries.view(count, keys.shape[2], -1, head_dim)  # [rows, kv_heads, group, head_dim]
        single = grouped.split(1)
        if self._merge is None:
            rows = zip(single, self._parts, strict=True)
            pieces = ((q, *self._memory.read(keys, values, part.piece)) for q, part in rows)
            return torch.cat([F.scaled_dot_product_attention(*piece) for piece in pieces]).view(count, heads, head_dim)
        outs, log_sums = [], []
        for part in self._parts:
            k, v = self._memory.read(keys, values, part.piece)
            if len(part.rows) == 1:
                out, log_sum = _PARTIAL(single[part.rows[0]], k, v)
            else:
                out, log_sum = _attend_together(grouped[part.index], k, v)
            outs.append(out)  # [rows, kv_heads, group, head_dim]
            log_sums.append(log_sum)  # float32 [rows, kv_heads, group]
        places, absent = self._merge
        weights = torch.cat(log_sums)[places].masked_fill_(absent, -torch.inf).softmax(dim=1)
        merged = (torch.cat(outs)[places] * weights.unsqueeze(-1)).sum(dim=1)
        return merged.to(queries.dtype).view(count, heads, head_dim)


def _attend_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from several rows to the same keys.

    Args:
        q: [rows, kv_heads, group, head_dim].
        k: [1, kv_heads, tokens, head_dim].
        v: likewise.

    Returns:
        q's shape, and the logarithms of the softmax's sums, float32 [rows, kv_heads, group].
    """
    rows, kv_heads, group, head_dim = q.shape
    out, log_sums = _PARTIAL(q.transpose(0, 1).reshape(1, kv_heads, rows * group, head_dim), k, v)
    by_row = out.view(kv_heads, rows, group, head_dim).transpose(0, 1)
    return by_row, log_sums.reshape(kv_heads, rows, group).transpose(0, 1)


def _parts(table: Ints, kv_lens: Ints, page_size: int) -> list[_Part]:
    """Split the rows' keys, table int32 [rows, columns], into parts; rows in order where each is one part."""
    same_start: dict[int, list[int]] = {}
    for row, page in enumerate(table[:, 0].tolist()):
        same_start.setdefault(page, []).append(row)
    parts: list[_Part] = []
    for rows in same_start.values():
        shared = _shared_pages(table[rows], kv_lens[rows], page_size) if len(rows) > 1 else 0
        if shared:
            parts += _in_pieces(rows, table[rows[0], :shared], shared * page_size, page_size)
        for row in rows:
            kv_len = int(kv_lens[row])
            own = table[row, shared : -(-kv_len // page_size)]
            if len(own):
                parts += _in_pieces([row], own, kv_len - shared * page_size, page_size)
    return parts


def _shared_pages(table: Ints, kv_lens: Ints, page_size: int) -> int:
    """Count the leading pages that all rows have, whole ones within every row's length."""
    equal = (table == table[0]).all(axis=0)
    common = len(equal) if equal.all() else int(equal.argmin())
    return min(common, int(kv_lens.min()) // page_size)


def _in_pieces(rows: list[int], pages: Ints, tokens: int, page_size: int) -> list[_Part]:
    """Make a part of each run of pages, or one of all."""
    runs, index = runs_of(pages), torch.tensor(rows, dtype=torch.int64, device="cpu")
    if len(runs) > _MOST_RUNS:
        return [_Part(rows=rows, index=index, piece=Piece.of(pages, tokens))]
    parts = []
    for run in runs:
        here = min(tokens, len(run) * page_size)
        parts.append(_Part(rows=rows, index=index, piece=Piece(page=int(run[0]), pages=None, tokens=here)))
        tokens -= here
    return parts


def _places(parts: Sequence[_Part], count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Find each row's parts among all parts' rows.

    Returns:
        int64 [rows, most parts], where they are, and bool [rows, most parts, 1, 1], which are absent; None where
        each row is one part, in order.
    """
    of_row: list[list[int]] = [[] for _ in range(count)]
    place = 0
    for part in parts:
        for row in part.rows:
            of_row[row].append(place)
            place += 1
    if [part.rows for part in parts] == [[row] for row in range(count)]:
        return None
    most = max(map(len, of_row))
    padded = np.array([places + [-1] * (most - len(places)) for places in of_row], dtype=np.int64)
    return torch.from_numpy(padded.clip(min=0)), torch.from_numpy(padded < 0)[..., None, None]
