"""The choice of each row's token, without sorting: thresholds are found by counting, the token by one uniform number.

Runs on the engine's CUDA stream; owns nothing. Invariant: a row's token depends on its own logits, settings and
uniform number only. The rules are those of `asyncllm.model.sampler`.

Logits of 16 bits are compared as integers in the same order (`_order`), so that a threshold is one of 65,536
values and a few passes over the row find it: three candidates a pass, a quarter of the range is left.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["choose_tokens", "find_best"]


@triton.jit
def find_best(
    logits,
    best_values,
    best_tokens,
    finite,
    row_count,
    vocab,
    share,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of each part of a row, and whether all logits there are finite; grid (PARTS, rows).

    A part is `share` tokens; best_values, best_tokens and finite are [rows, PARTS]. With COUNTED, rows from
    `row_count[0]` on are left out.
    """
    part = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if COUNTED:
        if row >= tl.load(row_count):
            return
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    start = part * share
    end = tl.minimum(start + share, vocab)
    for first in range(start, end, BLOCK):
        token = first + lane
        inside = token < end
        value = tl.load(logits + row.to(tl.int64) * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
        better = value > highest
        where = tl.where(better, token, where)
        highest = tl.where(better, value, highest)
        broken = tl.where(inside & ((value - value) != 0.0), 1, broken)  # infinite, or not a number
    best = tl.max(highest)
    at = row * PARTS + part
    tl.store(best_values + at, best)
    tl.store(best_tokens + at, tl.min(tl.where(highest == best, where, vocab - 1)))
    tl.store(finite + at, 1 - tl.max(broken))


@triton.jit
def _order(value):
    """Map 16-bit floats to integers in the same order."""
    bits = value.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@triton.jit
def _weights(row_logits, first, vocab, best, rate, LANES: tl.constexpr):
    """A stretch of the row: place in the order, weight relative to the best token, whether it is in the row."""
    token = first + tl.arange(0, LANES)
    inside = token < vocab
    value = tl.load(row_logits + token, mask=inside, other=float("-inf"))
    return _order(value), tl.exp2((value.to(tl.float32) - best) * rate), inside


@triton.jit
def _threshold(row_logits, vocab, best, rate, wanted, low, high, COUNT: tl.constexpr, LANES: tl.constexpr):
    """The largest place whose tokens, it and all above, count (COUNT) or weigh at least `wanted`.

    At `low` they do, at `high` they do not.
    """
    while high - low > 1:
        step = (high - low + 3) // 4
        first_sum = tl.zeros([LANES], tl.float32)
        second_sum = tl.zeros([LANES], tl.float32)
        third_sum = tl.zeros([LANES], tl.float32)
        for first in range(0, vocab, LANES):
            place, weight, inside = _weights(row_logits, first, vocab, best, rate, LANES)
            if COUNT:
                weight = tl.full([LANES], 1.0, tl.float32)
            weight = tl.where(inside, weight, 0.0)
            first_sum += tl.where(place >= low + step, weight, 0.0)
            second_sum += tl.where(place >= low + 2 * step, weight, 0.0)
            third_sum += tl.where(place >= low + 3 * step, weight, 0.0)
        enough_first = tl.sum(first_sum) >= wanted
        enough_second = tl.sum(second_sum) >= wanted
        enough_third = tl.sum(third_sum) >= wanted
        quarters = enough_first.to(tl.int32) + enough_second.to(tl.int32) + enough_third.to(tl.int32)
        high = tl.minimum(high, low + (quarters + 1) * step)
        low = low + quarters * step
    return low


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position):
    """Hash both to a number in [0, 1), as `asyncllm.model.sampler.uniforms` does."""
    golden = 0x9E3779B97F4A7C15
    state = _mix(seed.to(tl.uint64) + golden)
    state = _mix(state + golden * position.to(tl.uint64))
    return (state >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit(do_not_specialize=["rows"])
def choose_tokens(
    logits,
    best_values,
    best_tokens,
    finite,
    temperatures,
    top_ps,
    top_ks,
    min_ps,
    seeds,
    positions,
    slots,
    token_pool,
    results,
    row_count,
    rows,
    vocab,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    STRETCHES: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each row's token and whether its logits were finite, to results [2, rows] and the token pool; grid (rows).

    Temperature 0 is greedy; top_ps 1, top_ks 0 and min_ps 0 are off. `positions` are those of the tokens drawn.
    STRETCHES: vocab / LANES, rounded up to a power of two.
    """
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if COUNTED:
        if row >= tl.load(row_count):
            return
    part = row * PARTS + tl.arange(0, PARTS)
    part_best = tl.load(best_values + part)
    best = tl.max(part_best)
    token = tl.min(tl.where(part_best == best, tl.load(best_tokens + part), vocab - 1))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        row_logits = logits + row.to(tl.int64) * vocab
        rate = 1.4426950408889634 / temperature
        top_p = tl.load(top_ps + row)
        top_k = tl.load(top_ks + row)
        min_p = tl.load(min_ps + row)
        kept = -32768  # the least place in the order
        above = _order(best.to(logits.dtype.element_ty)) + 1
        if (top_k > 0) & (top_k < vocab):
            kept = _threshold(row_logits, vocab, best, rate, top_k.to(tl.float32), kept, above, True, LANES)
        lanes = _lane_weights(row_logits, vocab, best, rate, kept, min_p, LANES)
        if top_p < 1.0:
            if min_p > 0.0:  # of all that top-k left: min-p comes after
                lanes = _lane_weights(row_logits, vocab, best, rate, kept, 0.0, LANES)
            wanted = tl.maximum(top_p * tl.sum(lanes), 1e-30)
            kept = _threshold(row_logits, vocab, best, rate, wanted, kept, above, False, LANES)
            lanes = _lane_weights(row_logits, vocab, best, rate, kept, min_p, LANES)
        target = _uniform(tl.load(seeds + row), tl.load(positions + row)) * tl.sum(lanes)
        number = tl.arange(0, LANES)
        last = tl.max(tl.where(lanes > 0.0, number, 0))
        lane = tl.minimum(tl.sum((tl.cumsum(lanes, 0) <= target).to(tl.int32)), last)
        target -= tl.sum(tl.where(number < lane, lanes, 0.0))
        stretch = tl.arange(0, STRETCHES)
        at = stretch * LANES + lane
        inside = at < vocab
        value = tl.load(row_logits + at, mask=inside, other=float("-inf"))
        weight = tl.exp2((value.to(tl.float32) - best) * rate)
        weight = tl.where(inside & (_order(value) >= kept) & (weight >= min_p), weight, 0.0)
        last = tl.max(tl.where(weight > 0.0, stretch, 0))
        chosen = tl.minimum(tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32)), last)
        token = tl.minimum(chosen * LANES + lane, vocab - 1)  # logits that are not finite: any token
    tl.store(token_pool + tl.load(slots + row), token)
    tl.store(results + row, token)
    tl.store(results + rows + row, tl.min(tl.load(finite + part)))


@triton.jit
def _lane_weights(row_logits, vocab, best, rate, kept, min_p, LANES: tl.constexpr):
    """The weights of what is kept, summed over the row's stretches."""
    lanes = tl.zeros([LANES], tl.float32)
    for first in range(0, vocab, LANES):
        place, weight, inside = _weights(row_logits, first, vocab, best, rate, LANES)
        lanes += tl.where(inside & (place >= kept) & (weight >= min_p), weight, 0.0)
    return lanes
