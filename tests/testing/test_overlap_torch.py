"""Overlap changes nothing for a real model either: tokens are those of each request alone, one step after another.

Invariants 2, 3, 6 and 10 of the design, on a tiny random model whose steps, on a thread of their own, read host
buffers, page table and pages as late as they may.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.model.attention.cpu import CPUAttention
from asyncllm.model.cpu_device import CPUDevice
from asyncllm.model.decoder import Decoder
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.runner import ModelRunner
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP
from helpers.batches import Row, make_batch
from helpers.driver import Driver, DriverSettings, make_request
from helpers.lagging_device import LaggingDevice
from helpers.model_steps import TensorSource, make_reference
from helpers.workloads import Job, bounds_of_runs, check_answers, jobs, run_workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from asyncllm.model.runner import Device

EOS = frozenset(range(25))  # an eighth of the vocabulary
CPU = torch.device("cpu")


@functools.cache
def tiny_decoder() -> Decoder:
    model = make_reference()
    source = TensorSource(model.state_dict())
    config = ModelConfig.from_hf(model.config.to_dict())
    return Decoder(config, source, dtype=torch.float32, device=CPU, max_model_tokens=128)


@contextlib.contextmanager
def runner_on(device: Device, bounds: DriverSettings) -> Iterator[ModelRunner]:
    runner = ModelRunner(
        tiny_decoder(),
        CPUAttention(torch.float32),
        device,
        num_slots=bounds.num_slots,
        max_step_tokens=bounds.step_token_budget,
        page_size=bounds.page_size,
        num_pages=bounds.num_pages,
    )
    with contextlib.closing(runner):
        yield runner


@dataclasses.dataclass(frozen=True, slots=True)
class TorchPoison:
    """Poisons KV, page table and token pool of a runner: not finite, out of range, outside the vocabulary."""

    device: LaggingDevice
    runner: ModelRunner

    def pages(self, pages: npt.NDArray[np.int64]) -> None:
        """See `Poison`."""
        model = self.runner._model
        assert model is not None
        for tensor in (*model.kv.keys, *model.kv.values):
            self.device.do_in_order(functools.partial(self._fill, tensor, pages, float("nan")))

    def slots(self, slots: npt.NDArray[np.int64]) -> None:
        """See `Poison`."""
        model = self.runner._model
        assert model is not None
        self.device.do_in_order(lambda: self._fill(model._page_table, slots, 10**6))
        self.device.do_in_order(lambda: self._fill(model._token_pool, slots, 10**6))

    @staticmethod
    @torch.inference_mode()
    def _fill(tensor: torch.Tensor, places: npt.NDArray[np.int64], value: float) -> None:
        tensor[torch.from_numpy(places)] = value


@functools.cache
def answer(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What the model says to a prompt alone, on a device that does not lag, without any sharing."""
    bounds = DriverSettings(prefix_cache="none", page_size=128, num_pages=1, max_pages_per_request=1)
    with runner_on(CPUDevice(), bounds) as runner:
        driver = Driver(runner, bounds, overlap=False, eos_token_ids=EOS)
        request = make_request("alone", prompt, max_tokens)
        driver.submit(request)
        driver.run()
        return tuple(request.generated)


def answers(prompt: Sequence[int], max_tokens: int) -> list[int]:
    return list(answer(tuple(prompt), max_tokens))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@settings(max_examples=25)
@given(bounds=bounds_of_runs, workload=st.lists(jobs(answers), min_size=1, max_size=7))
def test_every_request_gets_the_tokens_that_it_gets_alone(bounds: DriverSettings, workload: list[Job]) -> None:
    bounds = dataclasses.replace(bounds, max_pages_per_request=-(-128 // bounds.page_size))
    device = LaggingDevice()
    with runner_on(device, bounds) as runner:
        poison = TorchPoison(device, runner)
        driver = Driver(runner, bounds, overlap=True, eos_token_ids=EOS, poison=poison)
        check_answers(run_workload(driver, bounds, workload), answers)
        driver.check_all_is_back()


def test_a_host_buffer_is_written_again_only_after_its_step_has_read_it() -> None:
    """Invariant 10: on a device that reads nothing until somebody waits, ten launched steps all keep their inputs."""
    bounds = DriverSettings(num_slots=2, num_pages=8, page_size=16, max_pages_per_request=8)
    table = [(slot, column, 4 * slot + column) for slot in range(2) for column in range(4)]
    batches = [
        make_batch(0, [Row(0, 0, [5, 6, 7]), Row(1, 0, [90, 91])], table=table),
        *(
            make_batch(step, [Row(0, 2 + step, [SAMPLED_LAST_STEP]), Row(1, 1 + step, [100 + step])])
            for step in range(1, 10)
        ),
    ]
    results = []
    for device in (LaggingDevice(until_waited_for=True), CPUDevice()):
        with runner_on(device, bounds) as runner:
            steps = [runner.launch(batch) for batch in batches]
            results.append([step.result().token_ids for step in steps])
    assert results[0] == results[1]
    assert len(set(results[0])) == len(batches)
