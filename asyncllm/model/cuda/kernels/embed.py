"""The first kernels of a step: page-table writes, and the tokens' rows of the embedding.

Runs on the engine's CUDA stream; owns nothing. Invariant: cells of the page table and of the token pool that no
row of the step names are left alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["embed_tokens", "write_page_table"]


@triton.jit
def write_page_table(table, writes, count, columns, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Set table[slot, column] = page for `count[0]` of CAPACITY writes, which lie as slots, columns, pages.

    Grid (CAPACITY / BLOCK).
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < tl.load(count)
    slot = tl.load(writes + number, mask=valid, other=0)
    column = tl.load(writes + CAPACITY + number, mask=valid, other=0)
    page = tl.load(writes + 2 * CAPACITY + number, mask=valid, other=0)
    tl.store(table + slot * columns + column, page, mask=valid)


@triton.jit
def embed_tokens(embedding, token_ids, token_slots, token_pool, residual, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """residual[token] = embedding[id], in float32; an id below 0 stands for what its slot sampled last.

    Grid (tokens, blocks of HIDDEN).
    """
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + place)
    slot = tl.load(token_slots + place)
    token = tl.where(token < 0, tl.load(token_pool + slot), token)
    inside = column < HIDDEN
    value = tl.load(embedding + token.to(tl.int64) * HIDDEN + column, mask=inside, other=0.0)
    tl.store(residual + place.to(tl.int64) * HIDDEN + column, value.to(tl.float32), mask=inside)
