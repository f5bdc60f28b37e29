"""Counts that went wrong are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncllm.errors import IntegrityError
from asyncllm.scheduler.scheduler import Scheduler, SchedulingPolicy
from helpers.scheduling import World, make_request

if TYPE_CHECKING:
    from collections.abc import Callable


def _lose_a_promise(world: World) -> None:
    world.scheduler._admission._promised -= 1


def _lose_a_reserved_token(world: World) -> None:
    world.scheduler._running.reserved_tokens -= 1


def _count_a_pause_that_is_not(world: World) -> None:
    world.scheduler._running.paused += 1


def _forget_a_prompt(world: World) -> None:
    world.scheduler._running.prefilling.clear()


def _forget_a_row(world: World) -> None:
    world.scheduler._running.rows.requests.pop(0)


def _forget_an_end(world: World) -> None:
    world.scheduler._running._ending.clear()


def _promise_too_much(world: World) -> None:
    for request in set(world.running()) - world.ended:
        request.max_tokens += 50
        world.scheduler._running.reserved_tokens += 50
        world.scheduler._admission._promised += 50


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_lose_a_promise, "promised pages"),
        (_lose_a_reserved_token, "reserved tokens"),
        (_count_a_pause_that_is_not, "paused requests"),
        (_forget_a_prompt, "prefilling requests"),
        (_forget_a_row, "decoding requests"),
        (_forget_an_end, "ending requests"),
        (_promise_too_much, "are promised, .* are available"),
    ],
)
def test_a_wrong_count_is_named(harm: Callable[[World], None], message: str) -> None:
    world = World(pages=64, slots=4, budget=8, depth=2)
    decoding, ending, prefilling = make_request(0, 2, 9), make_request(1, 2, 9), make_request(2, 20, 9)
    world.submit(decoding, ending, prefilling)
    world.launch()
    world.end(ending)
    world.scheduler.check_integrity()
    harm(world)
    with pytest.raises(IntegrityError, match=message):
        world.scheduler.check_integrity()


def test_a_cache_with_another_number_of_slots_is_refused() -> None:
    policy = SchedulingPolicy(
        max_running_requests=3, step_token_budget=8, min_prefill_chunk=1, share_inflight_prefixes=True
    )
    with pytest.raises(ValueError, match="3 requests may run, the cache has 4 slots"):
        Scheduler(World(slots=4).cache, policy)
