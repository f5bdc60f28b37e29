"""FlashAttention 2 (Dao 2023) over pages, on NVIDIA GPUs, by the flash-attn package.

Runs on the engine's CUDA stream; owns nothing. Invariant: rows of one token take the split-KV decoding kernel, the
others the variable-length one; neither reads past a row's length.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from asyncllm.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows

__all__ = ["FlashAttention2", "FlashPlan"]

_PAGE_MULTIPLE: Final = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlashPlan:
    """A step's rows; the first `one_token_rows` have one token each."""

    one_token_rows: int
    page_table: torch.Tensor  # int32 [rows, pages]
    kv_lens: torch.Tensor  # int32 [rows]
    query_starts: torch.Tensor  # int32 [rows of more + 1], from 0
    kv_starts: torch.Tensor  # int32 [rows of more + 1], lengths summed
    longest_query: int  # of the rows of more; 0: there are none
    longest_kv: int


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

    def plan(self, rows: AttentionRows, page_size: int) -> FlashPlan:  # noqa: ARG002 - it shows in the keys' shape
        """Split the rows by kernel."""
        split = rows.one_token_rows
        more_lens = rows.kv_lens_device[split:]
        kv_starts = torch.zeros(len(more_lens) + 1, dtype=torch.int32, device=more_lens.device)
        torch.cumsum(more_lens, dim=0, dtype=torch.int32, out=kv_starts[1:])
        return FlashPlan(
            one_token_rows=split,
            page_table=rows.page_table,
            kv_lens=rows.kv_lens_device,
            query_starts=rows.query_starts[split:] - split,
            kv_starts=kv_starts,
            longest_query=int(rows.query_lens[split:].max(initial=0)),
            longest_kv=int(rows.kv_lens[split:].max(initial=0)),
        )

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan) -> torch.Tensor:
        """Attend by one call or two; see `AttentionBackend`."""
        split = plan.one_token_rows
        if not plan.longest_query:
            return self._attend_one_token(queries, keys, values, plan)
        more = flash_attn_varlen_func(
            queries[split:],
            keys,
            values,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.kv_starts,
            max_seqlen_q=plan.longest_query,
            max_seqlen_k=plan.longest_kv,
            causal=True,
            block_table=plan.page_table[split:],
        )
        if not split:
            return torch.as_tensor(more)
        return torch.cat([self._attend_one_token(queries[:split], keys, values, plan), more])

    def _attend_one_token(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan
    ) -> torch.Tensor:
        split = plan.one_token_rows
        out = flash_attn_with_kvcache(
            queries.unsqueeze(1),  # [rows, 1, num_heads, head_dim]
            keys,
            values,
            cache_seqlens=plan.kv_lens[:split],
            block_table=plan.page_table[:split],
            causal=True,
        )
        return torch.as_tensor(out).squeeze(1)
