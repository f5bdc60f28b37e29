"""A padded step of the model: from a block of inputs on the device to a block of results.

Runs on the engine's CUDA stream, eagerly or while a graph is captured. Owns the model's weights, KV and the blocks
that steps read and write. Invariant: what a step launches depends on its layout alone, and every address in it
stays the same for the model's life: so a captured step can be replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncllm.model.cuda.tuning import OneRowPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from asyncllm.model.cuda.fused_weights import FusedWeights
    from asyncllm.model.cuda.kv_pages import KVPages
    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.model.cuda.step_layout import StepLayout, StepSections
    from asyncllm.model.cuda.tuning import RowsPlan, StepPlan

__all__ = ["FusedModel", "StepBuffers"]


class StepBuffers:
    """What steps read and write beside KV, at the same place for all of them.

    Args:
        layouts: the steps' padded sizes.
        vocab_size: columns of the logits.
        dtype: of the logits.
        device: where they live.

    Attributes:
        input: int32 [elements of the largest layout].
        logits: [most rows, vocab]; a step's are there until the next one.
        output: int32 [2, most rows]: each row's token and whether its logits were finite.
    """

    def __init__(
        self, layouts: Collection[StepLayout], *, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = max(layout.rows for layout in layouts)
        self.input = torch.zeros(max(layout.size for layout in layouts), dtype=torch.int32, device=device)
        self.logits = torch.zeros((rows, vocab_size), dtype=dtype, device=device)
        self.output = torch.zeros((2, rows), dtype=torch.int32, device=device)


class FusedModel:
    """Run padded steps.

    Args:
        weights: of the model.
        pages: KV, page table and token pool.
        buffers: inputs, logits and results.
        kernels: for launches one after the other (False), and for dependent ones (True).
        plans: how steps of each layout are computed.
        prompt_tiles_only: all attention is `prompt_attention`, whatever the rows.
    """

    def __init__(
        self,
        weights: FusedWeights,
        pages: KVPages,
        buffers: StepBuffers,
        kernels: Mapping[bool, StepKernels],
        plans: Mapping[StepLayout, StepPlan],
        *,
        prompt_tiles_only: bool,
    ) -> None:
        self.pages = pages
        self.buffers = buffers
        self._weights = weights
        self._kernels = kernels
        self._plans = plans
        self._prompt_tiles_only = prompt_tiles_only

    @property
    def layouts(self) -> tuple[StepLayout, ...]:
        """The padded sizes that it can run."""
        return tuple(self._plans)

    def step(self, layout: StepLayout) -> None:
        """Run the step whose inputs are in the buffers: KV, page table, token pool, logits and output are written."""
        self._sample(layout, self._open(layout)[0])

    def step_of_prompts(self, layout: StepLayout) -> Callable[[torch.Tensor], torch.Tensor]:
        """Run a step, and give what its other tokens' logits are made of.

        Returns:
            A function from places of tokens in the step, int64 [n], to the logits after them, [n, vocab]; to be called
            before the next step.
        """
        logits, normed = self._open(layout, all_tokens=True)
        self._sample(layout, logits)
        if normed is None:  # every row has one token
            return logits.__getitem__
        kernels, lm_head = self._kernels[self._plans[layout].dependent], self._weights.lm_head
        return lambda places: kernels.product(normed[places], lm_head, None)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return len(self._weights.lm_head.weight)

    def logits(self, layout: StepLayout) -> torch.Tensor:
        """Return the logits of a step instead of sampling, [rows, vocab]; KV and page table are written."""
        return self._open(layout)[0]

    def _open(self, layout: StepLayout, *, all_tokens: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs, plan = layout.device(self.buffers.input), self._plans[layout]
        self._kernels[False].write_table(self.pages, inputs.table_writes, inputs.counts)
        return self._logits(inputs, layout, plan, self._kernels[plan.dependent], all_tokens=all_tokens)

    def _sample(self, layout: StepLayout, logits: torch.Tensor) -> None:
        inputs = layout.device(self.buffers.input)
        self._kernels[True].sample(logits, inputs, self.pages.token_pool, self.buffers.output)

    def _logits(
        self,
        inputs: StepSections[torch.Tensor],
        layout: StepLayout,
        plan: StepPlan,
        kernels: StepKernels,
        *,
        all_tokens: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits [rows, vocab]; with `all_tokens`, what they are made of where rows have several tokens."""
        weights, out = self._weights, self.buffers.logits[: layout.rows]
        # Not dependent: the page table is read by kernels that wait for nothing but the one before them.
        residual = self._kernels[False].embed(weights.embedding, inputs, self.pages.token_pool)
        if isinstance(plan, OneRowPlan):
            for index in range(len(weights.layers)):
                self._one_row_layer(residual, index, inputs, plan, kernels)
            return kernels.normed_row(residual, weights.norm, weights.lm_head, plan.head, out=out), None
        parts: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            h = kernels.norm(residual, parts, layer.input_norm)  # [tokens, hidden]
            h = self._attention(kernels.product(h, layer.qkv, plan.qkv), index, inputs=inputs, layout=layout, plan=plan)
            parts = kernels.split_product(h, layer.o, plan.o)  # [parts, tokens, hidden], to be added to the residual
            h = kernels.norm(residual, parts, layer.post_attention_norm)
            h = kernels.gated_product(h, layer.gate_up, plan.gate_up)  # [tokens, intermediate]
            parts = kernels.split_product(h, layer.down, plan.down)
        if all_tokens and not layout.decodes:
            normed = kernels.norm(residual, parts, weights.norm)  # [tokens, hidden]
            h = normed[inputs.last_tokens.to(torch.int64)]
            return kernels.product(h, weights.lm_head, plan.head, out=out), normed
        places = None if layout.decodes else inputs.last_tokens
        h = kernels.norm(residual, parts, weights.norm, places=places)  # [rows, hidden]
        return kernels.product(h, weights.lm_head, plan.head, out=out), None

    def _one_row_layer(
        self,
        residual: torch.Tensor,
        index: int,
        inputs: StepSections[torch.Tensor],
        plan: OneRowPlan,
        kernels: StepKernels,
    ) -> None:
        """Run a layer in five kernels: norms are part of the products after them, sums of those before them."""
        layer = self._weights.layers[index]
        qkv = kernels.normed_row(residual, layer.input_norm, layer.qkv, plan.qkv)
        h = kernels.fused_decode_attention(
            qkv,
            head_norm=layer.head_norm,
            cos_sin=self._weights.cos_sin,
            inputs=inputs,
            pages=self.pages,
            layer=index,
            block=plan.decode,
        )
        kernels.add_row(residual, h, layer.o, plan.o)
        h = kernels.normed_row(residual, layer.post_attention_norm, layer.gate_up, plan.gate_up, gate=True)
        kernels.add_row(residual, h, layer.down, plan.down)

    def _attention(
        self,
        qkv: torch.Tensor,
        index: int,
        *,
        inputs: StepSections[torch.Tensor],
        layout: StepLayout,
        plan: RowsPlan,
    ) -> torch.Tensor:
        """Return [tokens, num_heads * head_dim]; the tokens' keys and values are stored."""
        kernels, pages, block = self._kernels[plan.dependent], self.pages, plan.decode
        head_norm, cos_sin = self._weights.layers[index].head_norm, self._weights.cos_sin
        if layout.decodes and plan.fused:
            return kernels.fused_decode_attention(
                qkv, head_norm=head_norm, cos_sin=cos_sin, inputs=inputs, pages=pages, layer=index, block=block
            )
        queries = kernels.rope_and_store(
            qkv, head_norm=head_norm, cos_sin=cos_sin, inputs=inputs, pages=pages, layer=index
        )
        if layout.decodes:
            return kernels.decode_attention(queries, inputs=inputs, pages=pages, layer=index, block=block)
        out = kernels.prompt_attention(queries, inputs=inputs, pages=pages, layer=index)
        if not self._prompt_tiles_only:
            kernels.decode_attention(queries, inputs=inputs, pages=pages, layer=index, block=block, out=out)
        return out
