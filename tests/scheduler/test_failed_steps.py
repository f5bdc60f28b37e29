"""A step that failed leaves no trace: its requests go on from what committed steps have done, with the same tokens."""

from __future__ import annotations

import pytest

from asyncllm.request import RequestState
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP
from helpers.scheduling import World, make_request, reference


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("later_written", [True, False])
@pytest.mark.parametrize("turns", range(1, 6))
def test_all_go_on_with_the_tokens_that_they_have_without_a_fault(
    turns: int, written: bool, later_written: bool
) -> None:
    """Two steps in flight, chunks of prompts and decoding rows in them, pages given to them in both."""
    world = World(pages=24, page_size=4, budget=16, depth=2)
    requests = [make_request(0, 5, 9), make_request(1, 21, 3), make_request(2, 6, 8)]
    world.submit(*requests)
    for _ in range(turns):
        world.turn()
    while len(world.in_flight) < 2:
        world.launch()
    world.fail(written=written, later_written=later_written)
    world.run()
    assert [request.generated for request in requests] == [reference(request) for request in requests]
    world.assert_idle()


def test_the_last_token_is_given_by_the_host_then_and_all_rows_are_written_again() -> None:
    world = World(pages=24, page_size=4, depth=2)
    request = make_request(0, 6, 9)
    world.submit(request)
    for _ in range(3):
        world.turn()
    step = world.launch()
    assert step is not None
    assert step.batch.token_ids.tolist() == [SAMPLED_LAST_STEP]
    world.fail(written=False, later_written=False)
    assert request.state is RequestState.PREFILLING
    step = world.launch()
    assert step is not None
    assert step.batch.token_ids.tolist() == request.generated[-1:]
    assert step.batch.starts.tolist() == [6 + 3 - 1]
    slots, columns, _pages = step.batch.table_writes.tolist()
    assert (slots, columns) == ([step.batch.slots[0]] * 3, [0, 1, 2])
    world.run()
    world.assert_idle()


def test_a_page_copy_is_made_again() -> None:
    world = World(pages=24, page_size=8)
    first = make_request(0, [*range(1, 7)], 1)
    world.submit(first)
    world.run()
    second = make_request(1, [*range(1, 6), 9, 9], 3)
    world.submit(second)
    failed = world.launch()
    assert failed is not None
    assert failed.batch.page_copies.shape == (2, 1)
    world.fail(written=False, later_written=False)
    again = world.launch()
    assert again is not None
    assert again.batch.page_copies.tolist() == failed.batch.page_copies.tolist()
    assert again.batch.starts.tolist() == failed.batch.starts.tolist() == [5]
    world.run()
    assert second.generated == reference(second)
    world.assert_idle()


def test_one_that_was_paused_meanwhile_goes_on_when_it_resumes() -> None:
    world = World(depth=2)
    request = make_request(0, 3, 9)
    world.submit(request)
    world.turn()
    world.launch()
    world.pause(request)
    world.fail(written=True, later_written=True)
    assert request.state is RequestState.PAUSED
    assert world.launch() is None
    world.resume(request)
    world.run()
    assert request.generated == reference(request)
    world.assert_idle()


def test_nobody_waits_for_the_prefix_of_one_that_was_paused_meanwhile() -> None:
    """Its prompt's last chunk was in the step; parked and resumed, it does not wait for itself either."""
    world = World(page_size=2, slots=2)
    first, sibling = make_request(0, [*range(9)], 3), make_request(1, [*range(9), 9], 3)
    world.submit(first, sibling)
    world.launch()
    assert world.waiting() == [sibling]
    world.pause(first)
    world.fail(written=False, later_written=False)
    world.run()
    assert sibling.generated == reference(sibling)
    assert world.park(first)
    world.resume(first)
    world.run()
    assert first.generated == reference(first)
    world.assert_idle()


def test_one_that_was_ending_has_ended() -> None:
    world = World(depth=2)
    request = make_request(0, 3, 9)
    world.submit(request)
    world.launch()
    assert not world.end(request)
    world.fail(written=True, later_written=True)
    assert request.state is RequestState.FINISHED
    world.assert_idle()


def test_single_requests_can_be_tried_by_themselves() -> None:
    """And nobody starts meanwhile, but for one that is started ahead of all."""
    world = World(slots=3)
    first, second, waits = make_request(0, 3), make_request(1, 3), make_request(2, 3)
    world.submit(first, second)
    world.launch()
    world.fail(written=True, later_written=False)
    world.submit(waits)
    step = world.launch(only=[second])
    assert step is not None
    assert step.rows == (second,)
    world.commit()
    probe = make_request(-1, 1, 1)
    assert world.scheduler.start_alone(probe)
    world.scheduler.roll_back()
    step = world.launch(only=[probe])
    assert step is not None
    assert step.rows == (probe,)
    world.end(probe)
    world.commit()
    world.run()
    assert [r.generated for r in (first, second, waits)] == [reference(r) for r in (first, second, waits)]
    world.assert_idle()


def test_nobody_is_started_ahead_of_all_where_no_slot_is_free() -> None:
    world = World(slots=1)
    world.submit(make_request(0, 3))
    world.launch()
    assert not world.scheduler.start_alone(make_request(-1, 1, 1))
    world.run()
    world.assert_idle()


def test_what_a_failed_request_had_computed_is_not_shared() -> None:
    world = World(page_size=2)
    request = make_request(0, 9, 9)
    world.submit(request)
    for _ in range(3):
        world.turn()
    world.scheduler.end(request, keep_kv=False)
    world.ended.add(request)
    same = make_request(1, request.tokens().tolist(), 2)
    world.submit(same)
    world.run()
    assert same.cached_tokens == 9  # its prompt, which was shared before
    assert same.generated == reference(same)
    world.assert_idle()


def test_a_step_without_memory_halves_all_later_ones_as_far_as_they_still_serve_everybody() -> None:
    world = World(slots=4, budget=64)
    world.submit(make_request(0, 60, 2))
    sizes = []
    for _ in range(5):
        step = world.launch()
        assert step is not None
        sizes.append(step.batch.query_tokens)
        shrunk = world.scheduler.shrink_steps(step)
        world.fail(written=False, later_written=False)
        if not shrunk:
            break
    assert sizes == [60, 30, 15, 7, 5]
    world.run()
    world.assert_idle()
