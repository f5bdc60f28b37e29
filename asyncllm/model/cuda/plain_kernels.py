"""The step's kernels in plain torch: the reference that the Triton ones are tested against.

Runs anywhere; owns nothing. Invariant: written for the reader; row by row where that is plainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from asyncllm.model.cuda.plain_sampling import PlainSampling
from asyncllm.model.cuda.step_layout import Counts

if TYPE_CHECKING:
    from asyncllm.model.cuda.kv_pages import KVPages
    from asyncllm.model.cuda.step_kernels import Projection
    from asyncllm.model.cuda.step_layout import StepSections
    from asyncllm.model.cuda.tuning import DecodeTile, OneRow, Tiled
    from asyncllm.model.model_config import ModelConfig

__all__ = ["PlainKernels"]


class PlainKernels(PlainSampling):
    """Compute what `StepKernels` says.

    Args:
        config: the model's shape.
        dtype: of weights, activations and KV; sums are float32.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype

    def copy_pages(self, pages: KVPages, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy pages in every layer."""
        pages.kv[:, :, targets.long()] = pages.kv[:, :, sources.long()]

    def write_table(self, pages: KVPages, writes: torch.Tensor, counts: torch.Tensor) -> None:
        """Set cells of the page table."""
        slots, columns, values = writes.view(3, -1)[:, : int(counts[Counts.WRITES])]
        pages.table[slots.long(), columns.long()] = values

    def embed(
        self, embedding: torch.Tensor, inputs: StepSections[torch.Tensor], token_pool: torch.Tensor
    ) -> torch.Tensor:
        """Look tokens up."""
        sampled = token_pool[inputs.token_slots.long()]
        token_ids = torch.where(inputs.token_ids < 0, sampled, inputs.token_ids)
        return F.embedding(token_ids.long(), embedding).to(torch.float32)

    def norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor | None,
        weight: torch.Tensor,
        *,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the parts in order, then norm."""
        for part in () if parts is None else parts:
            residual += part
        if places is not None:
            residual = residual[places.long()]
        return self._normed(residual, weight).to(self._dtype)

    def product(
        self,
        x: torch.Tensor,
        linear: Projection,
        block: Tiled | None,  # noqa: ARG002
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply."""
        result = F.linear(x, linear.weight, linear.bias)
        return result if out is None else out.copy_(result)

    def split_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:  # noqa: ARG002
        """Multiply, in one part."""
        return F.linear(x, linear.weight, linear.bias).unsqueeze(0)

    def gated_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:  # noqa: ARG002
        """Multiply, then gate in float32."""
        gate, up = F.linear(x, linear.weight, linear.bias).float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(self._dtype)

    def normed_row(
        self,
        residual: torch.Tensor,
        norm: torch.Tensor,
        linear: Projection,
        block: OneRow,  # noqa: ARG002
        *,
        gate: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm, multiply, gate if asked; all in float32."""
        y = self._multiply(self._normed(residual, norm), linear)
        if gate:
            left, right = y.chunk(2, dim=-1)
            y = F.silu(left) * right
        return y.to(self._dtype) if out is None else out.copy_(y)

    def add_row(self, residual: torch.Tensor, x: torch.Tensor, linear: Projection, block: OneRow) -> None:  # noqa: ARG002
        """Multiply in float32 and add."""
        residual += self._multiply(x, linear)

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        *,
        head_norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        inputs: StepSections[torch.Tensor],
        pages: KVPages,
        layer: int,
    ) -> torch.Tensor:
        """Norm and turn heads in float32, store keys and values."""
        config, tokens = self._config, qkv.shape[0]
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        whole = qkv.view(tokens, heads + 2 * kv_heads, width)
        qk = whole[:, : heads + kv_heads].float()
        if head_norm is not None:
            qk = self._normed(qk, torch.cat([head_norm[:1].expand(heads, -1), head_norm[1:].expand(kv_heads, -1)]))
        positions = inputs.positions.long()
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
        low, high = qk.chunk(2, dim=-1)
        qk = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(qkv.dtype)
        page = pages.table[inputs.token_slots.long(), positions // pages.page_size].long()
        pages.keys(layer)[page, positions % pages.page_size] = qk[:, heads:]
        pages.values(layer)[page, positions % pages.page_size] = whole[:, heads + kv_heads :]
        return qk[:, :heads].reshape(tokens, heads * width)

    def fused_decode_attention(
        self,
        qkv: torch.Tensor,
        *,
        head_norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        inputs: StepSections[torch.Tensor],
        pages: KVPages,
        layer: int,
        block: DecodeTile,
    ) -> torch.Tensor:
        """Do one after the other."""
        queries = self.rope_and_store(
            qkv, head_norm=head_norm, cos_sin=cos_sin, inputs=inputs, pages=pages, layer=layer
        )
        return self.decode_attention(queries, inputs=inputs, pages=pages, layer=layer, block=block)

    def decode_attention(
        self,
        queries: torch.Tensor,
        *,
        inputs: StepSections[torch.Tensor],
        pages: KVPages,
        layer: int,
        block: DecodeTile,  # noqa: ARG002
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend row by row."""
        rows = queries.shape[0] if out is None else int(inputs.counts[Counts.DECODE_ROWS])
        result = torch.empty_like(queries) if out is None else out
        for row in range(rows):
            result[row] = self._attend(queries[row : row + 1], row, inputs, pages, layer)
        return result

    def prompt_attention(
        self, queries: torch.Tensor, *, inputs: StepSections[torch.Tensor], pages: KVPages, layer: int
    ) -> torch.Tensor:
        """Attend row by row, in all rows that have a tile."""
        out = torch.empty_like(queries)
        for row in inputs.tile_rows[: int(inputs.counts[Counts.TILES])].unique().tolist():
            first, end = inputs.query_starts[row : row + 2].tolist()
            out[first:end] = self._attend(queries[first:end], row, inputs, pages, layer)
        return out

    def _attend(
        self, queries: torch.Tensor, row: int, inputs: StepSections[torch.Tensor], pages: KVPages, layer: int
    ) -> torch.Tensor:
        """Attend with a row's tokens, its last ones, in float32: [tokens, num_heads * head_dim]."""
        config, tokens = self._config, queries.shape[0]
        length = int(inputs.kv_lens[row])
        used = pages.table[inputs.slots[row].long(), : -(-length // pages.page_size)].long()
        k = pages.keys(layer)[used].flatten(0, 1)[:length].float().transpose(0, 1)  # [kv_heads, length, head_dim]
        v = pages.values(layer)[used].flatten(0, 1)[:length].float().transpose(0, 1)
        group = config.num_heads // config.num_kv_heads
        q = queries.view(tokens, config.num_kv_heads, group, config.head_dim).float().permute(1, 2, 0, 3)
        scores = q @ k.unsqueeze(1).transpose(-1, -2) * config.head_dim**-0.5  # [kv_heads, group, tokens, length]
        position = torch.arange(length - tokens, length, device=queries.device)
        later = torch.arange(length, device=queries.device) > position.unsqueeze(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        attended: torch.Tensor = weights @ v.unsqueeze(1)
        return attended.permute(2, 0, 1, 3).reshape(tokens, -1).to(queries.dtype)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, float32."""
        return F.rms_norm(x.float(), (x.shape[-1],), None, self._config.rms_norm_eps) * weight.float()

    @staticmethod
    def _multiply(x: torch.Tensor, linear: Projection) -> torch.Tensor:
        return F.linear(x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
