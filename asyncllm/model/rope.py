"""Rotary position embedding: the frequencies of every supported rope type, as tables of cosines and sines.

Runs on the engine thread while a model opens; the tables are read by the device afterwards. Invariant: row p of the
tables depends on p and the config alone, never on a request's length, so that cached keys stay right.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from asyncllm.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncllm.model.rope_config import RopeConfig

__all__ = ["RotaryTables", "inverse_frequencies", "rotate"]


class RotaryTables:
    """Hold what positions multiply queries and keys by.

    Args:
        rope: the rope settings.
        head_dim: width of a head.
        max_positions: rows of the tables.
        dtype: of the tables; angles are computed in float32.
        device: where the tables live.

    Attributes:
        cos: [max_positions, head_dim].
        sin: [max_positions, head_dim]; the first half is negated, as `rotate` wants it.

    Raises:
        ConfigurationError: "dynamic" rope beyond its original context. There every frequency depends on the
            sequence's present length, so keys that are cached, or shared, would be wrong as soon as it grows.
    """

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if rope.rope_type == "dynamic" and max_positions > rope.original_max_position_embeddings:
            raise ConfigurationError(
                f"max_model_tokens={max_positions} with rope_type='dynamic': beyond max_position_embeddings="
                f"{rope.original_max_position_embeddings} its frequencies change with a sequence's length, so cached "
                f"keys would be wrong; set max_model_tokens to at most {rope.original_max_position_embeddings}"
            )
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))  # [max_positions, head_dim / 2]
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self.cos = torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype)
        self.sin = torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads x [tokens, heads, head_dim] by rows of the tables, cos and sin [tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    return x * cos + x.roll(half, dims=-1) * sin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions: float32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Stretch long wavelengths whole, leave short ones alone, blend between (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 0 stretched, 1 left alone
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Blend by how often a dimension turns within the original context (Peng et al. 2023)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width
    stretched = ramp.clamp(0.0, 1.0)  # 0 left alone, 1 stretched whole
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies
