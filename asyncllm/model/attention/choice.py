"""Which attention kernels a model runs on.

Runs on the engine thread while a model opens; owns nothing. Invariant: a backend is imported only if it is chosen.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from asyncllm.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionBackend

__all__ = ["choose_attention"]


def choose_attention(name: str, *, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Make the backend of this name, or the best one for the device.

    Args:
        name: "auto", "cpu", "flash_attn2" or "torch"; "triton" is no backend but a path of its own.
        device: where the model lives.
        dtype: the model's.

    Raises:
        ConfigurationError: there is none of this name, or it does not work here; names what does.
    """
    if device.type == "cpu":
        if name in ("auto", "cpu"):
            from asyncllm.model.attention.cpu import CPUAttention  # noqa: PLC0415 - only if chosen

            return CPUAttention(dtype)
        raise ConfigurationError(f"attention_backend={name!r} does not run on a CPU; 'cpu' does")
    if name not in ("auto", "flash_attn2", "torch"):
        raise ConfigurationError(
            f"attention_backend={name!r} does not run on {device.type}; 'triton', 'flash_attn2' and 'torch' do"
        )
    there = importlib.util.find_spec("flash_attn") is not None
    if name == "torch" or (name == "auto" and (dtype == torch.float32 or not there)):
        from asyncllm.model.attention.gathering import GatheringAttention  # noqa: PLC0415 - only if chosen

        return GatheringAttention()
    if dtype == torch.float32:
        raise ConfigurationError("dtype='float32': FlashAttention 2 computes bfloat16 and float16 only; choose one")
    if not there:
        raise ConfigurationError("attention_backend='flash_attn2' needs the flash-attn package: asyncllm[cuda]")
    from asyncllm.model.attention.flash_attn2 import FlashAttention2  # noqa: PLC0415 - only if chosen

    return FlashAttention2()
