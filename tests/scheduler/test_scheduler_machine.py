"""Random lives of requests against a device that lags, with every count checked after every change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from asyncllm.errors import PromptTooLongError
from asyncllm.kv.naive_cache import GROUP_PREFIX
from asyncllm.request import RequestState
from helpers.scheduling import World, follow, make_request, reference

if TYPE_CHECKING:
    from asyncllm.request import Request

STEMS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9], [7, 7, 7, 7, 7, 7])


class SchedulerMachine(RuleBasedStateMachine):
    """Callers come, pause, go on, and leave; steps are launched and committed in between."""

    world: World
    idle_turns: int

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 16]),
        pool_tokens=st.integers(16, 96),
        slots=st.integers(1, 5),
        budget=st.integers(1, 12),
        depth=st.integers(1, 2),
        prefix_cache=st.booleans(),
        share=st.booleans(),
    )
    def open(
        self,
        *,
        page_size: int,
        pool_tokens: int,
        slots: int,
        budget: int,
        depth: int,
        prefix_cache: bool,
        share: bool,
    ) -> None:
        """Begin with nothing."""
        self.world = World(
            pages=max(pool_tokens // page_size, 1),
            page_size=page_size,
            slots=slots,
            budget=slots + budget,
            prefix_cache=prefix_cache,
            share=share,
            depth=depth,
            use_eos=True,
        )
        self.idle_turns = 0

    @rule(
        stem=st.sampled_from(STEMS),
        kept=st.integers(0, 12),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        namespace=st.sampled_from(["", "", "other", GROUP_PREFIX]),
        bound=st.booleans(),
    )
    def submit(
        self,
        *,
        stem: list[int],
        kept: int,
        tail: list[int],
        max_tokens: int,
        priority: int,
        namespace: str,
        bound: bool,
    ) -> None:
        """Call for a completion; a request that can never start is refused."""
        request = make_request(
            len(self.world.requests), stem[:kept] + tail, max_tokens, priority=priority, namespace=namespace
        )
        if bound:
            follow(request)
        cache = self.world.cache
        if -(-request.worst_case_tokens // cache.page_size) > cache.num_pages:
            try:
                self.world.submit(request)
            except PromptTooLongError:
                assert request.state is RequestState.PREPARING
                return
            raise AssertionError("a request larger than the pool was queued")
        self.world.submit(request)

    @precondition(lambda self: len(self.world.in_flight) < self.world.depth)
    @rule()
    def launch(self) -> None:
        """Launch a step."""
        scheduler = self.world.scheduler
        waiting = scheduler.waiting
        step = self.world.launch()
        if step is None and scheduler.running == 0 and waiting:
            raise AssertionError("nothing runs, something waits, and nothing starts")
        if step is not None and step.chunks:
            oldest = step.chunks[0]
            left = self.world.scheduler._policy.step_token_budget - (len(step.rows) - len(step.chunks))
            assert oldest.last or len(oldest.token_ids) == left

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def commit(self) -> None:
        """Run and commit the oldest step."""
        self.world.commit()

    @precondition(lambda self: self.world.in_flight)
    @rule(written=st.booleans(), later_written=st.booleans(), data=st.data())
    def fail(self, *, written: bool, later_written: bool, data: st.DataObject) -> None:
        """Lose the steps in flight, as a device does that raises, then try some of the requests by themselves."""
        self.world.fail(written=written, later_written=later_written)
        again = self._in(RequestState.PREFILLING)
        if not again:
            return
        some = data.draw(st.lists(st.sampled_from(again), unique=True))
        step = self.world.launch(only=some)
        assert (step is None) == (not some)
        if step is not None:
            assert set(step.rows) <= set(some)
            if data.draw(st.booleans()):
                self.world.commit()
                self.world.scheduler.roll_back()
            else:
                self.world.fail(written=data.draw(st.booleans()), later_written=False)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Leave a stream at any moment."""
        self.world.end(data.draw(st.sampled_from(self._live())))

    @precondition(lambda self: self._in(RequestState.DECODING))
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """Stop reading."""
        self.world.pause(data.draw(st.sampled_from(self._in(RequestState.DECODING))))

    @precondition(lambda self: self._in(RequestState.PAUSED))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        """Give way to others while not reading."""
        self.world.park(data.draw(st.sampled_from(self._in(RequestState.PAUSED))))

    @precondition(lambda self: self._in(RequestState.PAUSED, RequestState.PREEMPTED))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Read on."""
        self.world.resume(data.draw(st.sampled_from(self._in(RequestState.PAUSED, RequestState.PREEMPTED))))

    @precondition(lambda self: not self.world.in_flight)
    @rule()
    def reset_prefix_cache(self) -> None:
        """Throw away what nobody leases."""
        self.world.cache.reset_prefix_cache()

    def teardown(self) -> None:
        """Let everybody go on: all that was not cancelled ends with the tokens it gets when alone."""
        if not hasattr(self, "world"):
            return
        for request in self._in(RequestState.PAUSED, RequestState.PREEMPTED):
            self.world.resume(request)
        self.world.run()
        self.world.assert_idle()
        for request in self.world.requests:
            assert request.state is RequestState.FINISHED
            expected = reference(request, use_eos=True)
            if request in self.world.cancelled:
                assert request.generated == expected[: len(request.generated)]
            else:
                assert request.generated == expected

    def _live(self) -> list[Request]:
        return [r for r in self.world.requests if r.state is not RequestState.FINISHED]

    def _in(self, *states: RequestState) -> list[Request]:
        return [r for r in self.world.requests if r.state in states]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
