"""A model with what it keeps on its device between steps, and the step itself.

Runs on the device: the CPU device's thread, or the engine's CUDA stream. Owns KV, page table and token pool.
Invariant: all of them are read and written by steps alone, in launch order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncllm.model.attention.interface import AttentionRows
from asyncllm.model.kv_tensors import KVTensors
from asyncllm.model.option_sampler import OptionSampler
from asyncllm.model.sampler import sample

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionBackend
    from asyncllm.model.batch_tensors import StagedBatch, StepInputs
    from asyncllm.model.decoder import Decoder

__all__ = ["DeviceModel"]


class DeviceModel:
    """Run a decoder's steps where it lives; zeroed KV and an empty page table to begin with.

    Args:
        decoder: the model.
        attention: the kernels.
        num_slots: rows of the page table; one more is for padded rows.
        max_pages: its columns.
        page_size: tokens of a page.
        num_pages: pages of the KV pool; one more is for padding.

    Attributes:
        kv: the pages of every layer.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        num_pages: int,
    ) -> None:
        config, device = decoder.config, decoder.device
        self._decoder = decoder
        self._attention = attention
        self._options = OptionSampler(num_slots=num_slots + 1)
        with torch.inference_mode():
            self.kv = KVTensors(
                num_layers=config.num_layers,
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=decoder.dtype,
                device=device,
            )
            # All rows name the padding page until they are written; the last one, for padded rows, always does.
            self._page_table = torch.full((num_slots + 1, max_pages), num_pages, dtype=torch.int32, device=device)
            self._token_pool = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # sampled last, by slot

    @torch.inference_mode()
    def step(self, staged: StagedBatch) -> torch.Tensor:
        """Run a step: int64 [2, samples], token ids and whether all of a row's logits were finite."""
        inputs = staged.on_device(self._decoder.device)
        self.write_pages(inputs)
        hidden = self.hidden(staged, inputs)
        logits = self._decoder.head(hidden[inputs.sampled])
        tokens, finite = sample(logits, inputs)
        if staged.options is not None:
            asked = self._options.sample(logits, staged.options, lambda places: self._decoder.head(hidden[places]))
            tokens[asked.places] = asked.tokens
            finite[asked.places] &= asked.left
        self._token_pool[inputs.sampled_slots] = tokens
        return torch.stack([tokens, finite.to(torch.int64)])

    def write_pages(self, inputs: StepInputs) -> None:
        """Apply the step's page-table writes, then its page copies."""
        if inputs.table_writes.numel():
            slots, columns, pages = inputs.table_writes.unbind()
            self._page_table[slots, columns] = pages.to(torch.int32)
        if inputs.page_copies.numel():
            self.kv.copy_pages(*inputs.page_copies.unbind())

    def logits(self, staged: StagedBatch, inputs: StepInputs) -> torch.Tensor:
        """Compute the step's tokens, their keys and values too: logits [samples, vocab]."""
        return self._decoder.head(self.hidden(staged, inputs)[inputs.sampled])

    def hidden(self, staged: StagedBatch, inputs: StepInputs) -> torch.Tensor:
        """Compute the step's tokens, their keys and values too: what logits are made of, [tokens, hidden]."""
        page_size, slots = self.kv.page_size, inputs.slot_of_token
        token_ids = torch.where(inputs.token_ids < 0, self._token_pool[slots], inputs.token_ids)
        pages = self._page_table[slots, inputs.positions // page_size]
        cells = pages * page_size + inputs.positions % page_size  # int64 [tokens]
        columns = -(-int(staged.kv_lens.max()) // page_size)
        rows = AttentionRows(
            query_lens=staged.query_lens,
            kv_lens=staged.kv_lens,
            one_token_rows=staged.one_token_rows,
            page_size=page_size,
            page_table=self._page_table[inputs.slots, :columns],
            query_starts=inputs.query_starts,
            kv_lens_device=inputs.kv_lens,
        )
        return self._decoder(
            token_ids,
            inputs.positions,
            cells,
            kv=self.kv,
            attend=self._attention.plan(rows),
        )
