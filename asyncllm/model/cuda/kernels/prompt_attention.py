"""Causal attention of rows of any number of tokens over their pages (as FlashAttention, Dao et al. 2022).

Runs on the engine's CUDA stream; owns nothing. Invariant: a token's keys are taken in tiles of fixed positions,
counted from position 0, so that its result has the same bits in whichever chunk, and beside whichever rows, it was
computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["prompt_attention"]


@triton.jit
def _attend_to_tile(
    q,
    q_position,
    keys,
    values,
    row_table,
    first,
    end,
    kv_head,
    highest,
    total,
    acc,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys from position `first` on into the running softmax."""
    key = first + tl.arange(0, TILE)
    column = tl.arange(0, HEAD_DIM)
    stored = key < end
    if PAGE % TILE == 0:  # one page holds the tile
        page = tl.load(row_table + first // PAGE).to(tl.int64)
    elif MASKED:
        page = tl.load(row_table + key // PAGE, mask=stored, other=0).to(tl.int64)
    else:
        page = tl.load(row_table + key // PAGE).to(tl.int64)
    cell = ((page * PAGE + key % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
    if MASKED:
        k = tl.load(keys + cell[:, None] + column[None, :], mask=stored[:, None], other=0.0)
        v = tl.load(values + cell[:, None] + column[None, :], mask=stored[:, None], other=0.0)
    else:
        k = tl.load(keys + cell[:, None] + column[None, :])
        v = tl.load(values + cell[:, None] + column[None, :])
    scores = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        scores = tl.where(key[None, :] <= q_position[:, None], scores, -1e30)
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return new_highest, total, acc


@triton.jit
def prompt_attention(
    queries,
    slots,
    kv_lens,
    query_starts,
    tile_rows,
    tile_firsts,
    tile_count,
    table,
    columns,
    keys,
    values,
    out,
    scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """out[token] = attention of the tokens of `tile_count[0]` tiles; grid (tiles, KV_HEADS).

    A tile is BLOCK / GROUP tokens of row `tile_rows[tile]`, from the row's token `tile_firsts[tile]` on, with all
    query heads of one kv head (GROUP of them, rounded up to a power of two), so that keys are read once for them.
    queries and out [tokens, Q_HEADS, HEAD_DIM]; a row's tokens start at query_starts[row] and are its last ones of
    kv_lens[row]; their keys and values are in the pages. scale: softmax scale times log2(e).
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    HEADS: tl.constexpr = Q_HEADS // KV_HEADS
    row = tl.load(tile_rows + tile)
    first_query = tl.load(tile_firsts + tile)
    query_start = tl.load(query_starts + row)
    query_count = tl.load(query_starts + row + 1) - query_start
    context = tl.load(kv_lens + row) - query_count  # positions before the row's first token
    row_table = table + tl.load(slots + row) * columns
    member = tl.arange(0, BLOCK)
    query = first_query + member // GROUP
    head = member % GROUP
    valid = (query < query_count) & (head < HEADS)
    column = tl.arange(0, HEAD_DIM)
    place = ((query_start + query).to(tl.int64) * Q_HEADS + kv_head * HEADS + head) * HEAD_DIM
    q = tl.load(queries + place[:, None] + column[None, :], mask=valid[:, None], other=0.0)
    q_position = context + query
    end = context + tl.minimum(first_query + BLOCK // GROUP, query_count)
    seen_by_all = (context + first_query + 1) // TILE * TILE
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for first in range(0, seen_by_all, TILE):
        highest, total, acc = _attend_to_tile(
            q, q_position, keys, values, row_table, first, end, kv_head, highest, total, acc, scale,
            KV_HEADS, HEAD_DIM, PAGE, TILE, False,
        )  # fmt: skip
    for first in range(seen_by_all, end, TILE):
        highest, total, acc = _attend_to_tile(
            q, q_position, keys, values, row_table, first, end, kv_head, highest, total, acc, scale,
            KV_HEADS, HEAD_DIM, PAGE, TILE, True,
        )  # fmt: skip
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] + column[None, :], result, mask=valid[:, None])
