"""Attention of rows of one token over their pages, split over the keys (as Flash-Decoding, Dao et al. 2023).

Runs on the engine's CUDA stream; owns nothing. Invariant: a row's result depends on its own keys and on the number
of splits only: the split that ends last combines all of them, in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["decode_attention"]


@triton.jit
def _attend_to_tile(q_low, q_high, k_low, k_high, v, seen, highest, total, acc, scale):
    """Take one tile of keys into the running softmax; scale includes log2(e)."""
    scores = (tl.dot(q_low, tl.trans(k_low)) + tl.dot(q_high, tl.trans(k_high))) * scale
    scores = tl.where(seen[None, :], scores, -1e30)
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.where(seen[None, :], tl.exp2(scores - new_highest[:, None]), 0.0)
    shrink = tl.exp2(highest - new_highest)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return new_highest, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def _rotate(low, high, norm_low, norm_high, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Norm (if NORM) and turn heads [heads, HEAD_DIM / 2] twice; float32."""
    if NORM:
        inverse = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        low = low * inverse * norm_low
        high = high * inverse * norm_high
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def decode_attention(
    source,
    head_norm,
    cos_sin,
    slots,
    kv_lens,
    row_count,
    table,
    columns,
    keys,
    values,
    part_values,
    part_highest,
    part_totals,
    arrived,
    out,
    eps,
    scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    FUSED: tl.constexpr,
    NORM: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row] = attention of its one token; grid (KV_HEADS, SPLITS, rows).

    FUSED: `source` is the q/k/v product [rows, Q_HEADS + 2 * KV_HEADS, HEAD_DIM]; head norms (if NORM), rope and the
    store of the new key and value happen here. Else `source` is [rows, Q_HEADS, HEAD_DIM], ready, and the new key and
    value are in their pages. `kv_lens` counts the new token. With COUNTED, rows from `row_count[0]` on are left out.
    A row's keys are split into SPLITS parts, or fewer so that each has at least LEAST keys (if not 0). GROUP: query
    heads of a kv head, rounded up to a power of two. scale: softmax scale times log2(e). part_* have room for SPLITS
    parts of each (row, kv head); `arrived` is zero before and after.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    if COUNTED:
        if row >= tl.load(row_count):
            return
    HEADS: tl.constexpr = Q_HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    length = tl.load(kv_lens + row)
    stored = length - 1 if FUSED else length  # keys that are in the pages
    if SPLITS == 1 or LEAST == 0:
        parts: tl.constexpr = SPLITS
    else:
        parts = tl.maximum(1, tl.minimum(SPLITS, stored // LEAST))
        if split >= parts:
            return
    row_table = table + tl.load(slots + row) * columns
    chunk = tl.cdiv(tl.cdiv(stored, parts), TILE) * TILE
    start = split * chunk
    end = tl.minimum(stored, start + chunk)
    group = tl.arange(0, 16)  # the least that a tensor core takes
    in_group = group < HEADS
    low = tl.arange(0, HALF)
    column = tl.arange(0, HEAD_DIM)
    # The first tile needs nothing of the kernel before: it was in the pages before this step.
    key = start + tl.arange(0, TILE)
    seen = key < end
    page = tl.load(row_table + key // PAGE, mask=seen, other=0).to(tl.int64)
    cell = ((page * PAGE + key % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
    k_low = tl.load(keys + cell[:, None] + low[None, :], mask=seen[:, None], other=0.0)
    k_high = tl.load(keys + cell[:, None] + HALF + low[None, :], mask=seen[:, None], other=0.0)
    v = tl.load(values + cell[:, None] + column[None, :], mask=seen[:, None], other=0.0)
    if FUSED:
        cos = tl.load(cos_sin + (length - 1) * HEAD_DIM + low)[None, :]
        sin = tl.load(cos_sin + (length - 1) * HEAD_DIM + HALF + low)[None, :]
        q_norm_low = tl.zeros([1, HALF], tl.float32)
        q_norm_high = q_norm_low
        k_norm_low = q_norm_low
        k_norm_high = q_norm_low
        if NORM:
            q_norm_low = tl.load(head_norm + low).to(tl.float32)[None, :]
            q_norm_high = tl.load(head_norm + HALF + low).to(tl.float32)[None, :]
            k_norm_low = tl.load(head_norm + HEAD_DIM + low).to(tl.float32)[None, :]
            k_norm_high = tl.load(head_norm + HEAD_DIM + HALF + low).to(tl.float32)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WIDTH: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM if FUSED else Q_HEADS * HEAD_DIM
    query = source + row.to(tl.int64) * WIDTH + (kv_head * HEADS + group)[:, None] * HEAD_DIM + low[None, :]
    q_low = tl.load(query, mask=in_group[:, None], other=0.0)
    q_high = tl.load(query + HALF, mask=in_group[:, None], other=0.0)
    if FUSED:
        turned_low, turned_high = _rotate(
            q_low.to(tl.float32), q_high.to(tl.float32), q_norm_low, q_norm_high, cos, sin, eps, HEAD_DIM, NORM
        )
        q_low = turned_low.to(q_low.dtype)
        q_high = turned_high.to(q_high.dtype)
    highest = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, HEAD_DIM], tl.float32)
    highest, total, acc = _attend_to_tile(q_low, q_high, k_low, k_high, v, seen, highest, total, acc, scale)
    for first in range(start + TILE, end, TILE):
        key = first + tl.arange(0, TILE)
        seen = key < end
        page = tl.load(row_table + key // PAGE, mask=seen, other=0).to(tl.int64)
        cell = ((page * PAGE + key % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
        k_low = tl.load(keys + cell[:, None] + low[None, :], mask=seen[:, None], other=0.0)
        k_high = tl.load(keys + cell[:, None] + HALF + low[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(values + cell[:, None] + column[None, :], mask=seen[:, None], other=0.0)
        highest, total, acc = _attend_to_tile(q_low, q_high, k_low, k_high, v, seen, highest, total, acc, scale)
    if FUSED:
        if split == parts - 1:  # it takes the new token too
            new = source + row.to(tl.int64) * WIDTH + (Q_HEADS + kv_head) * HEAD_DIM
            raw_low = tl.load(new + low)[None, :]
            raw_high = tl.load(new + HALF + low)[None, :]
            new_v = tl.load(new + KV_HEADS * HEAD_DIM + column)
            key_low, key_high = _rotate(
                raw_low.to(tl.float32), raw_high.to(tl.float32), k_norm_low, k_norm_high, cos, sin, eps, HEAD_DIM, NORM
            )
            new_low = key_low.to(raw_low.dtype)
            new_high = key_high.to(raw_high.dtype)
            new_page = tl.load(row_table + (length - 1) // PAGE).to(tl.int64)
            new_cell = ((new_page * PAGE + (length - 1) % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
            tl.store(keys + new_cell + low[None, :], new_low)
            tl.store(keys + new_cell + HALF + low[None, :], new_high)
            tl.store(values + new_cell + column, new_v)
            score = tl.sum(q_low.to(tl.float32) * new_low.to(tl.float32), 1)
            score = (score + tl.sum(q_high.to(tl.float32) * new_high.to(tl.float32), 1)) * scale
            new_highest = tl.maximum(highest, score)
            shrink = tl.exp2(highest - new_highest)
            weight = tl.exp2(score - new_highest)
            acc = acc * shrink[:, None] + weight[:, None] * new_v.to(tl.float32)[None, :]
            total = total * shrink + weight
            highest = new_highest
    target = out + (row.to(tl.int64) * Q_HEADS + kv_head * HEADS) * HEAD_DIM
    if parts == 1:
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(target + group[:, None] * HEAD_DIM + column[None, :], result, mask=in_group[:, None])
    else:
        pair = row * KV_HEADS + kv_head
        part = (pair * SPLITS + split) * GROUP + group
        kept = group < GROUP
        tl.store(part_values + part[:, None] * HEAD_DIM + column[None, :], acc, mask=kept[:, None])
        tl.store(part_highest + part, highest, mask=kept)
        tl.store(part_totals + part, total, mask=kept)
        tl.debug_barrier()  # all of the program's stores are done before it says so
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu") == parts - 1:
            ALL: tl.constexpr = SPLITS * GROUP
            there = tl.arange(0, ALL) < parts * GROUP
            each = pair * ALL + tl.arange(0, ALL)
            # past the first-level cache: other multiprocessors wrote these
            all_highest = tl.load(part_highest + each, mask=there, other=-1e30, cache_modifier=".cg")
            all_highest = all_highest.reshape(SPLITS, GROUP)
            all_totals = tl.load(part_totals + each, mask=there, other=0.0, cache_modifier=".cg").reshape(SPLITS, GROUP)
            all_values = tl.load(
                part_values + each[:, None] * HEAD_DIM + column[None, :],
                mask=there[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            all_values = all_values.reshape(SPLITS, GROUP, HEAD_DIM)
            share = tl.exp2(all_highest - tl.max(all_highest, 0)[None, :])
            whole = tl.sum(all_values * share[:, :, None], 0) / tl.sum(share * all_totals, 0)[:, None]
            member = tl.arange(0, GROUP)
            tl.store(
                target + member[:, None] * HEAD_DIM + column[None, :],
                whole.to(out.dtype.element_ty),
                mask=(member < HEADS)[:, None],
            )
            tl.store(arrived + pair, 0)
