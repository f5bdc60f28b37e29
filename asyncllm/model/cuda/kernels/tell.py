"""What is told of a chosen token: its logprob and rank among the model's logits, and the likeliest tokens.

Runs on the engine's CUDA stream; owns nothing. The likeliest are looked for among few groups of tokens:
see `asyncllm.model.cuda.kernels.groups`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.model.cuda.kernels.groups import kth_largest, largest_of_groups

__all__ = ["score_parts", "tell_tokens"]


@triton.jit(do_not_specialize=["parts"])
def score_parts(
    logits,
    places,
    results,
    highest,
    totals,
    better,
    maxima,
    row_count,
    vocab,
    parts,
    BLOCK: tl.constexpr,
):
    """Of each part of row `places[i]`: its largest logit, the weights relative to it, how many exceed the chosen one's.

    Grid (parts, rows); highest, totals and better are [rows, parts]; for parts and maxima see `find_best`. The chosen
    token is in the results. Rows from `row_count[0]` on are left out.
    """
    part = tl.program_id(0)
    row = tl.program_id(1)
    if row >= tl.load(row_count):
        return
    place = tl.load(places + row).to(tl.int64)
    row_logits = logits + place * vocab
    chosen = tl.load(row_logits + tl.load(results + place)).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    exceeding = tl.zeros([BLOCK], tl.int32)
    for first in range(part * BLOCK, vocab, parts * BLOCK):
        token = first + lane
        value = tl.load(row_logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, value)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing there yet: no weights
        weights = weights * tl.exp(largest - base) + tl.exp(value - base)
        largest = higher
        exceeding += (value > chosen).to(tl.int32)
    best = tl.max(largest)
    base = tl.where(best == float("-inf"), 0.0, best)
    at = row * parts + part
    tl.store(highest + at, best)
    tl.store(totals + at, tl.sum(weights * tl.exp(largest - base)))
    tl.store(better + at, tl.sum(exceeding))
    tl.store(maxima + at * BLOCK + lane, largest.to(maxima.dtype.element_ty))


@triton.jit(do_not_specialize=["parts"])
def tell_tokens(
    logits,
    places,
    tops,
    results,
    highest,
    totals,
    better,
    maxima,
    listed,
    scores,
    row_count,
    vocab,
    most,
    parts,
    MOST_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    """Write the chosen token's logprob and rank, then ids and then logprobs of the `tops[i]` likeliest; grid (rows).

    scores is float32 [rows, 2 + 2 * most]: ids and ranks are below 2 ** 24. listed is [rows, LANES / STRETCHES],
    see `choose_tokens`.
    """
    row = tl.program_id(0)
    if row >= tl.load(row_count):
        return
    wanted = tl.load(tops + row)
    number = tl.arange(0, LANES)
    room: tl.constexpr = LANES // STRETCHES
    place = tl.load(places + row).to(tl.int64)
    row_logits = logits + place * vocab
    chosen = tl.load(row_logits + tl.load(results + place)).to(tl.float32)
    part = tl.arange(0, MOST_PARTS)
    is_part = part < parts
    part += row * parts
    part_best = tl.load(highest + part, mask=is_part, other=float("-inf"))
    best = tl.max(part_best)
    total = tl.load(totals + part, mask=is_part, other=0.0)
    whole = best + tl.log(tl.sum(total * tl.exp(part_best - best)))
    told = scores + row * (2 + 2 * most)
    tl.store(told, chosen - whole)
    tl.store(told + 1, (1 + tl.sum(tl.load(better + part, mask=is_part, other=0))).to(tl.float32))
    if wanted > 0:
        largest = largest_of_groups(maxima, row, parts, BLOCK, LANES)
        bound = kth_largest(row_logits, largest, vocab, wanted, best, True, LANES)
        surely = (largest.to(tl.float32) > bound).to(tl.int32)  # fewer than are wanted; of equal ones any will do
        maybe = (largest.to(tl.float32) == bound).to(tl.int32)
        sure = tl.sum(surely)
        slot = tl.where(surely > 0, tl.cumsum(surely, 0), sure + tl.cumsum(maybe, 0)) - 1
        tl.store(listed + row * room + slot, number, mask=(surely + maybe > 0) & (slot < room))
        few = tl.minimum(sure + tl.sum(maybe), room)
        tl.debug_barrier()
        listing = number // STRETCHES
        token = tl.load(listed + row * room + listing, mask=listing < few, other=0) + number % STRETCHES * LANES
        inside = (listing < few) & (token < vocab)
        values = tl.load(row_logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        for rank in range(wanted):
            value = tl.max(tl.where(inside, values, float("-inf")))
            found = tl.min(tl.where(inside & (values == value), token, vocab - 1))
            inside = inside & (token != found)
            tl.store(told + 2 + rank, found.to(tl.float32))
            tl.store(told + 2 + most + rank, value - whole)
