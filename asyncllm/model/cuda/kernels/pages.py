"""Copies of whole KV pages, in every layer at once.

Runs on the engine's CUDA stream; owns nothing. Invariant: no target is a source, and none is there twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_pages"]


@triton.jit
def copy_pages(kv, sources, targets, num_pages, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """kv[side, targets[i]] = kv[side, sources[i]]; kv is [sides, num_pages, ELEMENTS]; grid (copies, sides)."""
    copy = tl.program_id(0)
    side = tl.program_id(1).to(tl.int64) * num_pages
    source = kv + (side + tl.load(sources + copy)) * ELEMENTS
    target = kv + (side + tl.load(targets + copy)) * ELEMENTS
    for first in range(0, ELEMENTS, BLOCK):
        element = first + tl.arange(0, BLOCK)
        inside = element < ELEMENTS
        tl.store(target + element, tl.load(source + element, mask=inside), mask=inside)
