"""What rows ask of their logits before temperature, and the best of what comes of it: one pass over the vocabulary.

Runs on the engine's CUDA stream; owns nothing. The rules and their order are those of
`asyncllm.model.option_sampler`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.model.cuda.kernels.groups import leave_best

__all__ = ["edit_logits"]


@triton.jit(do_not_specialize=["parts"])
def edit_logits(
    logits,
    edited,
    places,
    masks_at,
    masks,
    additions_at,
    additions,
    counts_at,
    counts,
    repetitions,
    presences,
    frequencies,
    kept,
    temperatures,
    top_ks,
    best_values,
    best_tokens,
    maxima,
    row_count,
    vocab,
    words,
    parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write row `places[i]` of logits, edited, to row i of edited: float32 [rows, vocab]; grid (parts, rows).

    Greedy rows need their best token alone: they are written only where `kept[i]` is not 0. best_values, best_tokens
    and maxima are those of `asyncllm.model.cuda.kernels.groups.find_best`.

    masks is int32 [any, words], bits that say which tokens are left; additions float32 [any, vocab]; counts int16
    [any, vocab]: how often the request generated each token, negative (the highest bit) where it is in the prompt. Row
    i takes `masks_at[i]`, `additions_at[i]` and `counts_at[i]` of them; none where that is negative. Rows from
    `row_count[0]` on are left out.
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
    written = (tl.load(kept + row) != 0) | (tl.load(temperatures + row) > 0.0)
    place = tl.load(places + row).to(tl.int64)
    mask = tl.load(masks_at + row).to(tl.int64)
    addition = tl.load(additions_at + row).to(tl.int64)
    counted = tl.load(counts_at + row).to(tl.int64)
    repetition = tl.load(repetitions + row)
    presence = tl.load(presences + row)
    frequency = tl.load(frequencies + row)
    for first in range(part * BLOCK, vocab, parts * BLOCK):
        token = first + lane
        inside = token < vocab
        value = tl.load(logits + place * vocab + token, mask=inside, other=0.0).to(tl.float32)
        if mask >= 0:
            word = tl.load(masks + mask * words + token // 32, mask=inside, other=0)
            value = tl.where(((word >> (token % 32)) & 1) != 0, value, float("-inf"))
        if addition >= 0:
            value += tl.load(additions + addition * vocab + token, mask=inside, other=0.0)
        if counted >= 0:
            count = tl.load(counts + counted * vocab + token, mask=inside, other=0).to(tl.int32)
            penalized = tl.where(value > 0.0, value / repetition, value * repetition)
            value = tl.where(count != 0, penalized, value)
            generated = count & 0x7FFF
            value -= frequency * generated.to(tl.float32)
            value -= tl.where(generated > 0, presence, 0.0)
        if written:
            tl.store(edited + row.to(tl.int64) * vocab + token, value, mask=inside)
        value = tl.where(inside, value, float("-inf"))
        better = value > highest
        where = tl.where(better, token, where)
        highest = tl.where(better, value, highest)
    top_k = tl.load(top_ks + row)
    leave_best(highest, where, row * parts + part, top_k, best_values, best_tokens, maxima, vocab, BLOCK)
