"""KV pages and page table as one value, for kernels that address all layers.

Made on the engine thread, read and written by the engine's CUDA stream. Owns the tensors. Invariant: page
`num_pages`, one past the pool, takes what padded rows write; the table's last row, theirs, names it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from asyncllm.model.model_config import ModelConfig

__all__ = ["KVPages"]


class KVPages:
    """Own KV, page table and the tokens sampled last.

    Args:
        config: the model's shape.
        num_pages: pages of the pool; one more is for padding.
        page_size: tokens of a page.
        num_slots: rows of the page table; one more is for padding.
        max_model_tokens: most positions of a request.
        dtype: of keys and values.
        device: where they live.

    Attributes:
        kv: [layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim], zeroed: masked reads must be finite.
        table: int32 [num_slots + 1, columns].
        token_pool: int32 [num_slots + 1].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_model_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (config.num_layers, 2, num_pages + 1, page_size, config.num_kv_heads, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        columns = -(-max_model_tokens // page_size)
        self.table = torch.full((num_slots + 1, columns), num_pages, dtype=torch.int32, device=device)
        self.token_pool = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def keys(self, layer: int) -> torch.Tensor:
        """Return a layer's keys, [num_pages + 1, page_size, num_kv_heads, head_dim]."""
        return self.kv[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Return a layer's values, [num_pages + 1, page_size, num_kv_heads, head_dim]."""
        return self.kv[layer, 1]

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a page in all layers."""
        return 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim * dtype.itemsize
