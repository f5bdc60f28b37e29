"""Requests that share a prefix and arrive together compute it once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncllm.kv.naive_cache import GROUP_PREFIX
from asyncllm.request import RequestState
from asyncllm.scheduler.sibling_prefixes import SiblingPrefixes
from asyncllm.scheduler.waiting_order import WaitingOrder
from helpers.scheduling import World, make_request, reference

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncllm.kv.cache_manager import PrefixMatch

LONG = list(range(1, 25))  # 24 tokens


def computed_prompt_tokens(world: World) -> dict[int, int]:
    """Run to the end; return how many tokens of its prompt each request computed."""
    counts: dict[int, int] = {}
    for step in world.steps():
        for chunk in step.chunks:
            counts[chunk.request.sequence] = counts.get(chunk.request.sequence, 0) + len(chunk.token_ids)
    for request in world.requests:
        assert request.generated == reference(request)
    world.assert_idle()
    return counts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_a_shared_prefix_is_computed_once(page_size: int, depth: int) -> None:
    world = World(pages=400 // page_size, page_size=page_size, depth=depth)
    world.submit(*(make_request(number, [*LONG, 100 + number, 200], 3) for number in range(6)))
    assert computed_prompt_tokens(world) == {0: 26, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_of_many_chunks_is_computed_once(depth: int) -> None:
    world = World(pages=100, page_size=4, budget=9, slots=2, depth=depth)
    world.submit(make_request(0, [*LONG, 100], 1), make_request(1, [*LONG, 101], 1))
    assert computed_prompt_tokens(world) == {0: 25, 1: 1}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_of_one_prompt_compute_only_its_last_token_again(depth: int, prefix_cache: bool) -> None:
    """A prompt shorter than a page too, and without a prefix cache, while the first of them lives."""
    world = World(pages=16, page_size=16, depth=depth, prefix_cache=prefix_cache)
    samples = [make_request(number, LONG[:10], 20, namespace=GROUP_PREFIX + "1") for number in range(4)]
    world.submit(*samples)
    assert computed_prompt_tokens(world) == {0: 10, 1: 1, 2: 1, 3: 1}
    assert [sample.cached_tokens for sample in samples] == [0, 9, 9, 9]


def test_equal_prompts_that_begin_in_the_cache_and_end_in_one_page_are_computed_once() -> None:
    world = World(pages=4, page_size=256, budget=72, depth=2)
    world.submit(make_request(0, list(range(150)), 1))
    world.run()
    world.submit(*(make_request(number, list(range(200)), 2) for number in (1, 2)))
    assert computed_prompt_tokens(world) == {1: 50, 2: 1}


def test_a_request_that_waits_holds_nothing_and_lets_unrelated_ones_pass() -> None:
    world = World(pages=100, page_size=4, slots=8, budget=40)
    producer, sibling, stranger = make_request(0, LONG, 2), make_request(1, [*LONG, 9], 2), make_request(2, 3, 2)
    world.submit(producer, sibling, stranger)
    step = world.launch()
    assert step is not None
    assert step.rows == (producer, stranger)
    assert sibling.pages is None
    assert sibling.state is RequestState.WAITING
    assert world.scheduler.waiting == 1
    assert world.scheduler.waiting_requests() == [sibling]
    assert not world.scheduler.blocked
    assert world.cache.leased_pages == 0
    assert world.scheduler._admission.promised_pages == 1  # the producer's seventh page
    world.commit()
    step = world.launch()
    assert step is not None
    assert step.rows == (producer, stranger, sibling)
    assert sibling.cached_tokens == 24
    world.run()
    world.assert_idle()


def test_each_waits_only_until_what_both_share_is_committed() -> None:
    order = WaitingOrder()
    siblings = SiblingPrefixes(order, page_size=4, step_token_budget=8)
    producer, little, much = (
        make_request(0, LONG),
        make_request(1, [*LONG[:9], *LONG]),
        make_request(2, [*LONG[:17], 1]),
    )
    cache = World(page_size=4).cache
    siblings.begin(producer)
    for request in (little, much):
        order.add(request)
        assert siblings.wait(request, cache.match(request.prompt, ""), step=0)
    for committed, back in ((4, []), (8, [little]), (12, [little]), (16, [little, much])):
        producer.committed = committed
        siblings.advance(producer)
        assert list(order) == back
    assert len(siblings) == 0


def test_two_identical_prompts_in_one_round_are_planned_on_what_is_there_then() -> None:
    world = World(pages=100, page_size=4, slots=8, depth=2)
    world.submit(make_request(0, LONG, 4), make_request(1, LONG, 4))
    assert computed_prompt_tokens(world) == {0: 24, 1: 1}


def test_namespaces_do_not_wait_for_each_other() -> None:
    world = World(pages=100, page_size=4)
    world.submit(make_request(0, LONG, 1, namespace="a"), make_request(1, LONG, 1, namespace="b"))
    step = world.launch()
    assert step is not None
    assert len(step.rows) == 2
    world.commit()


def test_without_a_prefix_cache_nobody_waits() -> None:
    world = World(pages=100, page_size=4, prefix_cache=False)
    world.submit(make_request(0, LONG, 1), make_request(1, LONG, 1))
    step = world.launch()
    assert step is not None
    assert len(step.rows) == 2
    world.commit()


def test_a_few_common_tokens_are_not_worth_a_wait() -> None:
    world = World(pages=100, page_size=16)
    world.submit(make_request(0, LONG[:10], 1), make_request(1, [*LONG[:9], 77], 1))
    step = world.launch()
    assert step is not None
    assert len(step.rows) == 2
    world.commit()


def test_what_is_cached_already_needs_no_wait() -> None:
    world = World(pages=100, page_size=4)
    world.submit(make_request(0, LONG, 1))
    world.run()
    world.submit(make_request(1, LONG, 1), make_request(2, LONG, 1))
    step = world.launch()
    assert step is not None
    assert step.batch.query_lens.tolist() == [1, 1]
    world.commit()


@pytest.mark.parametrize("depth", [1, 2])
def test_waiting_can_be_switched_off(depth: int) -> None:
    """Both compute the prefix; the second's pages turn out to be duplicates while it runs."""
    world = World(pages=100, page_size=4, share=False, depth=depth)
    world.submit(make_request(0, LONG, 6), make_request(1, LONG, 6))
    assert computed_prompt_tokens(world) == {0: 24, 1: 24}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_that_equals_anothers_prompt_and_its_coming_output(page_size: int, depth: int) -> None:
    world = World(pages=200 // page_size, page_size=page_size, share=False, depth=depth)
    first = make_request(0, LONG, 12)
    output = reference(first)
    world.submit(first)
    for _ in range(4):
        world.turn()
    world.submit(make_request(1, [*LONG, *output[:11]], 12))
    world.run()
    for request in world.requests:
        assert request.generated == reference(request)
    world.assert_idle()


@pytest.mark.parametrize("steps_in_flight", [0, 1, 2])
def test_when_the_producer_is_cancelled_the_next_sibling_computes(steps_in_flight: int) -> None:
    world = World(pages=100, page_size=4, slots=4, budget=10, depth=2)
    producer, second, third = (make_request(number, [*LONG, number], 2) for number in range(3))
    world.submit(producer, second, third)
    world.launch()
    for _ in range(steps_in_flight - 1):
        world.launch()
    if not steps_in_flight:
        world.commit()
    assert world.scheduler.waiting_requests() == [second, third]
    world.end(producer)
    step = world.launch()
    assert step is not None
    assert step.rows == (second,)
    assert world.scheduler.waiting_requests() == [third]
    for _ in world.steps():
        pass
    assert second.generated == reference(second)
    assert third.generated == reference(third)
    assert third.cached_tokens == 24
    world.assert_idle()


@pytest.mark.parametrize(("budget", "steps"), [(40, 3), (30, 3)])
def test_a_wait_ends_after_as_many_steps_as_the_prefix_should_take_and_two(budget: int, steps: int) -> None:
    """Steps are counted when they are launched; here none is committed, as if the device stood still."""
    world = World(pages=400, page_size=4, slots=10, budget=budget)
    stranger, producer, sibling = make_request(0, 1, 100), make_request(1, LONG, 1), make_request(2, [*LONG, 2], 1)
    world.submit(stranger, producer, sibling)
    for _ in range(steps):
        world.launch()
        assert list(world.scheduler._siblings) == [sibling]
    step = world.launch()
    assert step is not None
    assert step.rows == (stranger, sibling)
    assert sibling.cached_tokens == 0
    while world.in_flight:
        world.commit()
    world.run()
    assert sibling.generated == reference(sibling)
    assert not world.scheduler._siblings._waited
    world.assert_idle()


def test_the_bound_of_a_wait_grows_with_what_is_shared() -> None:
    order = WaitingOrder()
    siblings = SiblingPrefixes(order, page_size=4, step_token_budget=8)
    producer, sibling = make_request(0, LONG), make_request(1, [*LONG, 1])
    order.add(sibling)
    siblings.begin(producer)
    nothing = World(page_size=4).cache.match(sibling.prompt, "")
    assert siblings.wait(sibling, nothing, step=10)
    for step in range(10, 10 + 3 + 2):
        siblings.expire(step)
        assert order.head() is None
    siblings.expire(15)
    assert order.head() is sibling
    assert not siblings.wait(sibling, nothing, step=15)  # it has waited enough


def test_a_cancelled_sibling_leaves_nothing_behind() -> None:
    world = World(pages=100, page_size=4)
    producer, sibling = make_request(0, LONG, 2), make_request(1, LONG, 2)
    world.submit(producer, sibling)
    world.launch()
    assert world.end(sibling)
    assert world.scheduler.waiting == 0
    world.run()
    assert sibling.generated == []
    siblings = world.scheduler._siblings
    assert not siblings._waits
    assert not siblings._waiters
    assert not siblings._producers
    assert not siblings._next_page
    world.assert_idle()


def test_thousands_that_wait_are_not_looked_at_again_before_their_prefix_is_there() -> None:
    world = World(pages=1000, page_size=4, slots=2, budget=100)
    prompts = [[*range(1, 81), number + 100] for number in range(3000)]
    world.submit(*(make_request(number, prompt, 4) for number, prompt in enumerate(prompts)))
    world.launch()
    assert len(world.scheduler._siblings) == 2999
    matched = []
    match = world.cache.match

    def count(tokens: npt.NDArray[np.int32], namespace: str) -> PrefixMatch:
        matched.append(len(tokens))
        return match(tokens, namespace)

    world.cache.match = count  # type: ignore[method-assign]
    world.launch()
    assert not matched
    world.commit()
    world.launch()
    assert len(matched) == 1  # the one for which there is a slot
    assert len(world.running()) == 2
