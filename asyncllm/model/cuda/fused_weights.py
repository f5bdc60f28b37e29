"""A decoder's weights as the fused step reads them.

Made on the engine thread; owns nothing but the rope table, the rest is the decoder's. Invariant: all of it lies on
one device, in one dtype of 16 bits, contiguous.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from asyncllm.model.linear import PlainGatedLinear, PlainLinear
from asyncllm.model.rope import RotaryTables

if TYPE_CHECKING:
    from asyncllm.model.decoder import Decoder
    from asyncllm.model.linear import GatedLinear, Linear

__all__ = ["FusedLayer", "FusedWeights"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """One layer."""

    input_norm: torch.Tensor  # [hidden]
    qkv: PlainLinear
    head_norm: torch.Tensor | None  # [2, head_dim], of queries and of keys
    o: PlainLinear
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: PlainLinear  # the gate's rows, then up's
    down: PlainLinear


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedWeights:
    """A whole model.

    Args:
        embedding: [vocab, hidden].
        layers: from the first to the last.
        norm: [hidden].
        lm_head: weight [vocab, hidden].
        cos_sin: float32 [positions, head_dim]: cosines, then sines, of half a head each.
    """

    embedding: torch.Tensor
    layers: tuple[FusedLayer, ...]
    norm: torch.Tensor
    lm_head: PlainLinear
    cos_sin: torch.Tensor

    @classmethod
    def of(cls, decoder: Decoder) -> FusedWeights:
        """Take over a decoder's weights."""
        config = decoder.config
        tables = RotaryTables(
            config.rope,
            head_dim=config.head_dim,
            max_positions=decoder.max_model_tokens,
            dtype=torch.float32,
            device=decoder.device,
        )
        half = config.head_dim // 2
        return cls(
            embedding=decoder.embedding,
            layers=tuple(
                FusedLayer(
                    input_norm=layer.input_norm,
                    qkv=_plain(layer.qkv),
                    head_norm=None if layer.qk_norm is None else layer.qk_norm[[0, -1]],  # alike for all heads
                    o=_plain(layer.o),
                    post_attention_norm=layer.post_attention_norm,
                    gate_up=_plain_gated(layer.gate_up),
                    down=_plain(layer.down),
                )
                for layer in decoder.layers
            ),
            norm=decoder.norm,
            lm_head=_plain(decoder.lm_head),
            cos_sin=torch.cat([tables.cos[:, :half], tables.sin[:, half:]], dim=1).contiguous(),
        )


def _plain(linear: Linear) -> PlainLinear:
    if not isinstance(linear, PlainLinear):
        raise TypeError(f"kernels read weights as they are, not {type(linear).__name__}")
    return linear


def _plain_gated(linear: GatedLinear) -> PlainLinear:
    if not isinstance(linear, PlainGatedLinear):
        raise TypeError(f"kernels read weights as they are, not {type(linear).__name__}")
    return linear.gate_up
