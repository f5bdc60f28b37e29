"""The CPU as a device: order, callbacks, failures, and how many threads its operations use."""

from __future__ import annotations

import functools
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from asyncllm.model.cpu_device import CPUDevice
from asyncllm.model.cpu_threads import limit_torch_threads
from asyncllm.scheduler.batch import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterator

GUARD = 300.0


@pytest.fixture
def device() -> Iterator[CPUDevice]:
    device = CPUDevice()
    yield device
    device.close()


def sampled(token: int) -> torch.Tensor:
    """Give what a step that sampled one token gives."""
    return torch.tensor([[token], [1]], device="cpu")


def test_steps_run_in_launch_order_on_one_thread_that_is_not_the_callers(device: CPUDevice) -> None:
    ran: list[tuple[int, int]] = []

    def step(index: int) -> torch.Tensor:
        ran.append((index, threading.get_ident()))
        return sampled(index)

    steps = [device.submit(index, functools.partial(step, index)) for index in range(20)]
    results = [step.result() for step in steps]
    assert results == [StepResult(index=index, token_ids=(index,), finite=(True,)) for index in range(20)]
    assert [index for index, _ in ran] == list(range(20))
    assert {ident for _, ident in ran} != {threading.get_ident()}
    assert len({ident for _, ident in ran}) == 1


def test_launching_does_not_wait(device: CPUDevice) -> None:
    go = threading.Event()
    step = device.submit(0, lambda: sampled(int(go.wait(GUARD))))
    assert not step.done()
    go.set()
    step.wait()
    assert step.done()


def test_a_callback_comes_when_the_step_is_done_or_at_once(device: CPUDevice) -> None:
    go, called = threading.Event(), queue.SimpleQueue[bool]()
    step = device.submit(0, lambda: sampled(int(go.wait(GUARD))))
    assert step.call_when_done(lambda: called.put(step.done()))
    assert called.empty()
    go.set()
    assert called.get(timeout=GUARD), "called before the step was done"
    step.call_when_done(lambda: called.put(True))
    assert called.get_nowait()


def test_what_a_step_raises_is_raised_by_its_result_and_until_that_is_read_nothing_runs(device: CPUDevice) -> None:
    def fail() -> torch.Tensor:
        raise FloatingPointError("this step")

    bad, behind = device.submit(0, fail), device.submit(1, lambda: sampled(5))
    bad.wait()
    with pytest.raises(FloatingPointError, match="this step"):
        bad.result()
    with pytest.raises(RuntimeError, match="step 1 was not run"):
        behind.result()
    assert device.submit(2, lambda: sampled(5)).result().token_ids == (5,)


def test_close_runs_what_is_queued_and_may_be_called_again() -> None:
    device = CPUDevice()
    steps = [device.submit(index, functools.partial(sampled, index)) for index in range(5)]
    device.close()
    device.close()
    assert [step.done() for step in steps] == [True] * 5
    with pytest.raises(RuntimeError, match="closed"):
        device.submit(5, lambda: sampled(5))


def test_a_done_step_holds_nothing_of_what_it_read(device: CPUDevice) -> None:
    import weakref

    class Inputs:
        def read(self) -> torch.Tensor:
            return sampled(1)

    inputs = Inputs()
    gone = weakref.ref(inputs)
    step = device.submit(0, inputs.read)
    step.wait()
    del inputs
    device.submit(1, lambda: sampled(1)).wait()  # the thread has moved on
    assert gone() is None


def test_a_thread_limit_is_the_devices_own() -> None:
    """In a process of its own: counts must be as torch sets them up, not as another test left them."""
    code = """
import functools, threading, torch
from asyncllm.model.cpu_device import CPUDevice
from asyncllm.model.cpu_threads import limit_torch_threads

def count_elsewhere():
    counts = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start(); thread.join()
    return counts[0]

torch.set_num_threads(2)
device = CPUDevice(functools.partial(limit_torch_threads, 3))
step = device.submit(0, lambda: torch.tensor([[torch.get_num_threads()], [1]]))
assert step.result().token_ids == (3,), step.result()
assert torch.get_num_threads() == 2
assert count_elsewhere() == 2
step = device.submit(1, lambda: torch.tensor([[torch.get_num_threads()], [1]]))
assert step.result().token_ids == (3,), step.result()
device.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_limiting_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    thread = threading.Thread(target=limit_torch_threads, args=(torch.get_num_threads(),))
    thread.start()
    thread.join()
    assert threading.active_count() == before
