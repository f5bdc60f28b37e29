"""Attention in float32 on the CPU, with the same bits for a token in every batch.

Runs on the device's thread; owns what `PageMemory` does. Invariant: a token's result does not depend on other rows,
on which tokens are computed with it, on how long the pages are, or on where they lie.

Measured with MKL over head widths from 8 to 256, up to 1,300 keys and 1 and 2 threads: a row of a product has the
same bits whatever the number of rows, from 16 rows and 400 multiplications a column on (below, other kernels are
taken); a sum over at most 256 keys has the same bits with zeros behind it; and so has a softmax whose width is a
multiple of the vector's 16. Beyond 256 keys MKL splits a sum by its length, so it is split here, at fixed positions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from asyncllm.model.attention.page_memory import PageMemory, Piece

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows

__all__ = ["InOrderAttention"]

_LEAST_ROWS: Final = 16
_LEAST_WORK: Final = 400
_KEY_BLOCK: Final = 256
_VECTOR: Final = 16
_QUERY_BLOCK: Final = 64  # queries at a time: their scores are in memory at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    first: int  # of its queries
    last: int
    piece: Piece


class InOrderAttention:
    """Attend row by row, keys in blocks of fixed positions."""

    def __init__(self) -> None:
        self._memory = PageMemory()

    def plan(self, rows: AttentionRows) -> _InOrderStep:
        """See `AttentionBackend`."""
        table, planned, first = rows.page_table.numpy(), [], 0
        for place, (queries, kv_len) in enumerate(zip(rows.query_lens.tolist(), rows.kv_lens.tolist(), strict=True)):
            piece = Piece.of(table[place, : -(-kv_len // rows.page_size)], kv_len)
            planned.append(_Row(first=first, last=first + queries, piece=piece))
            first += queries
        return _InOrderStep(self._memory, planned)


class _InOrderStep:
    """A step's rows; a `StepAttention`."""

    def __init__(self, memory: PageMemory, rows: list[_Row]) -> None:
        self._memory = memory
        self._rows = rows

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        out = []
        for row in self._rows:
            k, v = self._memory.read(keys, values, row.piece)
            out.append(_attend(queries[row.first : row.last], k[0], v[0]))
        return torch.cat(out)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend from the last positions, q [queries, num_heads, head_dim], to k and v [num_kv_heads, kv_len, head_dim]."""
    queries, heads, head_dim = q.shape
    kv_heads, kv_len = k.shape[0], k.shape[1]
    q = q.view(queries, kv_heads, heads // kv_heads, head_dim).transpose(0, 1) * head_dim**-0.5
    out = []
    for first in range(0, queries, _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, queries)
        seen = kv_len - queries + last  # the keys that the block's last query sees
        out.append(_attend_block(q[:, first:last], k[:, :seen], v[:, :seen]))
    return torch.cat(out, dim=1).transpose(0, 1).reshape(queries, heads, head_dim)


def _attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend from q [kv_heads, queries, group, head_dim], scaled, to k and v [kv_heads, seen, head_dim]."""
    kv_heads, queries, group, head_dim = q.shape
    count, seen = queries * group, k.shape[1]
    least = max(_LEAST_ROWS, -(-_LEAST_WORK // head_dim))
    rows = F.pad(q.reshape(kv_heads, count, head_dim), (0, 0, 0, max(least - count, 0)))
    scores = F.pad(torch.matmul(rows, k.transpose(1, 2)), (0, -seen % _VECTOR), value=-torch.inf)
    if queries > 1:
        future = torch.full((queries, seen), -torch.inf, dtype=q.dtype, device=q.device).triu_(seen - queries + 1)
        scores[:, :count, :seen].view(kv_heads, queries, group, seen).add_(future.unsqueeze(1))
    weights = scores.softmax(dim=-1)  # [kv_heads, rows, seen and padding]
    out = torch.matmul(weights[..., : min(seen, _KEY_BLOCK)], v[:, :_KEY_BLOCK])
    for start in range(_KEY_BLOCK, seen, _KEY_BLOCK):
        end = min(start + _KEY_BLOCK, seen)
        out += torch.matmul(weights[..., start:end], v[:, start:end])
    return out[:, :count].reshape(kv_heads, queries, group, head_dim)
