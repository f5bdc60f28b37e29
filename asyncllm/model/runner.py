"""The runner of a model: batches in, sampled tokens out.

Runs on the engine thread, where `launch` only stages a batch; the step runs on the device. Owns the model and its
device. Invariant: steps run in launch order, and nothing of the model is left after `close`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from asyncllm.model.batch_tensors import BatchTensors
from asyncllm.model.device_model import DeviceModel
from asyncllm.model.option_outcome import OptionStep

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from asyncllm.backend import LaunchedStep
    from asyncllm.model.attention.interface import AttentionBackend
    from asyncllm.model.decoder import Decoder
    from asyncllm.scheduler.batch import Batch

__all__ = ["Device", "ModelRunner"]


class Device(Protocol):
    """Runs steps in launch order: `CPUDevice` or `CUDADevice`."""

    def submit(self, index: int, step: Callable[[], torch.Tensor]) -> LaunchedStep:
        """Run `step`, which gives int64 [2, samples]: token ids, and whether all logits were finite."""

    def close(self) -> None:
        """Wait for all steps. Idempotent."""


class ModelRunner:
    """Run a decoder's steps; a `StepRunner`.

    Args:
        decoder: the model.
        attention: the kernels.
        device: runs the steps; closed with the runner.
        num_slots: most requests at once: rows of the page table.
        max_step_tokens: most tokens of a step.
        page_size: tokens of a page.
        num_pages: pages of the KV pool.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        device: Device,
        *,
        num_slots: int,
        max_step_tokens: int,
        page_size: int,
        num_pages: int,
    ) -> None:
        max_pages = -(-decoder.max_model_tokens // page_size)
        self._device = device
        self._staging = BatchTensors(
            num_slots=num_slots,
            max_pages=max_pages,
            max_step_tokens=max_step_tokens,
            vocab_size=decoder.config.vocab_size,
            pinned=decoder.device.type == "cuda",
        )
        self._model: DeviceModel | None = DeviceModel(
            decoder, attention, num_slots=num_slots, max_pages=max_pages, page_size=page_size, num_pages=num_pages
        )

    def launch(self, batch: Batch) -> LaunchedStep:
        """Stage a batch and have its step run after all that were launched before.

        Raises:
            RuntimeError: the runner is closed.
        """
        if self._model is None:
            raise RuntimeError("the runner is closed")
        staged = self._staging.stage(batch)
        step = self._device.submit(batch.index, functools.partial(self._model.step, staged))
        staged.read_by(step)
        return step if staged.options is None else OptionStep(step, staged.options.outcome)

    def close(self) -> None:
        """Wait for what is launched, then give all memory back. Idempotent."""
        self._device.close()
        self._model = None
