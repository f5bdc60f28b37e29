"""Which tensors a model's checkpoint must hold, by their canonical names, and in which shapes.

Runs anywhere, imports no torch; owns nothing. Invariant: a checkpoint that passes `check_names` and `check_shapes`
holds all that the model reads, and nothing that the model would have read had it known how.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from asyncllm.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

    from asyncllm.model.model_config import ModelConfig

__all__ = ["check_names", "check_shapes", "tensor_shapes"]

Shape = tuple[int, ...]

_RECOMPUTED: Final = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_NAMES_IN_MESSAGE: Final = 8


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor that the model reads, in the order in which it reads them."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_names(config: ModelConfig, names: AbstractSet[str]) -> None:
    """Refuse a checkpoint that lacks a tensor, or has one that nothing uses.

    Buffers that every implementation recomputes are ignored, and so is an output matrix in a checkpoint whose
    config ties it to the embedding.

    Raises:
        ModelLoadError: names the tensors.
    """
    needed = tensor_shapes(config).keys()
    if missing := [name for name in needed if name not in names]:
        raise ModelLoadError(f"the checkpoint lacks {_listed(missing)}")
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    left = [name for name in sorted(names - needed - ignored) if not _RECOMPUTED.fullmatch(name)]
    if left:
        raise ModelLoadError(f"nothing uses {_listed(left)} of the checkpoint, so the result would not be right")


def check_shapes(config: ModelConfig, shape_of: Callable[[str], Shape]) -> None:
    """Refuse a checkpoint whose tensors do not have the shapes that its config says.

    Raises:
        ModelLoadError: names the tensor and both shapes.
    """
    for name, shape in tensor_shapes(config).items():
        if (found := shape_of(name)) != shape:
            raise ModelLoadError(f"{name} has shape {list(found)}; the model's config makes it {list(shape)}")


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, rows, columns, bias in (
        ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, queries, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _NAMES_IN_MESSAGE
    return ", ".join(names[:_NAMES_IN_MESSAGE]) + (f" and {more} more tensors" if more > 0 else "")
