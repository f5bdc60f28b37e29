"""The keys and values of every layer, in pages.

Made on the engine thread, read and written by the device's thread alone. Invariant: page `num_pages`, one past the
pool, is the padding page: padded rows write there and nothing reads it.
"""

from __future__ import annotations

import torch

__all__ = ["KVTensors"]


class KVTensors:
    """Own one K and one V tensor a layer; zeroed, so that a masked read of what was never written is harmless.

    One tensor a layer, not views of one for all: compilers copy a whole tensor where a view of it is changed.

    Args:
        num_layers: layers.
        num_pages: pages of the pool; one more is made for padding.
        page_size: tokens of a page.
        num_kv_heads: heads.
        head_dim: width of a head.
        dtype: of the tensors.
        device: where they live.

    Attributes:
        keys: num_layers x [num_pages + 1, page_size, num_kv_heads, head_dim].
        values: likewise.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole pages in every layer: int64 [copies] each; no target is twice there or a source."""
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
