"""The trace that must come out, row by row."""

from __future__ import annotations

import pytest

from helpers.scheduling import World, make_request

TRACE = """
prefill 0 1 2 3 | 1 35 28
decode 0 1 2 3 | 1 31 24
decode 0 1 2 3 | 1 27 20
decode 0 1 2 3 | 1 23 16
decode 0 1 2 3 | 1 19 12
decode 0 1 2 3 | 1 15 8
decode 0 1 2 3 | 1 11 4
decode 0 1 2 3 | 1 7 0
prefill 4 | 0 59 7
decode 4 | 0 58 6
decode 4 | 0 57 5
decode 4 | 0 56 4
decode 4 | 0 55 3
decode 4 | 0 54 2
decode 4 | 0 53 1
decode 4 | 0 52 0
"""


@pytest.mark.parametrize("alike", [False, True])
def test_the_published_trace(alike: bool) -> None:
    """Five prompts in a pool of 64 tokens; prompts that begin alike change nothing, as nothing is cached."""
    world = World(pages=64, page_size=1, slots=8, prefix_cache=False)
    lengths = (5, 5, 4, 15, 5)
    prompts = [list(range(length)) if alike else length for length in lengths]
    world.submit(*(make_request(number, prompt, 8) for number, prompt in enumerate(prompts)))
    rows = [f"{r.kind} {' '.join(r.request_ids)} | {r.waiting} {r.free_pages} {r.reserved_tokens}" for r in world.run()]
    assert rows == TRACE.strip().splitlines()
    assert world.cache.free_pages == 64
    world.assert_idle()
