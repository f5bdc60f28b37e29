"""FlashAttention 2 (Dao 2023) over pages, on NVIDIA GPUs, by the flash-attn package.

Runs on the engine's CUDA stream; owns nothing. Invariant: rows of one token take the split-KV decoding kernel, the
others the variable-length one; neither reads past a row's length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from asyncllm.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows

__all__ = ["FlashAttention2"]

_PAGE_MULTIPLE: Final = 256


class FlashAttention2:
    """Call the flash-attn package."""

    name: Final = "flash_attn2"
    default_page_size: Final = _PAGE_MULTIPLE

    def check_page_size(self, page_size: int) -> None:
        """Refuse what is no multiple of 256.

        Raises:
            ConfigurationError: it is none.
        """
        if page_size % _PAGE_MULTIPLE:
            raise ConfigurationError(
                f"page_size={page_size}: FlashAttention 2 needs a multiple of {_PAGE_MULTIPLE}; "
                "leave page_size out, or choose another attention_backend"
            )

    def plan(self, rows: AttentionRows) -> _FlashStep:
        """Split the rows by kernel; see `AttentionBackend`."""
        return _FlashStep(rows)


class _FlashStep:
    """A step's rows; a `StepAttention`."""

    def __init__(self, rows: AttentionRows) -> None:
        split = self._split = rows.one_token_rows
        self._page_table, self._kv_lens = rows.page_table, rows.kv_lens_device
        self._longest_query = int(rows.query_lens[split:].max(initial=0))  # of the rows of more; 0: there are none
        self._longest_kv = int(rows.kv_lens[split:].max(initial=0))
        self._query_starts = rows.query_starts[split:] - split
        self._kv_starts = torch.zeros_like(self._query_starts)
        torch.cumsum(self._kv_lens[split:], dim=0, out=self._kv_starts[1:])

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend by one call or two; see `StepAttention`."""
        out = []
        if self._split:
            out.append(self._one_token_rows(queries[: self._split], keys, values))
        if self._longest_query:
            out.append(self._other_rows(queries[self._split :], keys, values))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _one_token_rows(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attn_with_kvcache(
            queries.unsqueeze(1),  # [rows, 1, num_heads, head_dim]
            keys,
            values,
            cache_seqlens=self._kv_lens[: self._split],
            block_table=self._page_table[: self._split],
            causal=True,
        )
        return out.squeeze(1)

    def _other_rows(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            queries,
            keys,
            values,
            cu_seqlens_q=self._query_starts,
            cu_seqlens_k=self._kv_starts,
            max_seqlen_q=self._longest_query,
            max_seqlen_k=self._longest_kv,
            causal=True,
            block_table=self._page_table[self._split :],
        )
        return out
