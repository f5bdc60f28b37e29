"""A launched step, whose waits may let the interpreter's lock go: it asks the device once."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from asyncllm.errors import EngineError
from asyncllm.model.cuda.cuda_runner import CUDAStep

if TYPE_CHECKING:
    import torch


class FakeEvent:
    """Counts its waits; may fail."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.waits = 0
        self._error = error

    def synchronize(self) -> None:
        """Return at once, or raise."""
        self.waits += 1
        if self._error is not None:
            raise self._error


def step_of(event: FakeEvent) -> CUDAStep:
    results = np.array([[11, 12, 13, 14], [1, 0, 1, 1]], dtype=np.int32)
    return CUDAStep(7, results, np.array([2, 0, 1]), cast("torch.cuda.Event", event))


def test_results_are_in_the_order_of_the_samples_and_the_device_is_asked_once() -> None:
    event = FakeEvent()
    step = step_of(event)
    step.wait()
    result = step.result()
    assert (result.index, result.token_ids, result.finite) == (7, (13, 11, 12), (True, True, False))
    step.wait()
    assert event.waits == 1


def test_a_device_that_failed_is_told_each_time() -> None:
    step = step_of(FakeEvent(RuntimeError("an illegal memory access")))
    for _ in range(2):
        with pytest.raises(EngineError, match="illegal memory access"):
            step.result()
