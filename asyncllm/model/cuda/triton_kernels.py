"""The step's kernels in Triton, and how each is launched.

Runs on the engine's CUDA stream; owns the memory in which split attention meets. Invariant: no launch depends on
values in device memory, so that what is captured once is right for every step of the same padded size.

Long because a launch names each of its kernel's arguments; there is nothing else in it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from asyncllm.model.cuda.kernels.decode_attention import decode_attention
from asyncllm.model.cuda.kernels.embed import embed_tokens, write_page_table
from asyncllm.model.cuda.kernels.gate import silu_and_multiply
from asyncllm.model.cuda.kernels.linear import one_row_product, tiled_product
from asyncllm.model.cuda.kernels.norm import add_rms_norm
from asyncllm.model.cuda.kernels.pages import copy_pages
from asyncllm.model.cuda.kernels.prompt_attention import prompt_attention
from asyncllm.model.cuda.kernels.rope import rope_and_store
from asyncllm.model.cuda.launching import power_above
from asyncllm.model.cuda.step_layout import Counts
from asyncllm.model.cuda.triton_sampling import TritonSampling
from asyncllm.model.cuda.tuning import PromptTile, invariant_block

if TYPE_CHECKING:
    from asyncllm.model.cuda.kv_pages import KVPages
    from asyncllm.model.cuda.step_kernels import Projection
    from asyncllm.model.cuda.step_layout import StepSections
    from asyncllm.model.cuda.tuning import DecodeTile, OneRow, Tiled
    from asyncllm.model.model_config import ModelConfig

__all__ = ["AttentionScratch", "TritonKernels", "linear_into", "prompt_tile_tokens"]

_LOG2_E: Final = math.log2(math.e)
_WIDE: Final = 2048  # a row that wants more than four warps


class AttentionScratch:
    """Where the parts of split attention meet; at its greatest size from the start, since graphs keep its address.

    Args:
        config: the model's shape.
        rows: most rows of a step.
        parts: most rows times splits of a step.
        device: where it lives.
    """

    def __init__(self, config: ModelConfig, *, rows: int, parts: int, device: torch.device) -> None:
        members = parts * config.num_kv_heads * group_size(config)
        self.values = torch.empty(members * config.head_dim, dtype=torch.float32, device=device)
        self.highest = torch.empty(members, dtype=torch.float32, device=device)
        self.totals = torch.empty(members, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * config.num_kv_heads, dtype=torch.int32, device=device)


def group_size(config: ModelConfig) -> int:
    """Return the query heads of a kv head, rounded up to a power of two."""
    return 1 << (config.num_heads // config.num_kv_heads - 1).bit_length()


def prompt_tile_tokens(config: ModelConfig) -> int:
    """Return how many tokens a tile of prompt attention has."""
    return PromptTile().block // group_size(config)


class TritonKernels(TritonSampling):
    """Launch what `StepKernels` says.

    Args:
        config: the model's shape.
        dtype: of weights, activations and KV; of 16 bits.
        scratch: of split attention; shared by all instances for one model.
        dependent: let each kernel start before the one before has ended, where it can wait for it by itself.
        invariant: take the same tiles for every number of rows.
        compile_only: launch nothing, only have the kernels compiled.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        scratch: AttentionScratch,
        *,
        dependent: bool = False,
        invariant: bool = False,
        compile_only: bool = False,
    ) -> None:
        super().__init__(dependent=dependent, compile_only=compile_only)
        self._config = config
        self._dtype = dtype
        self._scratch = scratch
        self._invariant = invariant
        self._prompt_tile = PromptTile()
        self._group = group_size(config)
        self._scale = config.head_dim**-0.5 * _LOG2_E

    def copy_pages(self, pages: KVPages, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole pages in every layer."""
        sides = pages.kv.flatten(0, 1)  # [2 * layers, pages, ...]
        elements = sides[0, 0].numel()
        grid = (len(sources), len(sides))
        self._launch(copy_pages, grid, sides, sources, targets, sides.shape[1], warps=8, ELEMENTS=elements, BLOCK=4096)

    def write_table(self, pages: KVPages, writes: torch.Tensor, counts: torch.Tensor) -> None:
        """Apply page-table writes."""
        capacity = len(writes) // 3
        self._launch(
            write_page_table,
            (-(-capacity // 128),),
            pages.table,
            writes,
            counts,
            pages.table.shape[1],
            warps=4,
            CAPACITY=capacity,
            BLOCK=128,
        )

    def embed(
        self, embedding: torch.Tensor, inputs: StepSections[torch.Tensor], token_pool: torch.Tensor
    ) -> torch.Tensor:
        """Look tokens up."""
        tokens, hidden = len(inputs.token_ids), embedding.shape[1]
        residual = torch.empty((tokens, hidden), dtype=torch.float32, device=embedding.device)
        self._launch(
            embed_tokens,
            (tokens, -(-hidden // 1024)),
            embedding,
            inputs.token_ids,
            inputs.token_slots,
            token_pool,
            residual,
            warps=4,
            HIDDEN=hidden,
            BLOCK=1024,
        )
        return residual

    def norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor | None,
        weight: torch.Tensor,
        *,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the parts in order, then norm."""
        tokens, width = residual.shape
        rows = tokens if places is None else len(places)
        out = torch.empty((rows, width), dtype=self._dtype, device=residual.device)
        self._launch(
            add_rms_norm,
            (rows,),
            residual,
            residual if parts is None else parts,
            weight,
            out,
            _or_unused(places, residual),
            tokens,
            self._config.rms_norm_eps,
            warps=8 if width > _WIDE else 4,
            WIDTH=width,
            BLOCK=power_above(width),
            PARTS=0 if parts is None else len(parts),
            GATHER=places is not None,
            PDL=self._dependent,
        )
        return out

    def product(
        self, x: torch.Tensor, linear: Projection, block: Tiled | None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply."""
        if self._invariant:
            block = invariant_block(*linear.weight.shape)
        if block is None:
            return linear_into(out, x, linear)
        if out is None:
            out = torch.empty((len(x), len(linear.weight)), dtype=self._dtype, device=x.device)
        self._tiled(x, linear, out.unsqueeze(0), block, gate=False)
        return out

    def split_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:
        """Multiply, in as many parts as the block says."""
        if block is None or self._invariant:
            return self.product(x, linear, block).unsqueeze(0)
        shape = (block.splits, len(x), len(linear.weight))
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._tiled(x, linear, out, block, gate=False)
        return out

    def gated_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:
        """Multiply and gate, in one kernel or two."""
        inner = len(linear.weight) // 2
        out = torch.empty((len(x), inner), dtype=self._dtype, device=x.device)
        if block is None or self._invariant:
            self._launch(
                silu_and_multiply,
                (len(x), -(-inner // 1024)),
                self.product(x, linear, None),
                out,
                warps=4,
                WIDTH=inner,
                BLOCK=1024,
                PDL=self._dependent,
            )
        else:
            self._tiled(x, linear, out.unsqueeze(0), block, gate=True)
        return out

    def normed_row(
        self,
        residual: torch.Tensor,
        norm: torch.Tensor,
        linear: Projection,
        block: OneRow,
        *,
        gate: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and multiply in one kernel."""
        outputs = len(linear.weight) // (2 if gate else 1)
        if out is None:
            out = torch.empty((1, outputs), dtype=self._dtype, device=residual.device)
        self._one_row(residual, norm, linear, out, block, gate=gate)
        return out

    def add_row(self, residual: torch.Tensor, x: torch.Tensor, linear: Projection, block: OneRow) -> None:
        """Multiply and add in one kernel."""
        self._one_row(x, None, linear, residual, block, gate=False)

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
        """Norm and turn heads, store keys and values; a few heads of one kind a program."""
        config, tokens = self._config, len(qkv)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        queries = torch.empty((tokens, heads * config.head_dim), dtype=self._dtype, device=qkv.device)
        block = min(4, math.gcd(heads, kv_heads) & -math.gcd(heads, kv_heads))
        self._launch(
            rope_and_store,
            (tokens, (heads + 2 * kv_heads) // block),
            qkv,
            _or_unused(head_norm, qkv),
            cos_sin,
            inputs.positions,
            inputs.token_slots,
            pages.table,
            pages.table.shape[1],
            queries,
            pages.keys(layer),
            pages.values(layer),
            config.rms_norm_eps,
            warps=2,
            Q_HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=config.head_dim,
            PAGE=pages.page_size,
            BLOCK=block,
            NORM=head_norm is not None,
            PDL=self._dependent,
        )
        return queries

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
        """Norm, turn, store and attend in one kernel."""
        width = self._config.num_heads * self._config.head_dim
        out = torch.empty((len(qkv), width), dtype=self._dtype, device=qkv.device)
        self._decode(
            qkv,
            out,
            head_norm=head_norm,
            cos_sin=cos_sin,
            inputs=inputs,
            pages=pages,
            layer=layer,
            block=block,
            fused=True,
            counted=False,
        )
        return out

    def decode_attention(
        self,
        queries: torch.Tensor,
        *,
        inputs: StepSections[torch.Tensor],
        pages: KVPages,
        layer: int,
        block: DecodeTile,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with rows of one token."""
        counted = out is not None
        if out is None:
            out = torch.empty_like(queries)
        self._decode(
            queries,
            out,
            head_norm=None,
            cos_sin=queries,  # not read
            inputs=inputs,
            pages=pages,
            layer=layer,
            block=block,
            fused=False,
            counted=counted,
        )
        return out

    def prompt_attention(
        self, queries: torch.Tensor, *, inputs: StepSections[torch.Tensor], pages: KVPages, layer: int
    ) -> torch.Tensor:
        """Attend with the rows that are in tiles."""
        config, shape = self._config, self._prompt_tile
        out = torch.empty_like(queries)
        self._launch(
            prompt_attention,
            (len(inputs.tile_rows), config.num_kv_heads),
            queries,
            inputs.slots,
            inputs.kv_lens,
            inputs.query_starts,
            inputs.tile_rows,
            inputs.tile_firsts,
            inputs.counts[Counts.TILES :],
            pages.table,
            pages.table.shape[1],
            pages.keys(layer),
            pages.values(layer),
            out,
            self._scale,
            warps=shape.warps,
            stages=shape.stages,
            Q_HEADS=config.num_heads,
            KV_HEADS=config.num_kv_heads,
            HEAD_DIM=config.head_dim,
            PAGE=pages.page_size,
            GROUP=self._group,
            BLOCK=shape.block,
            TILE=shape.tile,
        )
        return out

    def _decode(
        self,
        source: torch.Tensor,
        out: torch.Tensor,
        *,
        head_norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        inputs: StepSections[torch.Tensor],
        pages: KVPages,
        layer: int,
        block: DecodeTile,
        fused: bool,
        counted: bool,
    ) -> None:
        config, scratch, rows = self._config, self._scratch, len(inputs.slots)
        self._launch(
            decode_attention,
            (config.num_kv_heads, block.splits, rows),
            source,
            _or_unused(head_norm, source),
            cos_sin,
            inputs.slots,
            inputs.kv_lens,
            inputs.counts[Counts.DECODE_ROWS :],
            pages.table,
            pages.table.shape[1],
            pages.keys(layer),
            pages.values(layer),
            scratch.values,
            scratch.highest,
            scratch.totals,
            scratch.arrived,
            out,
            config.rms_norm_eps,
            self._scale,
            warps=block.warps,
            stages=block.stages,
            Q_HEADS=config.num_heads,
            KV_HEADS=config.num_kv_heads,
            HEAD_DIM=config.head_dim,
            PAGE=pages.page_size,
            TILE=block.tile,
            SPLITS=block.splits,
            LEAST=block.least,
            GROUP=self._group,
            FUSED=fused,
            NORM=head_norm is not None,
            COUNTED=counted,
            PDL=self._dependent,
        )

    def _one_row(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        linear: Projection,
        out: torch.Tensor,
        block: OneRow,
        *,
        gate: bool,
    ) -> None:
        outputs, inputs = linear.weight.shape
        outputs //= 2 if gate else 1
        self._launch(
            one_row_product,
            (outputs // block.rows,),
            x,
            linear.weight,
            _or_unused(linear.bias, linear.weight),
            _or_unused(norm, linear.weight),
            out,
            outputs,
            self._config.rms_norm_eps,
            warps=block.warps,
            INPUTS=inputs,
            ROWS=block.rows,
            TILE=block.tile,
            NORM=norm is not None,
            GATE=gate,
            ADD=norm is None,
            BIAS=linear.bias is not None,
            PDL=self._dependent,
        )

    def _tiled(self, x: torch.Tensor, linear: Projection, out: torch.Tensor, block: Tiled, *, gate: bool) -> None:
        outputs = out.shape[-1]
        self._launch(
            tiled_product,
            (-(-outputs // block.width), len(out), -(-len(x) // block.block)),
            x,
            linear.weight,
            _or_unused(linear.bias, linear.weight),
            out,
            len(x),
            outputs,
            warps=block.warps,
            stages=block.stages,
            INPUTS=linear.weight.shape[1],
            BLOCK=block.block,
            WIDTH=block.width,
            TILE=block.tile,
            SPLITS=len(out),
            GATE=gate,
            BIAS=linear.bias is not None,
            CUT=outputs % block.width != 0,
            PDL=self._dependent,
        )


def linear_into(out: torch.Tensor | None, x: torch.Tensor, linear: Projection) -> torch.Tensor:
    """Return torch's x @ weight.T + bias; with `out`, there."""
    if out is None:
        return F.linear(x, linear.weight, linear.bias)
    if linear.bias is None:
        return torch.mm(x, linear.weight.t(), out=out)
    return torch.addmm(linear.bias, x, linear.weight.t(), out=out)


def _or_unused(given: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """Return what a kernel gets for a tensor that it may not need: a pointer of some kind."""
    return unused if given is None else given
