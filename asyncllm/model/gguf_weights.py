"""The tensors of a GGUF file under their canonical names, unpacked to float32.

Runs on the engine thread while it opens; owns the mapping of its file until it is closed. Invariant: a tensor is
unpacked slice by slice, each short enough that other threads get the interpreter many times a second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from asyncllm.errors import ModelLoadError
from asyncllm.model.gguf_config import gguf_config
from asyncllm.model.gguf_header import GgufHeader, GgufTensor, read_gguf_header

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from asyncllm.model.model_config import ModelConfig

__all__ = ["GgufWeights"]

_TYPES: Final = frozenset(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)
_ROPE_FACTORS: Final = "rope_freqs.weight"
_SLICE_ELEMENTS: Final = 2**18  # about a millisecond of unpacking

_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)")


class GgufWeights:
    """A GGUF file's tensors and its model's shape.

    Args:
        path: the file.

    Attributes:
        config: the model's shape, from the file's settings.

    Raises:
        ModelLoadError: the file is broken, or asks for what is not implemented.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        for name, tensor in header.tensors.items():
            if tensor.type not in _TYPES:
                supported = ", ".join(sorted(kind.name for kind in _TYPES))
                raise ModelLoadError(f"{path}: {name} is of type {tensor.type.name}; supported are {supported}")
        self._data: npt.NDArray[np.uint8] | None = np.memmap(path, mode="r", dtype=np.uint8)
        try:
            self.config = self._read_config(header)
        except ModelLoadError as error:
            self.close()
            raise ModelLoadError(f"{path}: {error}") from error
        self._tensors = {_canonical(name): tensor for name, tensor in header.tensors.items() if name != _ROPE_FACTORS}
        self._interleaved = header.settings["general.architecture"] == "llama"

    def names(self) -> frozenset[str]:
        """Return the names of all tensors in the file; one that is not known keeps the file's name."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the file's header."""
        return self._tensors[name].shape

    def get(self, name: str) -> torch.Tensor:
        """Unpack one tensor to float32."""
        tensor = self._unpack(self._tensors[name])
        if self._interleaved and (heads := self._rotated_heads(name)):
            # llama.cpp turns neighbouring dimensions of a llama's heads, the checkpoint's own code the two halves:
            # its converter reordered the rows [heads, half, pair] -> [heads, pair, half]; this puts them back.
            halves = tensor.view(heads, self.config.head_dim // 2, 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def close(self) -> None:
        """Let the file go."""
        self._data = None

    def _rotated_heads(self, name: str) -> int:
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0

    def _read_config(self, header: GgufHeader) -> ModelConfig:
        factors = header.tensors.get(_ROPE_FACTORS)
        if factors is None:
            return gguf_config(header)
        return gguf_config(header, rope_factors=self._unpack(factors).numpy())

    def _unpack(self, tensor: GgufTensor) -> torch.Tensor:
        if self._data is None:
            raise ModelLoadError("the file is closed")
        per_block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        out = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        target = out.view(-1).numpy()
        packed = self._data[tensor.offset : tensor.offset + tensor.size]
        blocks = _SLICE_ELEMENTS // per_block
        for block in range(0, len(target) // per_block, blocks):
            part = packed[block * block_bytes : (block + blocks) * block_bytes]
            # One row, since `dequantize` goes by rows in Python; a copy, since it wants aligned memory.
            with np.errstate(all="ignore"):  # what is not finite is as good here as in any other checkpoint
                values = dequantize(np.array(part)[None], tensor.type)[0]
            target[block * per_block :][: len(values)] = values
        return out


def _canonical(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if layer := _LAYER_NAME.fullmatch(stem):
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}" if layer[2] in _LAYER_NAMES else name
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
