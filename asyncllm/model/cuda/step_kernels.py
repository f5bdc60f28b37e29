"""What a step asks of its kernels: the seam between the step and Triton, or plain torch.

Runs on the engine's CUDA stream; owns nothing. Invariant: `TritonKernels` and `PlainKernels` compute the same, up
to rounding; the second is the reference of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from asyncllm.model.cuda.kv_pages import KVPages
    from asyncllm.model.cuda.step_layout import StepSections
    from asyncllm.model.cuda.tuning import DecodeTile, OneRow, Tiled

__all__ = ["Projection", "StepKernels"]


class Projection(Protocol):
    """Weights of a product: `PlainLinear`."""

    @property
    def weight(self) -> torch.Tensor:
        """[out, in]."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], or None."""


class StepKernels(Protocol):
    """Kernels for one model. All shapes are padded ones; `residual` is float32 [tokens, hidden]."""

    def copy_pages(self, pages: KVPages, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole pages, int32 [copies] each, in every layer."""

    def write_table(self, pages: KVPages, writes: torch.Tensor, counts: torch.Tensor) -> None:
        """Apply `counts[WRITES]` page-table writes, int32 [3 * capacity]."""

    def embed(
        self, embedding: torch.Tensor, inputs: StepSections[torch.Tensor], token_pool: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual: rows of the embedding; a negative id stands for its slot's last sampled token."""

    def norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor | None,
        weight: torch.Tensor,
        *,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add parts [n, tokens, hidden] to the residual, in place, and return its RMSNorm, [tokens, hidden].

        With `places`, int32 [rows], return those tokens' alone; the residual is then undefined.
        """

    def product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:
        """Return x @ weight.T + bias, [rows, out]."""

    def split_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:
        """Return parts [n, rows, out] that sum to x @ weight.T + bias."""

    def gated_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:
        """Return silu(gate) * up, [rows, out], for weight [gate's rows, then up's]."""

    def normed_row(
        self, residual: torch.Tensor, norm: torch.Tensor, linear: Projection, block: OneRow, *, gate: bool = False
    ) -> torch.Tensor:
        """Return the product (gated if asked) of the one row's RMSNorm, [1, out]."""

    def add_row(self, residual: torch.Tensor, x: torch.Tensor, linear: Projection, block: OneRow) -> None:
        """Add x @ weight.T + bias to the residual, one row, in place."""

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
        """Norm and turn heads, store keys and values; return queries [tokens, num_heads * head_dim]."""

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
        """Do what `rope_and_store` and `decode_attention` do, for a step in which every row has one token."""

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
        """Return [tokens, num_heads * head_dim]: rows of one token.

        With `out`, only the first `counts[DECODE_ROWS]` rows are written to it.
        """

    def prompt_attention(
        self, queries: torch.Tensor, *, inputs: StepSections[torch.Tensor], pages: KVPages, layer: int
    ) -> torch.Tensor:
        """Return [tokens, num_heads * head_dim]: rows that are in tiles; the others' places are undefined."""

    def sample(
        self,
        logits: torch.Tensor,
        inputs: StepSections[torch.Tensor],
        token_pool: torch.Tensor,
        results: torch.Tensor,
        *,
        counted: bool,
    ) -> None:
        """Choose each row's token: to results, int32 [2, rows], with whether its logits were finite, and to the pool.

        With `counted`, rows from `counts[ROWS]` on are left out.
        """
