"""What a step asks of its kernels: the seam between the step and Triton, or plain torch.

Runs on the engine's CUDA stream; owns nothing. Invariant: `TritonKernels` and `PlainKernels` compute the same, up
to rounding; the second is the reference of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from asyncllm.model.cuda.kv_pages import KVPages
    from asyncllm.model.cuda.step_layout import AskedSections, StepSections, ToldSections
    from asyncllm.model.cuda.tuning import DecodeTile, OneRow, Tiled

__all__ = ["OptionTables", "Projection", "StepKernels"]


class Projection(Protocol):
    """Weights of a product: `PlainLinear`."""

    @property
    def weight(self) -> torch.Tensor:
        """[out, in]."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], or None."""


class OptionTables(NamedTuple):
    """What asking rows name rows of.

    Args:
        masks: int32 [any, ceil(vocab / 32)]: the tokens that are left, packed as in `Batch.masks`.
        additions: float32 [any, vocab], added to logits; -inf bans.
        counts: int16 [any, vocab]: how often a request generated each token; negative (with the highest bit) for those
            of its prompt.
    """

    masks: torch.Tensor
    additions: torch.Tensor
    counts: torch.Tensor


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

    def product(
        self, x: torch.Tensor, linear: Projection, block: Tiled | None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, [rows, out]; with `out`, there."""

    def split_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:
        """Return parts [n, rows, out] that sum to x @ weight.T + bias."""

    def gated_product(self, x: torch.Tensor, linear: Projection, block: Tiled | None) -> torch.Tensor:
        """Return silu(gate) * up, [rows, out], for weight [gate's rows, then up's]."""

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
        """Return the product (gated if asked) of the one row's RMSNorm, [1, out]; with `out`, there."""

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
    ) -> None:
        """Choose each row's token: to results, int32 [2, rows], with whether its logits were finite, and to the pool.

        Rows from `counts[ROWS]` on are left out.
        """

    def choose_asked(
        self,
        logits: torch.Tensor,
        asked: AskedSections[torch.Tensor],
        tables: OptionTables,
        *,
        edited: torch.Tensor,
        token_pool: torch.Tensor,
        results: torch.Tensor,
    ) -> None:
        """Choose asking rows' tokens, as `sample` does, from their logits as edited, and count them in the tables.

        The edited logits, before temperature, are in `edited`, float32 [asking, vocab], afterwards; undefined for
        greedy rows, unless they are `kept`. Where no token is left to choose, the results say that logits were not
        finite; else that stays as it is.
        """

    def tell(
        self, logits: torch.Tensor, told: ToldSections[torch.Tensor], results: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Write what rows are told of their tokens in the results to scores, float32 [rows, 2 + 2 * most].

        That is the logprob and the rank, then ids and then logprobs of the likeliest tokens, in order.
        """
