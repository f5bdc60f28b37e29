"""Products with weights for few rows, where reading the weights is all that takes time.

Run on the engine's CUDA stream; own nothing. Invariant: an element of the result is summed in an order that depends
on the tile sizes and the number of splits only, never on other rows or on which program ends first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["one_row_product", "tiled_product"]


@triton.jit
def one_row_product(
    x,
    weight,
    bias,
    norm,
    out,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row x [INPUTS] times weight [outputs, INPUTS]; ROWS of weight a program, TILE columns at a time.

    NORM: x is the float32 residual, RMS-normed here with `norm`. GATE: weight is [2 * outputs, INPUTS] and the
    result silu(gate) * up. ADD: the result is added to out, the float32 residual; else out is written in its own
    dtype. Up to four tiles of weights are read before the wait for the kernel before.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    TILES: tl.constexpr = INPUTS // TILE
    w_at = weight + row[:, None].to(tl.int64) * INPUTS + column[None, :]
    w0 = tl.load(w_at)
    if GATE:
        u_at = w_at + outputs.to(tl.int64) * INPUTS
        u0 = tl.load(u_at)
    if TILES > 1:
        w1 = tl.load(w_at + TILE)
        if GATE:
            u1 = tl.load(u_at + TILE)
    if TILES > 2:
        w2 = tl.load(w_at + 2 * TILE)
        if GATE:
            u2 = tl.load(u_at + 2 * TILE)
    if TILES > 3:
        w3 = tl.load(w_at + 3 * TILE)
        if GATE:
            u3 = tl.load(u_at + 3 * TILE)
    if NORM:
        gain0 = tl.load(norm + column).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    squares = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([ROWS, TILE], tl.float32)
    up = tl.zeros([ROWS, TILE], tl.float32)
    for tile in tl.static_range(TILES):
        value = tl.load(x + tile * TILE + column).to(tl.float32)
        if NORM:
            squares += value * value
            if tile == 0:
                value = value * gain0
            else:
                value = value * tl.load(norm + tile * TILE + column).to(tl.float32)
        if tile == 0:
            w = w0
        elif tile == 1:
            w = w1
        elif tile == 2:
            w = w2
        elif tile == 3:
            w = w3
        else:
            w = tl.load(w_at + tile * TILE)
        acc += w.to(tl.float32) * value[None, :]
        if GATE:
            if tile == 0:
                u = u0
            elif tile == 1:
                u = u1
            elif tile == 2:
                u = u2
            elif tile == 3:
                u = u3
            else:
                u = tl.load(u_at + tile * TILE)
            up += u.to(tl.float32) * value[None, :]
    result = tl.sum(acc, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / INPUTS + eps)
        result = result * scale
    if BIAS:
        result += tl.load(bias + row).to(tl.float32)
    if GATE:
        other = tl.sum(up, 1)
        if NORM:
            other = other * scale
        if BIAS:
            other += tl.load(bias + outputs + row).to(tl.float32)
        result = result * tl.sigmoid(result) * other
    if ADD:
        result += tl.load(out + row)
    tl.store(out + row, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def tiled_product(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """X [rows, INPUTS] times weight [outputs, INPUTS]; grid (outputs / WIDTH, SPLITS, rows / BLOCK).

    out is [SPLITS, rows, outputs]: part s sums columns [s, s + 1) * INPUTS / SPLITS, for whoever reads it to add
    (in this order); part 0 holds the bias. GATE: weight is [2 * outputs, INPUTS] and the result silu(gate) * up.
    CUT: outputs is no multiple of WIDTH.
    """
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    within = column < outputs
    wanted = column
    if CUT:
        wanted = tl.where(within, column, 0)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, TILE)
    SHARE: tl.constexpr = INPUTS // SPLITS
    w_at = weight + wanted[:, None].to(tl.int64) * INPUTS + split * SHARE + inner[None, :]
    u_at = w_at + outputs.to(tl.int64) * INPUTS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inside = row[:, None] < rows
    x_at = x + row[:, None].to(tl.int64) * INPUTS + split * SHARE + inner[None, :]
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    up = tl.zeros([BLOCK, WIDTH], tl.float32)
    for tile in range(SHARE // TILE):
        w = tl.load(w_at + tile * TILE)
        value = tl.load(x_at + tile * TILE, mask=inside, other=0.0)
        acc = tl.dot(value, tl.trans(w), acc)
        if GATE:
            u = tl.load(u_at + tile * TILE)
            up = tl.dot(value, tl.trans(u), up)
    if BIAS:
        if split == 0:
            acc += tl.load(bias + wanted).to(tl.float32)[None, :]
            if GATE:
                up += tl.load(bias + outputs + wanted).to(tl.float32)[None, :]
    if GATE:
        acc = acc * tl.sigmoid(acc) * up
    target = out + (split * rows.to(tl.int64) + row[:, None]) * outputs + column[None, :]
    kept = inside
    if CUT:
        kept = inside & within[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=kept)
