"""The choice of each row's token, without sorting: one uniform number falls in a sum, and top-p asks of what it hit.

Runs on the engine's CUDA stream; owns nothing. Invariant: a row's token depends on its own logits, settings, seed and
position only. What is kept is what `asyncllm.model.sampler` says.

Under a small k all that is kept is in few groups of tokens (`asyncllm.model.cuda.kernels.groups`), which are taken into
registers; else each pass goes through the row.

Top-p needs no threshold. A token drawn from all that may be kept is right if the better ones together weigh less than
top-p asks for. If not, the next is drawn from the better ones alone: each is drawn as likely as its weight says, and
of those that top-p keeps none is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.model.cuda.kernels.groups import kth_largest, largest_of_groups

__all__ = ["choose_tokens"]


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
