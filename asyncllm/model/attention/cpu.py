"""Attention on the CPU, request by request over the memory of its pages.

Runs on the device's thread; owns the buffers into which scattered pages are gathered. Invariant: in float32 a
token's result has the same bits whatever is beside it, in whichever chunks it was computed and however long the
pages are: keys are summed in blocks of fixed positions, and the rest are products that add in order.

A request whose pages lie one after the other is read in place; with pages of 256 tokens that is most of them. One
call a request is faster here than a padded batch: nothing is copied and nothing is masked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows

__all__ = ["CPUAttention", "CPUPlan"]

_PAGE_SIZE: Final = 256
_KEY_BLOCK: Final = 256  # keys that one product sums
_QUERY_BLOCK: Final = 64  # queries at a time, which bounds the memory of their scores
_VECTOR: Final = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One request in a step: its queries [first, last) and where its keys are."""

    first: int
    last: int
    kv_len: int
    page: int  # the first
    pages: torch.Tensor | None  # int64 [n]; None: they follow each other
    mask: torch.Tensor | None  # [queries, kv_len], added to scores; None: every query sees every key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CPUPlan:
    """A step's rows."""

    rows: tuple[_Row, ...]


class CPUAttention:
    """Paged attention in torch's own operations.

    Args:
        dtype: of queries, keys and values. float32 is computed reproducibly, others by fused attention.
    """

    name: Final = "cpu"
    default_page_size: Final = _PAGE_SIZE

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._attend = _attend_in_order if dtype == torch.float32 else _attend_fused
        self._gathered: list[torch.Tensor] = []  # keys, values: [tokens, num_kv_heads, head_dim], grown as needed

    def check_page_size(self, page_size: int) -> None:
        """Take every page size."""

    def plan(self, rows: AttentionRows, page_size: int) -> CPUPlan:
        """Find out which rows can be read in place, and make the masks of the others."""
        counts = -(-rows.kv_lens // page_size)
        table = rows.page_table.numpy()
        steps_on = table[:, 1:] == table[:, :-1] + 1
        in_place = (steps_on | (np.arange(1, table.shape[1]) >= counts[:, None])).all(axis=1).tolist()
        pages = rows.page_table.to(torch.int64)
        planned, first = [], 0
        for place, (queries, kv_len) in enumerate(zip(rows.query_lens.tolist(), rows.kv_lens.tolist(), strict=True)):
            planned.append(
                _Row(
                    first=first,
                    last=first + queries,
                    kv_len=kv_len,
                    page=int(table[place, 0]),
                    pages=None if in_place[place] else pages[place, : counts[place]],
                    mask=None if queries == 1 else _causal_mask(queries, kv_len, self._dtype),
                )
            )
            first += queries
        return CPUPlan(rows=tuple(planned))

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: CPUPlan) -> torch.Tensor:
        """Attend row by row; see `AttentionBackend`."""
        return torch.cat([self._attend_row(queries[row.first : row.last], keys, values, row) for row in plan.rows])

    def _attend_row(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: _Row) -> torch.Tensor:
        """[queries, num_heads, head_dim] -> the same shape."""
        if row.pages is None:
            start, end = row.page * keys.shape[1], row.page * keys.shape[1] + row.kv_len
            k, v = keys.flatten(0, 1)[start:end], values.flatten(0, 1)[start:end]  # [kv_len, num_kv_heads, head_dim]
        else:
            k, v = self._gather(keys, values, row.pages, row.kv_len)
        return self._attend(queries, k.transpose(0, 1), v.transpose(0, 1), row.mask)

    def _gather(
        self, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, kv_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy pages together: 2 x [kv_len, num_kv_heads, head_dim], overwritten by the next call."""
        count = len(pages)
        if not self._gathered or len(self._gathered[0]) < count:
            shape = (max(count, 2 * len(self._gathered[0]) if self._gathered else 0), *keys.shape[1:])
            self._gathered = [torch.empty(shape, dtype=keys.dtype, device=keys.device) for _ in range(2)]
        for pool, gathered in zip((keys, values), self._gathered, strict=True):
            torch.index_select(pool, 0, pages, out=gathered[:count])
        k, v = (gathered[:count].flatten(0, 1)[:kv_len] for gathered in self._gathered)
        return k, v


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend with q [queries, num_heads, head_dim] to k, v [num_kv_heads, kv_len, head_dim]; return q's shape."""
    queries, heads, head_dim = q.shape
    if queries == 1:  # the query heads of a key head as its rows: no key is repeated
        q = q.view(1, k.shape[0], heads // k.shape[0], head_dim)
        return F.scaled_dot_product_attention(q, k.unsqueeze(0), v.unsqueeze(0)).view(1, heads, head_dim)
    q = q.transpose(0, 1).unsqueeze(0)  # [1, heads, queries, head_dim]
    out = F.scaled_dot_product_attention(q, k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _attend_in_order(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """As `_attend_fused`, the same bits for a query whatever other queries and later keys are there.

    Measured over head widths from 8 to 256, up to 1,300 keys and 1 and 2 threads: a product's row has the same bits
    for every number of rows from 16 on, and from 400 multiplications a column on (below each, other kernels are
    taken); a sum over keys has the same bits with zeros behind it, up to 256 keys; and so has a softmax, if its width
    is a multiple of 16, the vector's.
    """
    queries, heads, head_dim = q.shape
    kv_heads, kv_len = k.shape[0], k.shape[1]
    q = q.view(queries, kv_heads, heads // kv_heads, head_dim).transpose(0, 1) * head_dim**-0.5
    least_rows = max(_VECTOR, -(-400 // head_dim))
    blocks = []
    for first in range(0, queries, _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, queries)
        seen = kv_len - queries + last  # the keys that the block's last query sees
        rows = q[:, first:last].flatten(1, 2)  # [kv_heads, rows, head_dim], rows = queries * group
        count = rows.shape[1]
        rows = F.pad(rows, (0, 0, 0, max(least_rows - count, 0)))
        scores = F.pad(torch.matmul(rows, k[:, :seen].transpose(1, 2)), (0, -seen % _VECTOR), value=-torch.inf)
        if mask is not None:
            by_query = scores[:, :count, :seen].unflatten(1, (last - first, -1))
            by_query += mask[first:last, :seen].unsqueeze(1)  # [kv_heads, queries, group, seen]
        weights = scores.softmax(dim=-1)
        out = torch.matmul(weights[..., : min(seen, _KEY_BLOCK)], v[:, : min(seen, _KEY_BLOCK)])
        for start in range(_KEY_BLOCK, seen, _KEY_BLOCK):
            end = min(start + _KEY_BLOCK, seen)
            out += torch.matmul(weights[..., start:end], v[:, start:end])
        blocks.append(out[:, :count].unflatten(1, (last - first, -1)))  # [kv_heads, queries, group, head_dim]
    return torch.cat(blocks, dim=1).transpose(0, 1).reshape(queries, heads, head_dim)


def _causal_mask(queries: int, kv_len: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where the last `queries` of kv_len positions may look, -inf in what lies after them: [queries, kv_len]."""
    mask = torch.full((queries, kv_len), -torch.inf, dtype=dtype, device="cpu")
    return mask.triu_(kv_len - queries + 1)
