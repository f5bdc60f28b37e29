"""RMSNorm of the residual stream, with what the product before it added.

Runs on the engine's CUDA stream; owns nothing. Invariant: what is added is summed in a fixed order, so that a
product whose inputs were split gives the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["add_rms_norm"]


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm(
    residual,
    parts,
    weight,
    out,
    places,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual[row] += parts[0, row] + ... + parts[PARTS - 1, row]; out[row] = RMSNorm(residual[row]) * weight.

    With GATHER out's row r is that of residual[places[r]], and the residual stays as it is: nobody reads it again.
    residual float32 [rows, WIDTH]; parts [PARTS, rows, WIDTH]; grid (rows of out).
    """
    to = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = to
    if GATHER:
        row = tl.load(places + to)
    start = row.to(tl.int64) * WIDTH
    value = tl.load(residual + start + column, mask=inside, other=0.0)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + part * rows.to(tl.int64) * WIDTH + start + column, mask=inside, other=0.0).to(
            tl.float32
        )
    if PARTS > 0 and not GATHER:
        tl.store(residual + start + column, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    result = (value * scale * gain).to(out.dtype.element_ty)
    tl.store(out + to.to(tl.int64) * WIDTH + column, result, mask=inside)
