"""What the decoder asks of attention, whichever kernels compute it.

Runs on the device's thread; owns nothing. Invariant: a backend reads pages through the page table only, and nothing
at or past a row's length: what is there may be another request's, and need not be finite.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from asyncllm.scheduler.batch import Ints

__all__ = ["AttentionBackend", "AttentionRows", "StepAttention"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """A step's rows, as attention sees them: rows of one token first, by length; then rows of more.

    Args:
        query_lens: int32 [rows], on the host.
        kv_lens: int32 [rows], on the host: positions of each row after this step, >= query_lens.
        one_token_rows: how many rows, the first ones, have one token; padded rows are among them.
        page_size: tokens of a page.
        page_table: int32 [rows, columns] on the device, each row's pages in order; what lies past a row's length is
            arbitrary but names pages that exist.
        query_starts: int32 [rows + 1] on the device: where each row's queries start, and where the last ones end.
        kv_lens_device: int32 [rows] on the device.
    """

    query_lens: Ints
    kv_lens: Ints
    one_token_rows: int
    page_size: int
    page_table: torch.Tensor
    query_starts: torch.Tensor
    kv_lens_device: torch.Tensor


class StepAttention(Protocol):
    """Attention of one step's rows, in any layer."""

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend causally; this step's keys and values are in their pages already.

        Args:
            queries: [tokens, num_heads, head_dim], row after row.
            keys: [pages, page_size, num_kv_heads, head_dim], a layer's.
            values: likewise.

        Returns:
            [tokens, num_heads, head_dim].
        """


class AttentionBackend(Protocol):
    """Kernels for causal attention over pages."""

    @property
    def name(self) -> str:
        """The name that selects it."""

    @property
    def default_page_size(self) -> int:
        """The page size that it is fastest with."""

    def check_page_size(self, page_size: int) -> None:
        """Refuse a page size that it does not take.

        Raises:
            ConfigurationError: names those that it takes.
        """

    def plan(self, rows: AttentionRows) -> StepAttention:
        """Work out once a step what all layers need."""
