"""Attention on the CPU: reproducible in float32, fast in everything shorter.

Runs on the device's thread; owns a kernel. Invariant: pages may have every size; with 256 tokens most requests lie
in one piece of memory, which is read where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from asyncllm.model.attention.fused import FusedAttention
from asyncllm.model.attention.in_order import InOrderAttention

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionRows, StepAttention

__all__ = ["CPUAttention"]


class CPUAttention:
    """An `AttentionBackend` of torch's own operations.

    Args:
        dtype: of queries, keys and values.
    """

    name: Final = "cpu"
    default_page_size: Final = 256

    def __init__(self, dtype: torch.dtype) -> None:
        self._kernel: InOrderAttention | FusedAttention = (
            InOrderAttention() if dtype == torch.float32 else FusedAttention(dtype)
        )

    def check_page_size(self, page_size: int) -> None:
        """Take every page size."""

    def plan(self, rows: AttentionRows) -> StepAttention:
        """Find out where each row's keys are; see `AttentionBackend`."""
        return self._kernel.plan(rows)
