"""One rule for every end: in no later launch; all it holds returns at the commit of the last launch that names it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from asyncllm.request import RequestState
from asyncllm.scheduler.scheduler import Verdict
from helpers.scheduling import World, make_request, reference

if TYPE_CHECKING:
    from asyncllm.request import Request
    from asyncllm.scheduler.scheduler import ScheduledStep

# With page size 4 and chunks of 7 beside one decoding neighbour, a prompt of 30 takes 5 steps.
PROMPT = 30


def pressed(world: World) -> bool:
    """Go one turn's half on, as an engine with overlap does: a launch if one more may be in flight, else a commit."""
    if len(world.in_flight) < world.depth and world.launch() is not None:
        return True
    if world.in_flight:
        world.commit()
        return True
    return False


def in_flight(world: World, request: Request) -> list[ScheduledStep]:
    """The steps in flight that name the request."""
    return [step for step in world.in_flight if request in step.rows]


def check_end(world: World, request: Request) -> None:
    """End a request and follow what it holds until it is gone."""
    naming = in_flight(world, request)
    held = request.pages
    free_slots = world.cache.free_slots
    gone = world.end(request)
    assert gone == (not naming)
    assert world.scheduler.end(request) == gone  # once more changes nothing
    generated = list(request.generated)
    while request.pages is not None:
        assert naming
        assert request.pages is held
        assert world.cache.free_slots == free_slots
        step = world.in_flight[0]
        last = step is naming[-1]
        finished = world.commit()
        assert (request in finished) == last
        assert (request.pages is None) == last
    assert world.cache.free_slots == free_slots + (held is not None)
    assert request.state is RequestState.FINISHED
    assert request.generated == generated


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_cancel_at_every_moment(depth: int, prefix_cache: bool) -> None:
    """Not submitted, waiting, in each chunk and decoding step; with 0, 1 and 2 steps in flight that name it."""
    met: set[tuple[RequestState, int]] = set()
    for moments in itertools.count():
        world = World(pages=100, page_size=4, slots=3, budget=8, depth=depth, prefix_cache=prefix_cache)
        neighbour, request = make_request(0, 1, 40), make_request(1, PROMPT, 6)
        world.submit(neighbour)
        pressed(world)
        if moments:
            world.submit(request)
        for _ in range(moments - 1):
            pressed(world)
        met.add((request.state, len(in_flight(world, request))))
        finished_before = request.state is RequestState.FINISHED
        check_end(world, request)
        world.run()
        assert neighbour.generated == reference(neighbour)
        world.assert_idle()
        if finished_before:
            break
    states = {RequestState.PREFILLING, RequestState.DECODING}
    assert met >= {(state, flying) for state in states for flying in range(1, depth + 1)}
    assert {(RequestState.PREPARING, 0), (RequestState.WAITING, 0), (RequestState.FINISHED, 0)} <= met
    if depth == 1:
        assert met >= {(state, 0) for state in states}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_cancel_in_a_pause(depth: int, commits: int) -> None:
    world = World(pages=100, page_size=4, depth=depth)
    request = make_request(0, 5, 9)
    world.submit(request)
    for _ in range(2 * depth):
        pressed(world)
    while len(world.in_flight) < depth:
        world.launch()
    world.pause(request)
    for _ in range(min(commits, depth)):
        world.commit()
    assert request.state is RequestState.PAUSED
    check_end(world, request)
    world.assert_idle()


def test_a_pause_may_meet_the_end_that_is_in_flight() -> None:
    """The token of a paused request ends it; the next step names it too, and was launched before the pause."""
    world = World(depth=2)
    request = make_request(0, 3, 9)
    world.submit(request)
    first, second = world.launch(), world.launch()
    assert first is not None
    assert second is not None
    world.pause(request)
    scheduler = world.scheduler
    assert scheduler.commit(first, [Verdict(7, ends=True)]) == ()
    assert request.state is RequestState.ENDING
    assert scheduler.paused == 0
    assert scheduler.commit(second, [None]) == (request,)
    assert request.generated == [7]
    scheduler.check_integrity()


@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_a_cancel_between_the_last_launch_and_its_commit(max_tokens: int) -> None:
    """A request whose length is reached by launched steps is in none to come, but not finished."""
    world = World(depth=2)
    request = make_request(0, 3, max_tokens)
    world.submit(request, make_request(1, 3, 20))
    while request.sampled < max_tokens:
        pressed(world)
    assert request.state is RequestState.DECODING
    check_end(world, request)
    world.run()
    world.assert_idle()


@pytest.mark.parametrize("ends_at", [1, 2, 3])
def test_the_extra_token_of_an_end_by_verdict_is_dropped(ends_at: int) -> None:
    """The step after was launched before the end was known: it costs that one token and nothing else."""
    world = World(pages=64, page_size=2, depth=2)
    scheduler, request = world.scheduler, make_request(0, 5, 20)
    world.submit(request)
    launched = [world.launch()]
    for token in range(1, ends_at + 1):
        launched.append(world.launch())
        step = launched.pop(0)
        assert step is not None
        assert scheduler.commit(step, [Verdict(token, ends=token == ends_at)]) == ()
        scheduler.check_integrity()
    assert request.state is RequestState.ENDING
    assert scheduler.schedule() is None
    (step,) = launched
    assert step is not None
    assert scheduler.commit(step, [None]) == (request,)
    assert request.generated == list(range(1, ends_at + 1))
    cached = world.cache.match(request.tokens(), "")
    assert cached.tokens == 5 + ends_at - 1  # the last token's KV counts as not written
    world.assert_idle()


def test_a_verdict_ends_a_request_at_once_without_overlap() -> None:
    world = World()
    request = make_request(0, 3, 9)
    world.submit(request)
    step = world.launch()
    assert step is not None
    assert world.scheduler.commit(step, [Verdict(5, ends=True)]) == (request,)
    world.assert_idle()


def test_many_ends_in_one_commit_return_together_when_it_is_done() -> None:
    world = World(pages=64, depth=2, prefix_cache=False)
    requests = [make_request(number, 3, 2) for number in range(6)]
    world.submit(*requests)
    world.launch()
    world.launch()
    world.commit()
    assert world.scheduler.running == 6
    free = []
    release = world.cache.release

    def note(*arguments: object) -> None:
        free.append(world.cache.free_pages)
        release(*arguments)  # type: ignore[arg-type]

    world.cache.release = note  # type: ignore[method-assign, assignment]
    assert set(world.commit()) == set(requests)
    assert free == [64 - 6 * 4] * 6
    world.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_of_a_failed_step_enters_the_cache(depth: int) -> None:
    """The engine ends all rows of the steps in flight, then commits these without verdicts."""
    world = World(pages=64, page_size=4, slots=4, budget=16, depth=depth)
    requests = [make_request(0, 8, 9), make_request(1, 40, 9)]
    world.submit(*requests)
    world.turn()
    while len(world.in_flight) < depth:
        world.launch()
    failed = list(world.in_flight)
    committed = [request.committed for request in requests]
    for request in requests:
        assert not world.end(request)
    finished = [request for step in failed for request in world.scheduler.commit(step, [None] * len(step.sampled))]
    assert set(finished) == set(requests)
    for request, tokens in zip(requests, committed, strict=True):
        assert world.cache.match(request.tokens(), "").tokens <= tokens
    world.in_flight.clear()
    world.assert_idle()


def test_a_failed_first_step_leaves_no_copied_page_behind() -> None:
    """The copy of a partial page is not known to be made; its source may be gone when the request is released."""
    world = World(pages=16, page_size=8, slots=2, budget=4, depth=2)
    world.submit(make_request(0, list(range(8)), 1))
    world.run()
    request = make_request(1, [*range(6), *range(50, 60)], 4)
    world.submit(request)
    first, second = world.launch(), world.launch()
    assert first is not None
    assert second is not None
    assert request.cached_tokens == 6
    assert not world.end(request)
    assert world.scheduler.commit(first, []) == ()
    assert world.cache.reset_prefix_cache() == 1
    assert world.scheduler.commit(second, []) == (request,)
    assert world.cache.cached_pages == 0
    world.assert_idle()


def test_steps_are_committed_in_launch_order() -> None:
    world = World(depth=2)
    world.submit(make_request(0, 3, 9))
    first, second = world.launch(), world.launch()
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match="step 1 is not the oldest in flight"):
        world.scheduler.commit(second, [None])
    world.scheduler.commit(first, [Verdict(1, ends=False)])
    with pytest.raises(RuntimeError, match="step 0 is not the oldest in flight"):
        world.scheduler.commit(first, [Verdict(1, ends=False)])


def test_a_token_of_a_request_that_goes_on_is_not_dropped() -> None:
    world = World()
    world.submit(make_request(0, 3, 9))
    step = world.launch()
    assert step is not None
    with pytest.raises(RuntimeError, match="needs a verdict"):
        world.scheduler.commit(step, [None])
