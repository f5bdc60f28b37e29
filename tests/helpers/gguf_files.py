"""GGUF files of small models, written as llama.cpp's converter does.

Runs in the tests; owns nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np
import numpy.typing as npt

from asyncllm.model.tensor_names import tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from asyncllm.model.model_config import ModelConfig

__all__ = ["gguf_name", "quantized", "write_gguf"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a tensor."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def quantized(values: Floats, kind: gguf.GGMLQuantizationType) -> Bytes:
    """Pack values [rows, columns]; for types that `gguf` cannot pack, random blocks that `values` seeds."""
    try:
        packed: Bytes = gguf.quantize(values, kind)
    except NotImplementedError:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(int(abs(values).sum() * 1000)).integers(0, 256, (values.size // per_block, size))
        packed = blocks.astype(np.uint8)
        scales = {"Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (size - 1,)}[kind.name]  # high bytes of float16 scales
        packed[:, scales] = packed[:, scales] % 8 + 0x20  # small and finite
        packed = packed.reshape(values.shape[0], -1)
    return packed


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Floats],
    *,
    kind: str = "F32",
    settings: Mapping[str, object] | None = None,
    extra: Mapping[str, npt.NDArray[Any]] | None = None,
) -> None:
    """Write a model.

    Args:
        path: the file.
        config: its shape.
        tensors: float32, by canonical names; those that the config does not need are left out.
        kind: the type of all matrices; vectors are F32.
        settings: to add to, or to put in the place of, those that describe the config; None leaves one out.
        extra: more tensors, by the file's names.
    """
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, architecture)
    described: dict[str, object] = {
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope.theta,
        f"{architecture}.rope.dimension_count": config.head_dim,
    }
    for key, value in (described | dict(settings or {})).items():
        if key == "general.alignment":
            writer.add_custom_alignment(int(str(value)))
        elif value is not None:
            _add(writer, key, value)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, shape in tensor_shapes(config).items():
        values = np.ascontiguousarray(tensors[name], dtype=np.float32)
        if architecture == "llama" and ".q_proj." in name:
            values = _interleave(values, config.num_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _interleave(values, config.num_kv_heads)
        if len(shape) == 1 or wanted == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), quantized(values, wanted), raw_dtype=wanted)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key}={value!r}")


def _interleave(values: Floats, heads: int) -> Floats:
    """Put dimension i of a head's first half next to dimension i of its second half."""
    half = math.prod(values.shape[:1]) // heads // 2
    halves = values.reshape(heads, 2, half, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
