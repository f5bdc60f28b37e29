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
    from collections.abc import Callable, Mapping

    from asyncllm.model.cuda.fused_weights import FusedWeights
    from asyncllm.model.cuda.kv_pages import KVPages
    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.model.cuda.step_layout import StepLayout, StepSections
    from asyncllm.model.cuda.tuning import RowsPlan, StepPlan

__all__ = ["FusedModel"]


class FusedModel:
    """Run padded steps.

    Args:
        weights: of the model.
        pages: KV, page table and token pool.
        kernels: for launches one after the other (False), and for dependent ones (True).
        plans: how steps of each layout are computed.
        prompt_tiles_only: all attention is `prompt_attention`, whatever the rows.
    """

    def __init__(
        self,
        weights: FusedWeights,
        pages: KVPages,
        kernels: Mapping[bool, StepKernels],
        plans: Mapping[StepLayout, StepPlan],
        *,
        prompt_tiles_only: bool,
    ) -> None:
        device = pages.kv.device
        self.pages = pages
        self._weights = weights
        self._kernels = kernels
        self._plans = plans
        self._prompt_tiles_only = prompt_tiles_only
        self.input = torch.zeros(max(layout.size for layout in plans), dtype=torch.int32, device=device)
        self.output = torch.zeros(2 * max(layout.rows for layout in plans), dtype=torch.int32, device=device)

    @property
    def layouts(self) -> tuple[StepLayout, ...]:
        """The padded sizes that it can run."""
        return tuple(self._plans)

    def results(self, layout: StepLayout) -> torch.Tensor:
        """Return where a step's results are: int32 [2, rows], tokens and whether their logits were finite."""
        return self.output[: 2 * layout.rows].view(2, layout.rows)

    def step(self, layout: StepLayout) -> torch.Tensor:
        """Run the step whose inputs are in `input`: KV, page table, token pool and `output` are written.

        Returns:
            The logits, [rows, vocab].
        """
        inputs, plan = layout.device(self.input), self._plans[layout]
        kernels = self._kernels[plan.dependent]
        self._kernels[False].write_table(self.pages, inputs.table_writes, inputs.counts)
        logits, _ = self._logits(inputs, layout, plan, kernels)
        results = self.results(layout)
        kernels.sample(logits, inputs, self.pages.token_pool, results, counted=not layout.decodes)
        return logits

    def open_step(self, layout: StepLayout) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Run a step, and give what its results, and those of its other tokens, are made of.

        Returns:
            The logits, [rows, vocab], and a function from places of tokens in the step, int64 [n], to the logits after
            them, [n, vocab]; to be called before the next step.
        """
        inputs, plan = layout.device(self.input), self._plans[layout]
        kernels = self._kernels[plan.dependent]
        self._kernels[False].write_table(self.pages, inputs.table_writes, inputs.counts)
        logits, normed = self._logits(inputs, layout, plan, kernels, all_tokens=True)
        results = self.results(layout)
        kernels.sample(logits, inputs, self.pages.token_pool, results, counted=not layout.decodes)
        if normed is None:  # every row has one token
            return logits, lambda places: logits[places]
        return logits, lambda places: kernels.product(normed[places], self._weights.lm_head, None)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return len(self._weights.lm_head.weight)

    def logits(self, layout: StepLayout) -> torch.Tensor:
        """Return the logits of a step instead of sampling, [rows, vocab]; KV and page table are written."""
        inputs, plan = layout.device(self.input), self._plans[layout]
        self._kernels[False].write_table(self.pages, inputs.table_writes, inputs.counts)
        return self._logits(inputs, layout, plan, self._kernels[plan.dependent])[0]

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
        weights = self._weights
        # Not dependent: the page table is read by kernels that wait for nothing but the one before them.
        residual = self._kernels[False].embed(weights.embedding, inputs, self.pages.token_pool)
        if isinstance(plan, OneRowPlan):
            for index in range(len(weights.layers)):
                self._one_row_layer(residual, index, inputs, plan, kernels)
            return kernels.normed_row(residual, weights.norm, weights.lm_head, plan.head), None
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
            return kernels.product(h, weights.lm_head, plan.head), normed
        places = None if layout.decodes else inputs.last_tokens
        h = kernels.norm(residual, parts, weights.norm, places=places)  # [rows, hidden]
        return kernels.product(h, weights.lm_head, plan.head), None

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
