"""What happens between the q/k/v product and attention: bias is in already; head norms, rope, and the KV store.

Runs on the engine's CUDA stream; owns nothing. Invariant: a token's key and value go to the cell that the page
table names for its slot and position, and nothing else of the pages is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["rope_and_store"]


@triton.jit
def rope_and_store(
    qkv,
    head_norm,
    cos_sin,
    positions,
    slots,
    table,
    columns,
    queries,
    keys,
    values,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries to `queries`, keys and values to their cells; BLOCK heads of one kind a program.

    qkv [tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM]; head_norm [2, HEAD_DIM] of queries and keys if NORM; cos_sin float32
    [positions, HEAD_DIM], cosines then sines; queries [tokens, Q_HEADS, HEAD_DIM]; keys and values
    [pages, PAGE, KV_HEADS, HEAD_DIM]. Grid (tokens, heads / BLOCK).
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    head = first + tl.arange(0, BLOCK)[:, None]
    HALF: tl.constexpr = HEAD_DIM // 2
    low = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token)
    page = tl.load(table + tl.load(slots + token) * columns + position // PAGE).to(tl.int64)
    cell = (page * PAGE + position % PAGE) * KV_HEADS * HEAD_DIM
    cos = tl.load(cos_sin + position * HEAD_DIM + low)
    sin = tl.load(cos_sin + position * HEAD_DIM + HALF + low)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = qkv + token * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM + head * HEAD_DIM + low
    left = tl.load(source)
    right = tl.load(source + HALF)
    if first >= Q_HEADS + KV_HEADS:
        target = values + cell + (head - Q_HEADS - KV_HEADS) * HEAD_DIM + low
        tl.store(target, left)
        tl.store(target + HALF, right)
    else:
        a = left.to(tl.float32)
        b = right.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
            gain = head_norm + tl.where(first < Q_HEADS, 0, HEAD_DIM) + low
            a = a * scale * tl.load(gain).to(tl.float32)
            b = b * scale * tl.load(gain + HALF).to(tl.float32)
        turned_a = (a * cos - b * sin).to(left.dtype)
        turned_b = (b * cos + a * sin).to(left.dtype)
        if first < Q_HEADS:
            target = queries + token * Q_HEADS * HEAD_DIM + head * HEAD_DIM + low
        else:
            target = keys + cell + (head - Q_HEADS) * HEAD_DIM + low
        tl.store(target, turned_a)
        tl.store(target + HALF, turned_b)
