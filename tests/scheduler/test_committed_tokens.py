"""Requests whose next step needs their last token on the host: they wait for its commit, and nobody else does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from asyncllm.request import RequestState
from helpers.scheduling import Follower, World, follow, make_request, reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


def test_a_request_that_needs_its_token_is_left_out_of_the_overlapping_step_and_others_go_on() -> None:
    world = World(pages=64, slots=4, depth=2)
    free, bound = make_request(0, 3, 8), follow(make_request(1, 3, 4))
    world.submit(free, bound)
    names = [[request.sequence for request in step.rows] for step in world.steps()]
    assert names == [[0, 1], [0], [0, 1], [0], [0, 1], [0], [0, 1], [0]]
    assert free.generated == reference(free)
    assert bound.generated == reference(bound)
    world.assert_idle()


def test_without_overlap_a_request_that_needs_its_token_is_in_every_step() -> None:
    world = World(pages=64, slots=4, depth=1)
    bound = [follow(make_request(number, 3, 4)) for number in range(2)]
    world.submit(*bound)
    assert [len(step.rows) for step in world.steps()] == [2, 2, 2, 2]


def test_nothing_is_launched_while_all_wait_for_a_commit() -> None:
    world = World(pages=64, slots=4, depth=2)
    world.submit(*(follow(make_request(number, 3, 4)) for number in range(3)))
    assert world.launch() is not None
    assert world.launch() is None
    world.commit()
    assert world.launch() is not None


def test_nobody_counts_as_blocked_while_all_wait_for_a_commit() -> None:
    """Else paused streams would give up their pages for one that did not even try to start."""
    world = World(pages=64, slots=2, depth=2)
    world.submit(*(follow(make_request(number, 3, 4)) for number in range(3)))
    blocked = []
    for launched in (True, False):
        assert (world.launch() is not None) == launched
        blocked.append(world.scheduler.blocked)
    world.commit()
    assert world.launch() is not None
    assert [*blocked, world.scheduler.blocked] == [True, False, True]


def test_bound_requests_that_began_apart_come_together_in_one_step() -> None:
    """Else each step would have half of them, and take nearly as long."""
    world = World(pages=200, slots=6, budget=12, depth=2)
    world.submit(*(follow(make_request(number, 8, 9)) for number in range(6)))
    decoding = [len(step.rows) for step in world.steps() if not step.chunks]
    assert decoding[:3] == [6, 6, 6]


@pytest.mark.parametrize(
    ("free", "bound", "rows"), [(1, 3, [4, 4, 4]), (3, 1, [4, 3, 4, 3]), (2, 2, [4, 2, 4, 2]), (0, 1, [1, 1])]
)
def test_all_wait_where_more_would_be_held_back_than_go_on(free: int, bound: int, rows: list[int]) -> None:
    world = World(pages=200, slots=6, depth=2)
    world.submit(*(make_request(number, 3, 9) for number in range(free)))
    world.submit(*(follow(make_request(free + number, 3, 9)) for number in range(bound)))
    assert [len(step.rows) for step in world.steps()][: len(rows)] == rows
    world.assert_idle()


def disturb(world: World, draw: random.Random) -> None:
    """Pause, park, resume or cancel somebody."""
    decoding = [r for r in world.requests if r.state is RequestState.DECODING]
    if decoding and draw.random() < 0.3:
        world.pause(draw.choice(decoding))
    paused = [r for r in world.requests if r.state is RequestState.PAUSED]
    if paused and draw.random() < 0.4:
        world.park(paused[0])
        world.resume(paused[0])
    live = [r for r in world.requests if r.state is RequestState.DECODING]
    if live and draw.random() < 0.05:
        world.end(draw.choice(live))


def test_masks_are_made_when_the_device_asks_and_once() -> None:
    world = World(pages=64, slots=4, depth=2)
    bound = follow(make_request(0, 3, 4))
    world.submit(bound)
    world.launch()
    world.commit()
    step = world.launch()
    assert step is not None
    asked = 0

    class Counting(Follower):
        def mask(self, generated: Sequence[int]) -> npt.NDArray[np.int32]:
            nonlocal asked
            asked += 1
            return super().mask(generated)

    bound.constraint = Counting(bound)
    assert step.batch.asking == [0]
    assert len(step.batch.masks) == 1
    assert asked == 0
    assert [step.batch.masks[0].tolist() for _ in range(3)] == [[0, 1]] * 3
    assert asked == 1
    world.commit()
    assert step.batch.masks[0].tolist() == [0, 1]


def test_each_sample_of_a_constrained_request_has_its_mask_and_no_other_has_one() -> None:
    draw = random.Random(5)
    world = World(pages=600, page_size=2, slots=9, budget=24, depth=2, use_eos=True)
    for number in range(60):
        request = make_request(number, draw.randrange(1, 9), draw.randrange(1, 12))
        world.submit(follow(request) if draw.random() < 0.5 else request)
    masks = 0
    while (step := world.launch()) is not None or world.in_flight:
        if step is not None:
            bound = {place: r for place, r in enumerate(step.sampled) if r.constraint is not None}
            named = {place: mask.tolist() for place, mask in step.batch.masks.items()}
            assert named == {place: [r.sequence, len(r.generated)] for place, r in bound.items()}
            assert step.batch.slots.tolist() == [r.pages.slot for r in step.rows if r.pages is not None]
            masks += len(named)
        if len(world.in_flight) == 2 or step is None:
            world.commit()
        disturb(world, draw)
    for request in world.requests:
        if request.state is RequestState.PAUSED:
            world.resume(request)
    world.run()
    world.assert_idle()
    assert masks > 60
    for request in world.requests:
        expected = reference(request, use_eos=True)
        assert request.generated == (expected[: len(request.generated)] if request in world.cancelled else expected)
