"""The best logits of a row without sorting it: its best token, and the k-th largest among few.

Runs on the engine's CUDA stream; owns nothing. Invariant: what a row is found to have depends on its own logits alone.

Logits are compared as integers in the same order (`_order`), so that the k-th largest is found by counting: three
candidates a pass, a quarter of the range is left. For a small k it is looked for among few tokens: `find_best` leaves
the largest logit of each group of tokens that are equal modulo LANES. The k-th largest of these is at most the k-th
largest token, so the k largest are in groups whose largest reaches it. Into how many parts a row is divided to find
them depends on the number of rows; groups do not, so neither does anything that is found.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["find_best", "kth_largest", "largest_of_groups", "leave_best"]


@triton.jit(do_not_specialize=["parts"])
def find_best(
    logits,
    top_ks,
    best_values,
    best_tokens,
    finite,
    maxima,
    row_count,
    vocab,
    parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of each part of a row, and whether all logits there are finite; grid (parts, rows).

    A part is every parts-th block of BLOCK tokens; best_values, best_tokens and finite are [rows, parts]. Rows with
    top-k get the largest logit of each of a part's lanes, too: maxima is [rows, parts * BLOCK], see
    `largest_of_groups`. Rows from `row_count[0]` on are left out.
    """
    part = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row >= tl.load(row_count):
        return
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for first in range(part * BLOCK, vocab, parts * BLOCK):
        token = first + lane
        inside = token < vocab
        value = tl.load(logits + row.to(tl.int64) * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
        better = value > highest
        where = tl.where(better, token, where)
        highest = tl.where(better, value, highest)
        broken = tl.where(inside & ((value - value) != 0.0), 1, broken)  # infinite, or not a number
    at = row * parts + part
    leave_best(highest, where, at, tl.load(top_ks + row), best_values, best_tokens, maxima, vocab, BLOCK)
    tl.store(finite + at, 1 - tl.max(broken))


@triton.jit
def leave_best(highest, where, at, top_k, best_values, best_tokens, maxima, vocab, BLOCK: tl.constexpr):
    """Store what `find_best` says of part `at`, from each lane's largest logit and its token."""
    best = tl.max(highest)
    tl.store(best_values + at, best)
    tl.store(best_tokens + at, tl.min(tl.where(highest == best, where, vocab - 1)))
    if top_k > 0:
        tl.store(maxima + at * BLOCK + tl.arange(0, BLOCK), highest.to(maxima.dtype.element_ty))


@triton.jit
def largest_of_groups(maxima, row, parts, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The largest logit of each group, [LANES]: parts * BLOCK / LANES parts have tokens of it."""
    first = maxima + row * parts * BLOCK + tl.arange(0, LANES)
    largest = tl.load(first)
    for piece in range(1, parts * BLOCK // LANES):
        largest = tl.maximum(largest, tl.load(first + piece * LANES)).to(largest.dtype)
    return largest


@triton.jit
def _order(value):
    """Map floats of 16 or 32 bits to integers in the same order."""
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        place = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    else:
        bits = value.to(tl.int32, bitcast=True)
        place = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return place


@triton.jit
def kth_largest(row_logits, values, vocab, k, best, FEW: tl.constexpr, LANES: tl.constexpr):
    """The k-th largest of `values` [LANES] (FEW), or of the row, in float32; `best` is the largest."""
    dtype: tl.constexpr = row_logits.dtype.element_ty
    low = tl.full([], -0x8000 if dtype.primitive_bitwidth == 16 else -0x80000000, tl.int64)  # k tokens reach this
    high = _order(best.to(dtype)).to(tl.int64) + 1  # and not this
    while high - low > 1:
        step = (high - low + 3) // 4
        first_place = (low + step).to(tl.int32)
        second_place = tl.minimum(low + 2 * step, high).to(tl.int32)
        third_place = tl.minimum(low + 3 * step, high).to(tl.int32)
        if FEW:
            places = _order(values)
            firsts = (places >= first_place).to(tl.int32)
            seconds = (places >= second_place).to(tl.int32)
            thirds = (places >= third_place).to(tl.int32)
        else:
            firsts = tl.zeros([LANES], tl.int32)
            seconds = tl.zeros([LANES], tl.int32)
            thirds = tl.zeros([LANES], tl.int32)
            for first in range(0, vocab, LANES):
                token = first + tl.arange(0, LANES)
                places = _order(tl.load(row_logits + token, mask=token < vocab, other=float("-inf")))
                firsts += (places >= first_place).to(tl.int32)
                seconds += (places >= second_place).to(tl.int32)
                thirds += (places >= third_place).to(tl.int32)
        # One sum instead of three: a count is less than 2 ** 21.
        counts = tl.sum(firsts.to(tl.int64) + (seconds.to(tl.int64) << 21) + (thirds.to(tl.int64) << 42))
        quarters = ((counts & 0x1FFFFF) >= k).to(tl.int64)
        quarters += (((counts >> 21) & 0x1FFFFF) >= k).to(tl.int64)
        quarters += ((counts >> 42) >= k).to(tl.int64)
        high = tl.minimum(high, low + (quarters + 1) * step)
        low = low + quarters * step
    place = low.to(tl.int32)
    if dtype.primitive_bitwidth == 16:
        bits = tl.where(place < 0, place ^ 0x7FFF, place).to(tl.int16)
    else:
        bits = tl.where(place < 0, place ^ 0x7FFFFFFF, place)
    return bits.to(dtype, bitcast=True).to(tl.float32)
