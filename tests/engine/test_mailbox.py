"""The mailbox between the engine thread and a reader: nothing is missed, whoever comes first."""

from __future__ import annotations

import collections
import itertools
import threading
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from asyncllm.front_desk import FrontDesk
from asyncllm.live_requests import LiveRequests
from asyncllm.mailbox import Mailbox
from asyncllm.request import Request, RequestState, RowSampling
from asyncllm.sampling_params import SamplingParams
from asyncllm.submission import ReadyRequest, StreamSink, Submission
from asyncllm.wakeups import Waiter, Wakes

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.outputs import Token
    from asyncllm.scheduler.scheduler import Scheduler
    from asyncllm.submission import Ended
    from asyncllm.text.advance import TextProgress

READER, ENGINE = "reader", "engine"
HANG_SECONDS = 300.0


class Stage:
    """Lets two threads take turns at marked points, in an order given beforehand."""

    def __init__(self, order: tuple[str, ...]) -> None:
        self._order = collections.deque(order)
        self._condition = threading.Condition()
        self._gone: set[str] = set()

    def turn(self) -> None:
        """Wait for this thread's next turn."""
        name = threading.current_thread().name
        with self._condition:
            self._condition.wait_for(lambda: self._next() in (name, None), timeout=HANG_SECONDS)
            if self._order:
                self._order.popleft()
            self._condition.notify_all()

    def leave(self) -> None:
        """This thread takes no more turns."""
        with self._condition:
            self._gone.add(threading.current_thread().name)
            self._condition.notify_all()

    def _next(self) -> str | None:
        while self._order and self._order[0] in self._gone:
            self._order.popleft()
        return self._order[0] if self._order else None


class StagedDeque(collections.deque[str]):
    """A deque whose reads are marked points."""

    stage: Stage

    def popleft(self) -> str:
        """A marked point, then as the base does."""
        self.stage.turn()
        return super().popleft()

    def __len__(self) -> int:
        self.stage.turn()
        return super().__len__()

    def append(self, item: str) -> None:
        """A marked point, then as the base does."""
        self.stage.turn()
        super().append(item)


class StagedMailbox(Mailbox[str]):
    """A mailbox whose flag and waiter are marked points."""

    stage: Stage

    @property
    def paused(self) -> bool:
        """The flag, behind a marked point."""
        self.stage.turn()
        return self._flag

    @paused.setter
    def paused(self, value: bool) -> None:
        if hasattr(self, "stage"):
            self.stage.turn()
        self._flag = value

    @property
    def _waiter(self) -> Waiter | None:
        self.stage.turn()
        return self._left_waiter

    @_waiter.setter
    def _waiter(self, value: Waiter | None) -> None:
        if hasattr(self, "stage"):
            self.stage.turn()
        self._left_waiter = value


def staged_mailbox(order: tuple[str, ...], *unread: str) -> StagedMailbox:
    mailbox = StagedMailbox()
    events = StagedDeque(unread)
    events.stage = mailbox.stage = Stage(order)
    mailbox._events = events
    return mailbox


def run_both(stage: Stage, reader: Callable[[], object], engine: Callable[[], object]) -> None:
    def body(function: Callable[[], object]) -> None:
        try:
            function()
        finally:
            stage.leave()

    threads = [
        threading.Thread(target=body, args=(function,), name=name, daemon=True)
        for name, function in ((READER, reader), (ENGINE, engine))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def interleavings(reader_turns: int, engine_turns: int) -> list[tuple[str, ...]]:
    total = reader_turns + engine_turns
    return [
        tuple(READER if i in places else ENGINE for i in range(total))
        for places in itertools.combinations(range(total), reader_turns)
    ]


class PauseCounter:
    """All that `check_pauses` asks of a scheduler."""

    def __init__(self) -> None:
        self.paused = 0

    def submit(self, requests: list[Request]) -> None:
        """Let them decode."""
        for request in requests:
            request.state = RequestState.DECODING

    def pause(self, _request: Request) -> None:
        """Count it."""
        self.paused += 1


def live_stream(mailbox: StagedMailbox, scheduler: PauseCounter) -> LiveRequests:
    """Make the engine's side of a stream that decodes, and whose buffer has room for one token."""
    sampling = RowSampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
    request = Request(
        request_id="r", sequence=0, prompt=np.zeros(1, dtype=np.int32), max_tokens=9, sampling=sampling
    )  # fmt: skip
    submission = Submission(
        request_id="r",
        sink=StreamSink(cast("Mailbox[Token | Ended]", mailbox)),
        params=SamplingParams(),
        seed=0,
        prepare=None,
        ready=ReadyRequest(request, cast("TextProgress", None)),
        timeout_seconds=None,
        buffer_tokens=1,
    )
    live = LiveRequests(FrontDesk(max_waiting=None), cast("Scheduler", scheduler), pause_grace_seconds=1.0)
    live.start([submission])
    return live


@pytest.mark.parametrize("order", interleavings(4, 4), ids=lambda order: "".join(name[0] for name in order))
def test_a_pause_is_taken_back_by_whoever_sees_it_second(order: tuple[str, ...]) -> None:
    """In every order of the engine's flag-then-look and the reader's pop-then-look, the request is not stalled."""
    mailbox = staged_mailbox(order, "token")
    scheduler = PauseCounter()
    live = live_stream(mailbox, scheduler)
    resumed: list[str] = []
    mailbox.on_room(lambda: resumed.append("resume"))
    run_both(mailbox.stage, mailbox.pop, live.check_pauses)
    assert len(resumed) <= 1
    assert not scheduler.paused or resumed, "paused for ever: the engine saw no room, the reader saw no pause"


@pytest.mark.parametrize("order", interleavings(3, 2), ids=lambda order: "".join(name[0] for name in order))
def test_an_event_put_while_the_reader_goes_to_sleep_wakes_it(order: tuple[str, ...]) -> None:
    mailbox = staged_mailbox(order)
    got: list[str] = []

    def engine() -> None:
        wakes = Wakes()
        mailbox.put("token", wakes)
        wakes.flush()

    run_both(mailbox.stage, lambda: got.append(mailbox.get_blocking()), engine)
    assert got == ["token"]


def test_events_come_in_the_order_in_which_they_were_put() -> None:
    mailbox: Mailbox[int] = Mailbox()
    wakes = Wakes()
    for number in range(100):
        mailbox.put(number, wakes)
    assert [mailbox.get_blocking() for _ in range(100)] == list(range(100))
    assert mailbox.pop() is None
