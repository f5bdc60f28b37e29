"""A request starts only when its whole worst case fits beside all that is promised."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from asyncllm.errors import PromptTooLongError
from asyncllm.request import RequestState
from asyncllm.scheduler.scheduler import Verdict
from helpers.scheduling import World, make_request

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncllm.kv.cache_manager import PrefixMatch


def test_two_requests_admitted_in_one_step_do_not_share_one_page() -> None:
    """Counted in tokens with a margin, both would start: 2 + 2 tokens are less than the page of 128."""
    world = World(pages=1, page_size=128, slots=4, prefix_cache=False)
    world.submit(make_request(0, 2, 4), make_request(1, 2, 4))
    world.launch()
    assert world.running() == world.requests[:1]
    world.run()
    world.assert_idle()


def test_the_last_token_of_a_running_request_may_need_a_whole_page() -> None:
    """Request 0 has 17 positions in the end: one token to go still promises a page of 16."""
    world = World(pages=3, page_size=16, slots=4, prefix_cache=False)
    world.submit(make_request(0, 16, 2), make_request(1, 10, 2), make_request(2, 10, 2))
    world.launch()
    assert world.running() == world.requests[:2]
    assert world.cache.free_pages == 1
    assert world.scheduler.reserved_tokens == 2
    world.run()
    world.assert_idle()


def test_what_is_promised_is_rounded_up_for_each_request_by_itself() -> None:
    world = World(pages=8, page_size=4, slots=8, prefix_cache=False)
    world.submit(*(make_request(number, 1, 5) for number in range(8)))  # 5 positions each: 2 pages, 1 of them now
    world.launch()
    assert world.running() == world.requests[:4]
    assert world.cache.free_pages == 4
    assert world.scheduler._admission.promised_pages == 4


def test_of_two_that_need_most_of_the_pool_the_second_starts_when_the_first_has_ended() -> None:
    world = World(pages=10, page_size=4, slots=4, depth=2)
    first, second = make_request(0, 4, 21), make_request(1, 4, 21)  # 24 of 40 positions each
    world.submit(first, second)
    world.turn()
    while first in world.running():
        assert world.waiting() == [second]
        world.turn()
    world.launch()
    assert world.running() == [second]
    world.run()
    world.assert_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_larger_than_the_pool_is_refused_and_one_as_large_runs(page_size: int) -> None:
    world = World(pages=8, page_size=page_size)
    pool = 8 * page_size
    fits, too_large = make_request(0, pool - 3, 4), make_request(1, pool - 3, 5)
    with pytest.raises(PromptTooLongError, match=f"{pool - 3} tokens with max_tokens=5") as caught:
        world.scheduler.submit([fits, too_large])
    assert (caught.value.prompt_tokens, caught.value.limit_tokens, caught.value.pool_tokens) == (
        pool - 3,
        pool + 1,
        pool,
    )
    assert caught.value.request_id == "1"
    assert fits.state is too_large.state is RequestState.PREPARING
    assert world.scheduler.waiting == 0
    world.submit(fits)
    world.run()
    assert len(fits.generated) == 4
    world.assert_idle()


@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_a_request_as_large_as_the_pool_runs_though_a_copy_of_its_prefix_would_not_fit_beside_it(
    page_size: int,
) -> None:
    """A match inside a page needs the page's source and its copy at once: one page more than there is."""
    world = World(pages=4, page_size=page_size)
    shared = list(range(page_size + page_size // 2))
    world.submit(make_request(0, shared, 1))
    world.run()
    whole = make_request(1, [*shared, *range(100, 100 + page_size)], 4 * page_size - len(shared) - page_size + 1)
    assert whole.worst_case_tokens == 4 * page_size
    world.submit(whole)
    world.launch()
    assert whole.cached_tokens == page_size  # the whole page, without the copy
    world.run()
    world.assert_idle()


def test_pages_that_a_request_leases_itself_are_not_counted_as_free_for_it() -> None:
    world = World(pages=6, slots=4)
    world.submit(make_request(0, [1, 2], 1))
    world.run()
    assert world.cache.evictable_pages == 2
    world.submit(make_request(1, 1, 3))
    world.launch()
    assert (world.cache.free_pages, world.scheduler._admission.promised_pages) == (3, 2)
    # Needs 2 pages beside the 2 that it would lease: 2 + 2 promised of 3 + 2, but the 2 are then its own.
    blocked = make_request(2, [1, 2, 3], 2)
    world.submit(blocked)
    world.launch()
    assert blocked.state is RequestState.WAITING
    assert world.cache.leased_pages == 0
    world.run()
    world.assert_idle()


class _Matches:
    """Counts the matches that a scheduler asks for."""

    def __init__(self, world: World) -> None:
        self.count = 0
        self._match = world.cache.match
        world.cache.match = self  # type: ignore[method-assign]

    def __call__(self, tokens: npt.NDArray[np.int32], namespace: str) -> PrefixMatch:
        self.count += 1
        return self._match(tokens, namespace)


def test_a_blocked_head_is_not_matched_again_before_something_changed() -> None:
    world = World(pages=16, page_size=1, slots=4)
    first = make_request(0, 4, 10)
    world.submit(first)
    world.turn()
    matches = _Matches(world)
    world.submit(make_request(1, 4, 8), make_request(2, 1, 1))
    for _ in range(6):
        world.turn()
        assert world.scheduler.blocked
    assert matches.count == 1  # nothing was freed, unlocked or inserted; nobody overtakes the head
    assert world.scheduler.waiting == 2
    world.run()
    assert matches.count == 3
    assert not world.scheduler.blocked
    world.assert_idle()


def test_a_head_without_a_slot_is_not_matched() -> None:
    world = World(pages=64, slots=1)
    world.submit(make_request(0, 4, 4), make_request(1, 4, 4))
    matches = _Matches(world)
    world.turn()
    world.turn()
    assert matches.count == 1
    assert world.scheduler.blocked


def test_another_head_is_tried_though_nothing_changed() -> None:
    world = World(pages=16, slots=4)
    world.submit(make_request(0, 4, 6), make_request(1, 8, 8))
    world.turn()
    world.turn()
    version = world.cache.version
    urgent = make_request(2, 2, 2, priority=1)
    world.submit(urgent)
    world.launch()
    assert world.waiting() == world.requests[1:2]
    assert world.cache.version == version
    world.run()
    world.assert_idle()


def test_a_promise_is_given_up_at_the_end_not_when_the_last_step_has_run() -> None:
    """What a cancelled request would have needed is there for the next launch; what it has, is not."""
    world = World(pages=16, slots=4, depth=2)
    cancelled, head = make_request(0, 4, 10), make_request(1, 4, 8)  # 13 and 11 of 16 pages
    world.submit(cancelled, head)
    world.launch()
    assert world.waiting() == [head]
    assert not world.end(cancelled)
    assert world.scheduler._admission.promised_pages == 0
    assert world.cache.owned_pages == 4
    world.launch()
    assert world.waiting() == []
    world.run()
    world.assert_idle()


def test_a_higher_class_is_next_though_thirty_wait_longer() -> None:
    world = World(pages=200, slots=2)
    world.submit(make_request(0, 2, 3), make_request(1, 2, 9))
    world.turn()
    world.submit(*(make_request(number, 2, 2) for number in range(2, 32)))
    urgent = make_request(32, 2, 2, priority=1)
    world.submit(urgent)
    while urgent in world.waiting():
        assert all(r.state is RequestState.WAITING for r in world.requests[2:32])
        assert world.turn()
    world.run()
    world.assert_idle()


def test_a_large_head_is_not_overtaken_by_small_ones_for_ever() -> None:
    world = World(pages=16, slots=4)
    small = [make_request(number, 2, 3) for number in range(40)]
    large = make_request(40, 8, 9)
    world.submit(*small[:10])
    world.turn()
    world.submit(large)
    world.submit(*(make_request(number, 2, 3) for number in range(41, 60)))
    while large.state is RequestState.WAITING:
        assert all(r.state is RequestState.WAITING for r in world.requests if r.sequence > 40)
        assert world.turn()
    world.run()
    world.assert_idle()


def test_a_pool_that_is_always_full_raises_nothing_in_5000_steps() -> None:
    draw = random.Random(5)
    world = World(pages=40, page_size=4, slots=6, budget=24)
    scheduler, steps, number = world.scheduler, 0, 0
    while steps < 5000:
        while scheduler.waiting < 4:
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 60))]
            request = make_request(number, prompt, draw.randrange(1, 60), priority=draw.randrange(2))
            scheduler.submit([request])
            number += 1
        step = scheduler.schedule()
        assert step is not None
        scheduler.commit(step, [Verdict(draw.randrange(3), draw.random() < 0.02) for _ in step.sampled])
        steps += 1
        if steps % 200 == 0:
            scheduler.check_integrity()
    assert number > 300
