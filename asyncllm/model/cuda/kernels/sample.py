"""The choice of each row's token, without sorting: one uniform number falls in a sum, and top-p asks of what it hit.

Runs on the engine's CUDA stream; owns nothing. Invariant: a row's token depends on its own logits, settings, seed and
position only. What is kept is what `asyncllm.model.sampler` says.

Logits are compared as integers in the same order (`_order`), so that the k-th largest is found by counting: three
candidates a pass, a quarter of the range is left. For a small k it is looked for among few tokens: `find_best` leaves
the largest logit of each group of tokens that are equal modulo LANES. The k-th largest of these is at most the k-th
largest token, so all that top-k keeps is in groups whose largest reaches it. Into how many parts a row is divided for
that depends on the number of rows; groups do not, so neither does what is drawn.

Top-p needs no threshold. A token drawn from all that may be kept is right if the better ones together weigh less than
top-p asks for. If not, the next is drawn from the better ones alone: each is drawn as likely as its weight says, and
of those that top-p keeps none is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["choose_tokens", "find_best", "kth_largest", "largest_of_groups"]


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
    best = tl.max(highest)
    at = row * parts + part
    tl.store(best_values + at, best)
    tl.store(best_tokens + at, tl.min(tl.where(highest == best, where, vocab - 1)))
    tl.store(finite + at, 1 - tl.max(broken))
    if tl.load(top_ks + row) > 0:
        tl.store(maxima + at * BLOCK + lane, highest.to(maxima.dtype.element_ty))


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


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position, attempt):
    """Hash to a number in [0, 1), as `asyncllm.model.sampler.uniforms` does."""
    golden = 0x9E3779B97F4A7C15
    state = _mix(seed.to(tl.uint64) + golden)
    state = _mix(state + golden * position.to(tl.uint64))
    if attempt > 0:
        state = _mix(state + golden * attempt.to(tl.uint64))
    return (state >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit
def _lane_weights(
    row_logits, values, vocab, best, rate, bound, ABOVE: tl.constexpr, FEW: tl.constexpr, LANES: tl.constexpr
):
    """Weights relative to the best token's of `values` (FEW), or of the row, summed over its stretches: [LANES].

    Of logits of at least `bound`, or (ABOVE) of those above it.
    """
    lanes = tl.zeros([LANES], tl.float32)
    if FEW:
        value = values.to(tl.float32)
        kept = value > bound if ABOVE else value >= bound
        lanes = tl.where(kept, tl.exp2((value - best) * rate), 0.0)
    else:
        for first in range(0, vocab, LANES):
            token = first + tl.arange(0, LANES)
            value = tl.load(row_logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            kept = value > bound if ABOVE else value >= bound
            lanes += tl.where(kept, tl.exp2((value - best) * rate), 0.0)
    return lanes


@triton.jit
def _draw(
    row_logits,
    values,
    vocab,
    best,
    rate,
    least,
    top_p,
    min_p,
    seed,
    position,
    FEW: tl.constexpr,
    LANES: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    """The place of a token in `values` (FEW) or in the row, drawn from logits of at least `least`, top-p and min-p."""
    number = tl.arange(0, LANES)
    lanes = _lane_weights(row_logits, values, vocab, best, rate, least, False, FEW, LANES)
    wanted = tl.maximum(top_p * tl.sum(lanes), 1e-30)
    if min_p > 0.0:  # of what top-p keeps; until here it counts
        least = tl.maximum(least, tl.minimum(best + tl.log2(min_p) / rate, best))
        lanes = _lane_weights(row_logits, values, vocab, best, rate, least, False, FEW, LANES)
    above = float("-inf")
    place = 0
    attempt = tl.full([], 0, tl.int32)
    searching = True
    while searching:
        target = _uniform(seed, position, attempt) * tl.sum(lanes)
        last = tl.max(tl.where(lanes > 0.0, number, 0))
        # Sums in another order differ by rounding: only lanes that weigh something may be hit.
        lane = tl.min(tl.where((lanes > 0.0) & (tl.cumsum(lanes, 0) > target), number, last))
        if FEW:
            place = lane
            hit = tl.max(tl.where(number == lane, values.to(tl.float32), float("-inf")))
        else:
            target -= tl.sum(tl.where(number < lane, lanes, 0.0))
            stretch = tl.arange(0, STRETCHES)
            at = stretch * LANES + lane
            value = tl.load(row_logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            weight = tl.where((value >= least) & (value > above), tl.exp2((value - best) * rate), 0.0)
            last = tl.max(tl.where(weight > 0.0, stretch, 0))
            chosen = tl.min(tl.where((weight > 0.0) & (tl.cumsum(weight, 0) > target), stretch, last))
            place = chosen * LANES + lane
            hit = tl.max(tl.where(stretch == chosen, value, float("-inf")))
        searching = False
        if top_p < 1.0:
            above = hit
            attempt += 1
            lanes = _lane_weights(row_logits, values, vocab, best, rate, above, True, FEW, LANES)
            searching = tl.sum(lanes) >= wanted
    return place


@triton.jit(do_not_specialize=["rows", "parts"])
def choose_tokens(
    logits,
    best_values,
    best_tokens,
    finite,
    maxima,
    listed,
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
    places,
    counts_at,
    counts,
    parts,
    MOST_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STRETCHES: tl.constexpr,
    ASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each row's token and whether its logits were finite, to results [2, rows] and the token pool; grid (rows).

    Temperature 0 is greedy; top_ps 1, top_ks 0 and min_ps 0 are off. `positions` are those of the tokens drawn.
    STRETCHES: vocab / LANES, rounded up to a power of two: the most tokens of a group; listed is [rows, LANES /
    STRETCHES], for groups.

    With ASKED, row i is row `places[i]` of the results, which are told whether any token was left instead, and the
    token is counted in row `counts_at[i]` of counts [any, vocab], unless that is negative.
    """
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row >= tl.load(row_count):
        return
    number = tl.arange(0, LANES)
    room: tl.constexpr = LANES // STRETCHES
    part = tl.arange(0, MOST_PARTS)
    is_part = part < parts
    part += row * parts
    part_best = tl.load(best_values + part, mask=is_part, other=float("-inf"))
    best = tl.max(part_best)
    part_token = tl.load(best_tokens + part, mask=is_part, other=vocab - 1)
    token = tl.min(tl.where(part_best == best, part_token, vocab - 1))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        row_logits = logits + row.to(tl.int64) * vocab
        rate = 1.4426950408889634 / temperature
        top_p = tl.load(top_ps + row)
        top_k = tl.load(top_ks + row)
        min_p = tl.load(min_ps + row)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        few = 0  # groups that have all that top-k keeps
        if (top_k > 0) & (top_k <= room // 2):
            largest = largest_of_groups(maxima, row, parts, BLOCK, LANES)
            bound = kth_largest(row_logits, largest, vocab, top_k, best, True, LANES)
            reaches = (largest.to(tl.float32) >= bound) & (largest.to(tl.float32) > float("-inf"))
            few = tl.sum(reaches.to(tl.int32))
            if few <= room:
                tl.store(listed + row * room + tl.cumsum(reaches.to(tl.int32), 0) - 1, number, mask=reaches)
                tl.debug_barrier()
            else:
                few = 0
        if few > 0:
            listing = number // STRETCHES
            at = tl.load(listed + row * room + listing, mask=listing < few, other=0) + number % STRETCHES * LANES
            values = tl.load(row_logits + at, mask=(listing < few) & (at < vocab), other=float("-inf"))
            least = kth_largest(row_logits, values, vocab, top_k, best, True, LANES)
            place = _draw(
                row_logits, values, vocab, best, rate, least, top_p, min_p, seed, position, True, LANES, STRETCHES
            )
            token = tl.load(listed + row * room + place // STRETCHES) + place % STRETCHES * LANES
        else:
            least = float("-inf")
            if (top_k > 0) & (top_k < vocab):
                least = kth_largest(row_logits, number, vocab, top_k, best, False, LANES)
            token = _draw(
                row_logits, number, vocab, best, rate, least, top_p, min_p, seed, position, False, LANES, STRETCHES
            )
        token = tl.minimum(token, vocab - 1)  # logits that are not finite: any token
    tl.store(token_pool + tl.load(slots + row), token)
    if ASKED:
        at = tl.load(places + row)
        tl.store(results + at, token)
        if best == float("-inf"):
            tl.store(results + rows + at, 0)
        counted = tl.load(counts_at + row)
        if counted >= 0:
            cell = counts + counted.to(tl.int64) * vocab + token
            count = tl.load(cell)
            tl.store(cell, count + ((count & 0x7FFF) < 0x7FFF).to(tl.int16))
    else:
        tl.store(results + row, token)
        tl.store(results + rows + row, tl.min(tl.load(finite + part, mask=is_part, other=1)))
