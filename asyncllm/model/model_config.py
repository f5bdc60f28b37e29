"""A model's shape, read from a checkpoint's config.json (or from what a GGUF file says in its place).

Runs anywhere, imports no torch; owns nothing. Invariant: a `ModelConfig` that exists describes a model that this
package computes exactly as the reference does; everything else was refused by name.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from asyncllm.errors import ModelLoadError
from asyncllm.model.config_values import Config, flag, integer, number, short
from asyncllm.model.rope_config import RopeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ModelConfig", "RopeConfig", "token_ids"]

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES: Final = ("float32", "float16", "bfloat16", "float64")
_MISTRAL_WINDOW: Final = 4096  # what a mistral config means that does not mention its window

# Options of related models, and the values at which they change nothing. Any other value changes the result.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "partial_rotary_factor": (None, 1),
    "use_mrope": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Say what a decoder-only model looks like.

    Args:
        architecture: "llama", "mistral", "qwen2" or "qwen3".
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: decoder layers.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head, even; not always hidden_size / num_heads.
        rms_norm_eps: added to the mean square in every norm.
        qkv_bias: whether q_proj, k_proj and v_proj have biases.
        o_bias: whether o_proj has one.
        mlp_bias: whether gate_proj, up_proj and down_proj have biases.
        qk_norm: whether each head's queries and keys are normed before rope (qwen3).
        tie_word_embeddings: whether the embedding is the output matrix too.
        rope: how positions enter.
        max_position_embeddings: the checkpoint's own figure; see `context_tokens`.
        eos_token_ids: what config.json calls end of sequence.
        bos_token_id: what it calls begin of sequence.
        dtype: what the checkpoint says that its tensors are.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    rope: RopeConfig
    max_position_embeddings: int
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    dtype: str = "float32"

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and output together that the model was made for.

        With "dynamic" rope that is the length up to which its frequencies do not depend on the length.
        """
        if self.rope.rope_type == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, config: Config) -> ModelConfig:
        """Read a parsed config.json in the layout of transformers 4 or 5.

        Raises:
            ModelLoadError: a key is missing, a value makes no sense, or it asks for what is not implemented.
        """
        architecture = _architecture(config)
        _check_options(config)
        num_layers = integer(config, "num_hidden_layers", high=4096)
        num_heads = integer(config, "num_attention_heads", high=65536)
        # Only llama has checkpoints from before there were fewer key heads than query heads.
        kv_default = num_heads if architecture == "llama" or "num_key_value_heads" in config else None
        num_kv_heads = integer(config, "num_key_value_heads", high=65536, default=kv_default)
        if num_heads % num_kv_heads:
            raise ModelLoadError(f"num_attention_heads={num_heads} is no multiple of {num_kv_heads} key-value heads")
        hidden_size = integer(config, "hidden_size", high=2**20)
        vocab_size = integer(config, "vocab_size", high=2**24)
        head_dim = _head_dim(config, architecture, hidden_size, num_heads)
        max_positions = integer(config, "max_position_embeddings", high=2**31 - 1)
        _check_windows(config, architecture, num_layers, max_positions)
        attention_bias = architecture in ("llama", "qwen3") and flag(config, "attention_bias")
        bos = token_ids(config.get("bos_token_id"), "bos_token_id", vocab_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size", high=2**22),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, "rms_norm_eps", low=1e-30, below=1.0),
            qkv_bias=attention_bias or architecture == "qwen2",
            o_bias=attention_bias,
            mlp_bias=architecture == "llama" and flag(config, "mlp_bias"),
            qk_norm=architecture == "qwen3",
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            rope=RopeConfig.from_hf(config, max_positions=max_positions, head_dim=head_dim),
            max_position_embeddings=max_positions,
            eos_token_ids=token_ids(config.get("eos_token_id"), "eos_token_id", vocab_size),
            bos_token_id=min(bos, default=None),
            dtype=_dtype(config),
        )


def token_ids(value: object, name: str, vocab_size: int) -> frozenset[int]:
    """Read a token id, a list of them or None, as configs write them.

    Raises:
        ModelLoadError: it is none of these, or an id is outside the vocabulary.
    """
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise ModelLoadError(f"{name} must be token ids below vocab_size={vocab_size}, not {short(value)}")
    return frozenset(ids)


def _architecture(config: Config) -> str:
    classes = config.get("architectures") or []
    if not isinstance(classes, list | tuple):
        raise ModelLoadError(f"architectures must be a list, not {short(classes)}")
    supported = f"supported are {', '.join(_ARCHITECTURES.values())}"
    name = config.get("model_type")
    if name is None:  # written by hand, or very old: the class tells
        name = next((key for key, made in _ARCHITECTURES.items() if made in classes), None)
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ModelLoadError(f"model_type={short(name)}, architectures={short(classes)} not implemented; {supported}")
    if classes and _ARCHITECTURES[name] not in classes:
        raise ModelLoadError(f"architectures={short(classes)} with model_type={name!r} not implemented; {supported}")
    return name


def _check_options(config: Config) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"hidden_act={short(activation)} is not implemented; only 'silu' is")
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if not any(value is item or (item is not None and value == item) for item in neutral):
            raise ModelLoadError(f"{key}={short(value)} is not implemented")


def _check_windows(config: Config, architecture: str, num_layers: int, max_positions: int) -> None:
    """Refuse attention that does not see the whole context; a window that is never smaller than it is none."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds)):
        raise ModelLoadError(f"layer_types={short(kinds)} is not implemented; only 'full_attention' is")
    if architecture.startswith("qwen") and (
        not flag(config, "use_sliding_window")
        or integer(config, "max_window_layers", low=0, high=2**31, default=28) >= num_layers
        or kinds is not None
    ):
        return
    window = config.get("sliding_window", _MISTRAL_WINDOW if architecture == "mistral" else None)
    if window is not None and integer({"sliding_window": window}, "sliding_window", high=2**31) < max_positions:
        raise ModelLoadError(
            f"sliding_window={window} within max_position_embeddings={max_positions} is not implemented; "
            "a config with sliding_window null uses full attention"
        )


def _head_dim(config: Config, architecture: str, hidden_size: int, num_heads: int) -> int:
    default = None
    if architecture != "qwen3" and config.get("head_dim") is None:
        if hidden_size % num_heads:
            raise ModelLoadError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}")
        default = hidden_size // num_heads
    head_dim = integer(config, "head_dim", high=4096, default=default)
    if head_dim % 2:
        raise ModelLoadError(f"head_dim={head_dim} must be even")
    return head_dim


def _dtype(config: Config) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES or not isinstance(name, str):
        raise ModelLoadError(f"dtype={short(value)} is not implemented; supported are {', '.join(_DTYPES)}")
    return name
