"""What a GGUF file says in place of a config.json.

Runs anywhere, imports no torch; owns nothing. Invariant: the file's settings pass the same checks as a config.json,
because they are turned into one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf import GGMLQuantizationType

from asyncllm.errors import ModelLoadError
from asyncllm.model.config_values import number, short
from asyncllm.model.model_config import ModelConfig

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.model.gguf_header import GgufHeader
    from asyncllm.model.rope_config import RopeConfig

__all__ = ["gguf_config", "llama3_frequency_factors"]

_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")

# What the settings of an architecture are called in config.json.
_HF_KEYS: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_HF_ROPE_KEYS: Final = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Settings that change the result, and the value at which they do not.
_NEUTRAL: Final[dict[str, float]] = {
    "expert_count": 0,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "embedding_scale": 1,
    "residual_scale": 1,
    "rope.scale_linear": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
_DTYPES: Final = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}
_EOS_KEYS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def gguf_config(header: GgufHeader, *, rope_factors: npt.NDArray[np.float32] | None = None) -> ModelConfig:
    """Read a GGUF file's shape.

    Args:
        header: of the file.
        rope_factors: float32 [head_dim / 2], its tensor "rope_freqs.weight" if it has one: by what rope's
            frequencies are divided. Files of llama 3 models have it; their settings do not mention it.

    Raises:
        ModelLoadError: a setting is missing or asks for what is not implemented.
    """
    settings = header.settings
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelLoadError(
            f"general.architecture={short(architecture)} is not implemented; supported are {supported}"
        )
    if number(settings, "split.count", low=0, below=2**16, default=0) > 1:
        raise ModelLoadError("a model split over several .gguf files is not implemented; merge them into one")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    for key, neutral in _NEUTRAL.items():
        if number(own, key, low=-1e30, below=1e30, default=neutral) != neutral:
            raise ModelLoadError(f"{prefix}{key}={short(own[key])} is not implemented")
    model = ModelConfig.from_hf(_as_hf(header, architecture, own))
    if any(
        own.get(key, model.head_dim) != model.head_dim for key in ("rope.dimension_count", "attention.value_length")
    ):
        raise ModelLoadError(f"rope.dimension_count or attention.value_length unlike head_dim={model.head_dim}")
    rope = model.rope if rope_factors is None else _llama3_rope(model, rope_factors)
    return dataclasses.replace(
        model,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        rope=rope,
    )


def _as_hf(header: GgufHeader, architecture: str, own: dict[str, object]) -> dict[str, object]:
    """Write an architecture's own settings as a config.json has them."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError("the checkpoint lacks token_embd.weight")
    rope = {hf: own[key] for key, hf in _HF_ROPE_KEYS.items() if key in own}
    if rope.get("rope_type", "none") == "none":
        rope = {}
    ends = [header.settings[key] for key in _EOS_KEYS if key in header.settings]
    config = {hf: own[key] for key, hf in _HF_KEYS.items() if key in own}
    return config | {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope,
        "use_sliding_window": "sliding_window" in config,
        "max_window_layers": 0,
        "eos_token_id": ends,
        "bos_token_id": header.settings.get("tokenizer.ggml.bos_token_id"),
        "dtype": _DTYPES.get(embedding.type, "float32"),
    }


def _llama3_rope(model: ModelConfig, factors: npt.NDArray[np.float32]) -> RopeConfig:
    """Find the settings that give these factors, among those of the models that were published."""
    rope = dataclasses.replace(
        model.rope,
        rope_type="llama3",
        factor=float(factors.max(initial=1.0)),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    expected = llama3_frequency_factors(rope, model.head_dim)
    if model.rope.rope_type != "default" or factors.shape != expected.shape or not np.allclose(factors, expected, 1e-4):
        raise ModelLoadError(f"rope_freqs.weight={short(factors)} is not implemented; only those of llama 3 are")
    return rope


def llama3_frequency_factors(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """Return by what "llama3" rope divides the frequencies: float32 [head_dim / 2]."""
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    rotations = rope.original_max_position_embeddings / wavelengths
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / rope.factor + kept)).astype(np.float32)
