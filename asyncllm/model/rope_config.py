"""How positions enter a model: rope's settings, read from either layout of config.json.

Runs anywhere, imports no torch; owns nothing. Invariant: every field of a `RopeConfig` is resolved, none is left to
a default of its reader.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final, Literal, get_args

from asyncllm.errors import ModelLoadError
from asyncllm.model.config_values import Config, flag, integer, number, short

__all__ = ["RopeConfig", "RopeType"]

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_DEFAULT_THETA: Final = 10000.0
_LEAST_THETA: Final = 1.001  # yarn divides by its logarithm
_LEAST: Final = 1e-6  # of values that are divided by


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Say how positions turn queries and keys; a field whose rope types are named matters to them only.

    Args:
        rope_type: the frequencies' rule.
        theta: base of the frequencies, > 1.
        factor: by how much the context was stretched, >= 1 (linear, dynamic, llama3, yarn).
        low_freq_factor: llama3: wavelengths above original / this are stretched whole.
        high_freq_factor: llama3: wavelengths below original / this are left alone.
        original_max_position_embeddings: context in tokens before stretching (dynamic, llama3, yarn).
        attention_factor: what cos and sin are multiplied by (yarn; 1 for all others).
        beta_fast: yarn: rotations above which a dimension is left alone.
        beta_slow: yarn: rotations below which a dimension is stretched whole.
        truncate: yarn: whether the range between them is rounded outwards to whole dimensions.
    """

    rope_type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: Config, *, max_positions: int, head_dim: int) -> RopeConfig:
        """Read transformers 5's `rope_parameters`, or transformers 4's `rope_theta` and `rope_scaling`.

        Raises:
            ModelLoadError: the rope type is unknown, a value is missing or makes no sense.
        """
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise ModelLoadError(f"rope settings {short(given)} are not implemented; one flat mapping is")
        if given.get("partial_rotary_factor") not in (None, 1) or given.get("mrope_section") is not None:
            raise ModelLoadError(f"partial_rotary_factor or mrope_section in {short(given)} is not implemented")
        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type not in get_args(RopeType):
            supported = ", ".join(get_args(RopeType))
            raise ModelLoadError(f"rope_type={short(rope_type)} is not implemented; supported are {supported}")
        if rope_type == "dynamic" and head_dim <= 2:  # noqa: PLR2004 - its exponent divides by head_dim - 2
            raise ModelLoadError(f"rope_type='dynamic' is not defined for head_dim={head_dim}")
        theta_of = given if given.get("rope_theta") is not None else config
        rope = cls(
            rope_type=rope_type,
            theta=number(theta_of, "rope_theta", low=_LEAST_THETA, below=1e30, default=_DEFAULT_THETA),
            factor=1.0 if rope_type == "default" else number(given, "factor", low=1.0, below=1e6),
            original_max_position_embeddings=max_positions,
        )
        if rope_type == "llama3":
            return _llama3(rope, given, _original_positions(config, given, max_positions))
        if rope_type == "yarn":
            return _yarn(rope, given, _original_positions(config, given, max_positions))
        return rope


def _original_positions(config: Config, given: Config, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    return integer(config if config.get(key) is not None else given, key, high=2**31 - 1, default=max_positions)


def _llama3(rope: RopeConfig, given: Config, original: int) -> RopeConfig:
    low = number(given, "low_freq_factor", low=_LEAST, below=1e6)
    high = number(given, "high_freq_factor", low=_LEAST, below=1e6)
    if low >= high:
        raise ModelLoadError(f"low_freq_factor={low} must be less than high_freq_factor={high}")
    return dataclasses.replace(
        rope, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original
    )


def _yarn(rope: RopeConfig, given: Config, original: int) -> RopeConfig:
    """Fill in yarn's fields; the attention factor's default is from the paper (Peng et al. 2023)."""
    fast = number(given, "beta_fast", low=_LEAST, below=1e6, default=32.0)
    slow = number(given, "beta_slow", low=_LEAST, below=1e6, default=1.0)
    if slow > fast:
        raise ModelLoadError(f"beta_slow={slow} must not be more than beta_fast={fast}")
    scale = number(given, "mscale", low=0.0, below=1e6, default=0.0)
    scale_all = number(given, "mscale_all_dim", low=0.0, below=1e6, default=0.0)
    logarithm = 0.1 * math.log(rope.factor)
    attention = (scale * logarithm + 1) / (scale_all * logarithm + 1) if scale and scale_all else logarithm + 1
    return dataclasses.replace(
        rope,
        original_max_position_embeddings=original,
        attention_factor=number(given, "attention_factor", low=_LEAST, below=1e6, default=attention),
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag(given, "truncate", default=True),
    )
