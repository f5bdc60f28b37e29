"""The lagging device itself: how late it is, and that it shows the faults that it is there for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncllm.testing.faults import StepFaults
from asyncllm.testing.paged_tokens import PagedTokens
from asyncllm.testing.script import HashedTokens, HashScript
from asyncllm.testing.scripted_model import ScriptedRunner
from helpers.batches import Row, make_batch
from helpers.lagging_device import LaggingDevice, LaggingRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.lagging_device import LaggingStep


@pytest.fixture
def lag() -> Iterator[LaggingDevice]:
    device = LaggingDevice()
    yield device
    device.close()


def note(into: list[int], number: int) -> Callable[[], np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """Make a step that notes when it ran."""

    def step() -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        into.append(number)
        return np.ones((2, 1), dtype=np.int64)

    return step


def test_a_step_begins_when_the_next_one_was_launched(lag: LaggingDevice) -> None:
    ran: list[int] = []
    steps = [lag.submit(number, note(ran, number)) for number in range(3)]
    super(type(steps[1]), steps[1]).wait()
    assert ran == [0, 1]
    assert not steps[2].done()


@pytest.mark.parametrize(
    "wait",
    [
        lambda step: step.wait(),
        lambda step: step.result(),
        lambda step: step.call_when_done(lambda: None) and super(type(step), step).wait(),
    ],
)
def test_a_step_begins_when_somebody_waits_for_it(wait: Callable[[LaggingStep], object]) -> None:
    for until_waited_for in (True, False):
        lag = LaggingDevice(until_waited_for=until_waited_for)
        ran: list[int] = []
        steps = [lag.submit(number, note(ran, number)) for number in range(2)]
        wait(steps[1])
        assert ran == [0, 1]
        lag.close()


def test_a_device_may_lag_until_it_is_waited_for() -> None:
    lag = LaggingDevice(until_waited_for=True)
    ran: list[int] = []
    steps = [lag.submit(number, note(ran, number)) for number in range(4)]
    steps[1].wait()
    assert ran == [0, 1]
    lag.close()
    assert ran == [0, 1, 2, 3]


def test_poison_comes_after_the_steps_launched_before_it(lag: LaggingDevice) -> None:
    ran: list[int] = []
    lag.submit(0, note(ran, 0))
    lag.do_in_order(lambda: ran.append(-1))
    lag.submit(1, note(ran, 1)).wait()
    assert ran == [0, -1, 1]


def test_a_batch_that_is_changed_after_its_launch_fails_its_step() -> None:
    pages = PagedTokens(num_pages=2, page_size=4, num_slots=1, max_pages_per_request=2)
    runner = LaggingRunner(ScriptedRunner(pages, HashScript(HashedTokens()), StepFaults()))
    batch = make_batch(0, [Row(0, 0, [1, 2])], table=[(0, 0, 0)])
    step = runner.launch(batch)
    batch.token_ids[0] = 5
    with pytest.raises(AssertionError, match="token_ids was changed after the launch"):
        step.result()
    runner.close()
