"""The runner of a model: steps in, sampled tokens out.

`launch` runs on the engine thread and only stages a batch; the step itself runs on the device (its thread, or its
CUDA stream). Owns everything that lives on the device between steps: KV, page table, token pool. Invariant: all of
that is read and written by steps alone, in launch order.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

import torch

from asyncllm.model.attention.interface import AttentionRows
from asyncllm.model.batch_tensors import BatchTensors
from asyncllm.model.kv_tensors import KVTensors
from asyncllm.model.sampler import sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import LaunchedStep
    from asyncllm.model.attention.interface import AttentionBackend, Plan
    from asyncllm.model.batch_tensors import StagedBatch, StepInputs
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
        attention: AttentionBackend[Plan],
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
        self._model: _DeviceModel | None = _DeviceModel(
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
        return step

    def close(self) -> None:
        """Wait for what is launched, then give all memory back. Idempotent."""
        self._device.close()
        self._model = None


class _DeviceModel:
    """A model and what it keeps on its device between steps; used by one thread, or on one stream."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[Plan],
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        num_pages: int,
    ) -> None:
        config, device = decoder.config, decoder.device
        self._decoder = decoder
        self._attention = attention
        with torch.inference_mode():
            self._kv = KVTensors(
                num_layers=config.num_layers,
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=decoder.dtype,
                device=device,
            )
            # Row num_slots is for padded rows and names the padding page.
            self._page_table = torch.full((num_slots + 1, max_pages), num_pages, dtype=torch.int32, device=device)
            self._token_pool = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # sampled last, by slot

    @torch.inference_mode()
    def step(self, staged: StagedBatch) -> torch.Tensor:
        """Run a step: int64 [2, samples], token ids and whether all of a row's logits were finite."""
        inputs = staged.on_device(self._decoder.device)
        self._write_pages(inputs)
        page_size = self._kv.page_size
        in_pool = self._token_pool[inputs.slot_of_token]
        token_ids = torch.where(inputs.token_ids < 0, in_pool, inputs.token_ids)
        pages = self._page_table[inputs.slot_of_token, inputs.positions // page_size]
        cells = pages * page_size + inputs.positions % page_size  # int64 [tokens]
        plan = self._attention.plan(self._rows(staged, inputs), page_size)
        logits = self._decoder(
            token_ids,
            inputs.positions,
            cells,
            inputs.sampled,
            kv=self._kv,
            attend=functools.partial(self._attention.attend, plan=plan),
        )
        tokens, finite = sample(logits, inputs)
        self._token_pool[inputs.sampled_slots] = tokens
        return torch.stack([tokens, finite.to(torch.int64)])

    def _write_pages(self, inputs: StepInputs) -> None:
        """Apply the step's page-table writes, then its page copies."""
        if inputs.table_writes.numel():
            slots, columns, pages = inputs.table_writes.unbind()
            self._page_table[slots, columns] = pages.to(torch.int32)
        if inputs.page_copies.numel():
            self._kv.copy_pages(*inputs.page_copies.unbind())

    def _rows(self, staged: StagedBatch, inputs: StepInputs) -> AttentionRows:
        columns = -(-int(staged.kv_lens.max()) // self._kv.page_size)
        return AttentionRows(
            query_lens=staged.query_lens,
            kv_lens=staged.kv_lens,
            one_token_rows=staged.one_token_rows,
            page_table=self._page_table[inputs.slots, :columns],
            query_starts=inputs.query_starts,
            kv_lens_device=inputs.kv_lens,
        )
