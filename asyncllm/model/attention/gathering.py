"""Attention in plain torch over gathered pages, row by row: what a GPU without any kernels of its own runs on.

Runs on the engine's CUDA stream; owns nothing. Invariant: correct for every shape and dtype; meant for machines
without a compiler and without the flash-attn package, and for float32, not for speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows

__all__ = ["GatheringAttention"]

_PAGE_SIZE: Final = 64


class GatheringAttention:
    """Gather each row's keys and values, then call torch's attention."""

    name: Final = "torch"
    default_page_size: Final = _PAGE_SIZE

    def check_page_size(self, page_size: int) -> None:
        """Take any."""

    def plan(self, rows: AttentionRows) -> _GatheringStep:
        """Keep the rows; see `AttentionBackend`."""
        return _GatheringStep(rows)


class _GatheringStep:
    """A step's rows; a `StepAttention`."""

    def __init__(self, rows: AttentionRows) -> None:
        self._page_table, self._page_size = rows.page_table, rows.page_size
        self._lens = list(zip(rows.query_lens.tolist(), rows.kv_lens.tolist(), strict=True))

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend one row after the other; see `StepAttention`."""
        out, start = torch.empty_like(queries), 0
        for row, (query_len, kv_len) in enumerate(self._lens):
            pages = self._page_table[row, : -(-kv_len // self._page_size)]
            k, v = (side[pages].flatten(0, 1)[:kv_len].transpose(0, 1) for side in (keys, values))
            q = queries[start : start + query_len].transpose(0, 1)  # [num_heads, query_len, head_dim]
            positions = torch.arange(kv_len, device=queries.device)
            seen = positions <= positions[kv_len - query_len :].unsqueeze(1)  # [query_len, kv_len]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            out[start : start + query_len] = attended.transpose(0, 1)
            start += query_len
        return out
