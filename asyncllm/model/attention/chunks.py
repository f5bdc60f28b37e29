"""Rows of several tokens, prompts' chunks, by torch's fused attention on the CPU.

Runs on the device's thread; owns nothing. Invariant: a chunk is attended to alone, so that rows of different lengths
cost no padding.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from asyncllm.model.attention.page_memory import Piece

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows
    from asyncllm.model.attention.page_memory import PageMemory

__all__ = ["Chunk", "attend_chunk", "plan_chunks"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A row of several tokens."""

    first: int  # of its queries
    last: int
    piece: Piece
    mask: torch.Tensor | None  # [queries, kv_len], added to scores; None: the row starts with its first query


def plan_chunks(rows: AttentionRows, dtype: torch.dtype) -> list[Chunk]:
    """Find out where the keys of a step's rows of several tokens are."""
    table, first = rows.page_table.numpy(), rows.one_token_rows
    chunks = []
    for row in range(first, len(rows.kv_lens)):
        queries, kv_len = int(rows.query_lens[row]), int(rows.kv_lens[row])
        piece = Piece.of(table[row, : -(-kv_len // rows.page_size)], kv_len)
        mask = None if queries == kv_len else _causal_mask(queries, kv_len, dtype)
        chunks.append(Chunk(first=first, last=first + queries, piece=piece, mask=mask))
        first += queries
    return chunks


def attend_chunk(
    chunk: Chunk, memory: PageMemory, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend with a chunk's queries, of all [tokens, num_heads, head_dim]: [chunk's tokens, num_heads, head_dim]."""
    k, v = memory.read(keys, values, chunk.piece)
    q = queries[chunk.first : chunk.last].transpose(0, 1).unsqueeze(0)  # [1, heads, queries, head_dim]
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _causal_mask(queries: int, kv_len: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where the last `queries` of kv_len positions may look, -inf after that: [queries, kv_len]."""
    mask = torch.full((queries, kv_len), -torch.inf, dtype=dtype, device="cpu")
    return mask.triu_(kv_len - queries + 1)
