"""A reader that stopped gives its pages to those that wait, and goes on where it was."""

from __future__ import annotations

import pytest

from asyncllm.request import RequestState
from helpers.scheduling import World, make_request, reference


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_parked_request_gives_everything_back_and_goes_on_with_the_same_tokens(
    page_size: int, depth: int, prefix_cache: bool
) -> None:
    world = World(pages=48 // page_size, page_size=page_size, depth=depth, prefix_cache=prefix_cache)
    parked, other = make_request(0, 9, 24), make_request(1, 9, 24)  # 32 of 48 positions each
    world.submit(parked)
    for _ in range(8):
        world.turn()
    world.submit(other)
    world.pause(parked)
    world.run()
    assert world.scheduler.blocked
    assert world.waiting() == [other]
    generated = list(parked.generated)
    assert world.park(parked)
    assert parked.state is RequestState.PREEMPTED
    assert (world.scheduler.running, world.scheduler.paused, world.scheduler.waiting) == (0, 0, 1)
    assert (world.scheduler.reserved_tokens, world.scheduler._admission.promised_pages) == (0, 0)
    assert world.scheduler.preemptions == 1
    world.run()
    assert other.generated == reference(other)
    assert parked.generated == generated
    world.resume(parked)
    assert world.scheduler.waiting == 1
    world.run()
    assert parked.generated == reference(parked)
    assert parked.cached_tokens == 0
    assert world.scheduler.prefix_hit_tokens == 0
    world.assert_idle()


def test_what_a_parked_request_had_computed_is_found_again_in_the_cache() -> None:
    world = World(pages=64, page_size=4)
    request = make_request(0, 9, 24)
    world.submit(request)
    for _ in range(8):
        world.turn()
    world.pause(request)
    assert world.park(request)
    world.resume(request)
    step = world.launch()
    assert step is not None
    assert step.batch.query_lens.tolist() == [1]
    assert step.batch.starts.tolist() == [9 + 8 - 1]
    world.run()
    assert request.generated == reference(request)
    world.assert_idle()


def test_it_goes_on_ahead_of_all_that_never_started() -> None:
    world = World(pages=20, slots=4)
    parked = make_request(9, 4, 13)
    world.submit(parked)
    world.turn()
    world.pause(parked)
    assert world.park(parked)
    first = make_request(10, 4, 13, priority=1)
    world.submit(first)
    world.turn()
    world.submit(make_request(0, 4, 13, priority=7))
    world.resume(parked)
    assert world.scheduler.waiting_requests()[0] is parked
    world.run()
    assert [record.request_ids for record in world.records if record.kind == "prefill"] == [
        ("9",),
        ("10",),
        ("9",),
        ("0",),
    ]
    world.assert_idle()


def test_a_request_in_a_launched_step_is_not_parked_yet() -> None:
    world = World(depth=2)
    request = make_request(0, 3, 9)
    world.submit(request)
    world.launch()
    world.launch()
    world.pause(request)
    assert not world.park(request)
    world.commit()
    assert not world.park(request)
    assert request.state is RequestState.PAUSED
    world.commit()
    assert world.park(request)
    world.resume(request)
    world.run()
    assert request.generated == reference(request)
    world.assert_idle()


def test_only_a_paused_request_is_parked() -> None:
    world = World()
    request = make_request(0, 3, 9)
    world.submit(request)
    world.turn()
    with pytest.raises(RuntimeError, match="not paused"):
        world.scheduler.park(request)
    world.run()
    world.assert_idle()


def test_a_parked_request_ends_at_once() -> None:
    world = World()
    request = make_request(0, 3, 9)
    world.submit(request)
    world.turn()
    world.pause(request)
    world.park(request)
    assert world.end(request)
    assert world.launch() is None
    world.assert_idle()


def test_a_reader_that_never_returns_lets_twenty_others_finish() -> None:
    world = World(pages=24, slots=2, depth=2)
    gone = make_request(0, 4, 16)
    world.submit(gone)
    world.turn()
    world.pause(gone)
    others = [make_request(number, 4, 16) for number in range(1, 21)]
    world.submit(*others)
    world.run()
    assert world.scheduler.blocked
    assert world.park(gone)
    world.run()
    assert all(request.generated == reference(request) for request in others)
    assert gone.state is RequestState.PREEMPTED
    assert world.end(gone)
    world.assert_idle()
