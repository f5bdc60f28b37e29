"""Who starts next: passed over often, then priority, then the number drawn at the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import hypothesis.strategies as st
import pytest

from asyncllm.scheduler.waiting_order import WaitingOrder
from helpers.scheduling import make_request

if TYPE_CHECKING:
    from asyncllm.request import Request


def request(sequence: int, priority: int = 0) -> Request:
    return make_request(sequence, 1, priority=priority)


def start(order: WaitingOrder) -> int:
    """Start the head; return its number."""
    head = order.head()
    assert head is not None
    order.remove(head)
    order.note_start(head)
    return head.sequence


def numbers(order: WaitingOrder) -> list[int]:
    return [waiting.sequence for waiting in order]


def test_higher_priority_first_then_the_earlier_call() -> None:
    order = WaitingOrder()
    for sequence, priority in enumerate([0, 1, -1, 1, 0]):
        order.add(request(sequence, priority))
    assert numbers(order) == [1, 3, 0, 4, 2]
    assert [start(order) for _ in range(5)] == [1, 3, 0, 4, 2]
    assert order.head() is None


def test_a_late_arrival_takes_its_place_by_its_number() -> None:
    order = WaitingOrder()
    for sequence in (0, 2, 3):
        order.add(request(sequence))
    order.add(request(1))
    assert [start(order) for _ in range(4)] == [0, 1, 2, 3]


def test_a_request_lets_64_later_ones_pass_and_no_more() -> None:
    order = WaitingOrder()
    order.add(request(0, priority=-1))
    for sequence in range(1, 200):
        order.add(request(sequence))
    assert [start(order) for _ in range(66)] == [*range(1, 65), 0, 65]


def test_among_those_passed_over_priority_still_counts() -> None:
    order = WaitingOrder()
    order.add(request(0, priority=-2))
    order.add(request(1, priority=-1))
    for sequence in range(2, 100):
        order.add(request(sequence))
    assert [start(order) for _ in range(67)] == [*range(2, 66), 1, 0, 66]


def test_earlier_calls_that_start_pass_nobody_over() -> None:
    order = WaitingOrder()
    order.add(request(1000, priority=-1))
    for sequence in range(200):
        order.add(request(sequence))
    assert [start(order) for _ in range(201)] == [*range(200), 1000]


def test_a_request_that_began_before_goes_ahead_of_all_that_never_did() -> None:
    order = WaitingOrder()
    order.add(request(0, priority=5))
    resumed = request(9)
    resumed.last_step = 3
    order.add(resumed)
    assert numbers(order) == [9, 0]


def test_two_requests_with_one_number_are_refused() -> None:
    order = WaitingOrder()
    order.add(request(4))
    with pytest.raises(RuntimeError, match="one sequence number"):
        order.add(request(4))


def test_cancelled_requests_deep_in_the_queue_leave_nothing_behind() -> None:
    order = WaitingOrder()
    order.add(request(0, priority=1))
    for sequence in range(1, 5000):
        cancelled = request(sequence)
        order.add(cancelled)
        order.remove(cancelled)
    assert len(order) == 1
    assert len(order._order) < 100
    assert len(order._fresh) < 100


PASSES = 3


class _Counted:
    """The rule as it is written: count for each waiting request, sort every time."""

    def __init__(self) -> None:
        self.passes: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        self.waiting: set[int] = set()

    def order(self) -> list[int]:
        return sorted(self.waiting, key=lambda s: (self.passes[s] < PASSES, -self.priorities[s], s))

    def start(self) -> int:
        head = self.order()[0]
        self.waiting.remove(head)
        for sequence in self.passes:
            self.passes[sequence] += sequence < head
        return head


@hypothesis.given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(-2, 2)),
            st.tuples(st.just("start"), st.integers(1, 4)),
            st.tuples(st.just("leave"), st.integers(0, 1000)),
            st.tuples(st.just("back"), st.integers(0, 1000)),
        ),
        max_size=60,
    )
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_the_order_is_that_of_counting_for_each_request(events: list[tuple[str, int]]) -> None:
    """Requests also leave (for another's prefix) and come back; they are passed over meanwhile, too."""
    order, counted = WaitingOrder(passes_until_first=PASSES), _Counted()
    requests: dict[int, Request] = {}
    away: list[int] = []
    for event, value in events:
        if event == "submit":
            for _ in range(4):
                new = request(len(requests), (value * (len(requests) + 3)) % 3)
                requests[new.sequence] = new
                counted.passes[new.sequence], counted.priorities[new.sequence] = 0, new.priority
                counted.waiting.add(new.sequence)
                order.add(new)
        elif event == "start":
            for _ in range(min(value, len(order))):
                assert start(order) == counted.start()
        elif event == "leave" and counted.waiting:
            sequence = sorted(counted.waiting)[value % len(counted.waiting)]
            order.remove(requests[sequence])
            counted.waiting.remove(sequence)
            away.append(sequence)
        elif event == "back" and away:
            sequence = away.pop(value % len(away))
            order.add(requests[sequence])
            counted.waiting.add(sequence)
        assert numbers(order) == counted.order()
