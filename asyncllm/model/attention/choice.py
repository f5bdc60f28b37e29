"""Which attention kernels a model runs on, and which kernels between its products.

Runs on the engine thread while a model opens; owns nothing. Invariant: a backend is imported only if it is chosen.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import torch

from asyncllm.errors import ConfigurationError
from asyncllm.model.layer_ops import PlainLayerOps
from asyncllm.model.native.library import NativeUnavailableError, load_native, why_not_native

if TYPE_CHECKING:
    from asyncllm.model.attention.interface import AttentionBackend
    from asyncllm.model.layer_ops import LayerOps
    from asyncllm.model.model_config import ModelConfig

__all__ = ["choose_kernels"]

log = logging.getLogger("asyncllm")


def choose_kernels(
    name: str, *, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[AttentionBackend, LayerOps]:
    """Make the backend of this name, or the best one for the device, and what goes with it.

    Args:
        name: "auto", "native", "cpu", "flash_attn2" or "torch"; "triton" is no backend but a path of its own.
        model: what it computes.
        device: where the model lives.
        dtype: the model's.

    Raises:
        ConfigurationError: there is none of this name, or it does not work here; names what does.
    """
    if device.type == "cpu":
        return _choose_on_cpu(name, model, dtype)
    return _choose_on_gpu(name, device, dtype), PlainLayerOps()


def _choose_on_cpu(name: str, model: ModelConfig, dtype: torch.dtype) -> tuple[AttentionBackend, LayerOps]:
    if name not in ("auto", "native", "cpu"):
        raise ConfigurationError(f"attention_backend={name!r} does not run on a CPU; 'native' and 'cpu' do")
    reason = why_not_native(model, dtype)
    if name != "cpu" and reason is None:
        try:
            library = load_native(model.head_dim, model.num_heads // model.num_kv_heads)
        except NativeUnavailableError as error:
            reason = str(error)
            if name == "auto":
                log.warning("the native kernels cannot be used: %s; the CPU runs on plain torch", reason)
        else:
            from asyncllm.model.native.native_attention import NativeAttention  # noqa: PLC0415 - only if chosen
            from asyncllm.model.native.native_ops import NativeLayerOps  # noqa: PLC0415 - only if chosen

            return NativeAttention(library), NativeLayerOps(library)
    if name == "native":
        raise ConfigurationError(f"attention_backend='native': the native kernels cannot be used: {reason}")
    from asyncllm.model.attention.cpu import CPUAttention  # noqa: PLC0415 - only if chosen

    return CPUAttention(dtype), PlainLayerOps()


def _choose_on_gpu(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
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
