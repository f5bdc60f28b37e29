"""The model: a decoder-only transformer of the Llama kind (Llama, Mistral, SmolLM2, Qwen2, Qwen3).

Made on the engine thread, run on the device's thread. Owns the weights. Invariant: what it computes for a token
depends on that token's row alone; rows meet only in the shape of the products.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from asyncllm.model.layer_ops import PlainLayerOps
from asyncllm.model.rope import RotaryTables

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.model.attention.interface import StepAttention
    from asyncllm.model.kv_tensors import KVTensors
    from asyncllm.model.layer_ops import LayerOps
    from asyncllm.model.linear import GatedLinear, Linear
    from asyncllm.model.model_config import ModelConfig
    from asyncllm.model.weights import WeightSource

__all__ = ["Decoder"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer's weights."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    o: Linear
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: GatedLinear
    down: Linear


class Decoder:
    """Compute a step's tokens, and logits.

    Args:
        config: the model's shape.
        weights: read tensor by tensor, each dropped as soon as it is in its final form; not closed.
        dtype: of weights, activations and KV.
        device: where all of it lives.
        max_model_tokens: positions that the rotary tables cover.
        ops: makes the products, and runs between them; None: plain torch.
        on_layer: told (layers done, layers) after each; raises to stop the loading.

    Raises:
        ConfigurationError: the config's rope does not reach max_model_tokens.
        ModelLoadError: a tensor cannot be read.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_tokens: int,
        ops: LayerOps | None = None,
        on_layer: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.max_model_tokens = max_model_tokens
        self._ops = PlainLayerOps() if ops is None else ops
        self.rope = RotaryTables(
            config.rope, head_dim=config.head_dim, max_positions=max_model_tokens, dtype=dtype, device=device
        )
        with torch.inference_mode():
            read = _Reader(weights, self._ops, dtype, device)
            self.embedding = read.weight("model.embed_tokens")  # [vocab, hidden]
            self.layers: list[Layer] = []
            for index in range(config.num_layers):
                self.layers.append(read.layer(config, f"model.layers.{index}"))
                on_layer(index + 1, config.num_layers)
            self.norm = read.weight("model.norm")  # [hidden]
            head = self.embedding if config.tie_word_embeddings else read.weight("lm_head")
            self.lm_head: Linear = self._ops.linear(head)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        *,
        kv: KVTensors,
        attend: StepAttention,
    ) -> torch.Tensor:
        """Run the model and store the tokens' keys and values.

        Args:
            token_ids: int64 [tokens].
            positions: int64 [tokens].
            cells: int64 [tokens], where each token's keys and values go.
            kv: written here, and read by `attend`.
            attend: this step's attention.

        Returns:
            What `head` makes logits of, [tokens, hidden].
        """
        config, tokens = self.config, token_ids.shape[0]
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        ops, places = self._ops, self._ops.at(self.rope, positions, cells)
        x = F.embedding(token_ids, self.embedding)  # [tokens, hidden]
        for index, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.input_norm, eps)
            qkv = layer.qkv(h).view(tokens, heads + 2 * kv_heads, config.head_dim)
            q = places.rotate_and_store(qkv, layer.qk_norm, eps, kv.keys[index], kv.values[index])
            h = attend(q, kv.keys[index], kv.values[index])  # [tokens, heads, head_dim]
            x = layer.o.add_to(x, h.reshape(tokens, heads * config.head_dim))
            h = ops.rms_norm(x, layer.post_attention_norm, eps)
            x = layer.down.add_to(x, layer.gate_up(h))
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits after some tokens, [tokens, vocab], of what the model gives for them."""
        return self.lm_head(self._ops.rms_norm(x, self.norm, self.config.rms_norm_eps))


class _Reader:
    """Bring a checkpoint's tensors into the form in which they are used."""

    def __init__(self, weights: WeightSource, ops: LayerOps, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._ops = ops
        self._dtype = dtype
        self._device = device

    def weight(self, name: str) -> torch.Tensor:
        """Read a weight to keep as it is: always a copy, so that no file has to stay open."""
        return self._weights.get(f"{name}.weight").to(device=self._device, dtype=self._dtype, copy=True)

    def layer(self, config: ModelConfig, at: str) -> Layer:
        """Read one layer."""
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            input_norm=self.weight(f"{at}.input_layernorm"),
            qkv=self._linear([f"{attention}.{part}_proj" for part in "qkv"], bias=config.qkv_bias),
            qk_norm=self._qk_norm(config, attention) if config.qk_norm else None,
            o=self._linear([f"{attention}.o_proj"], bias=config.o_bias),
            post_attention_norm=self.weight(f"{at}.post_attention_layernorm"),
            gate_up=self._gated(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], bias=config.mlp_bias),
        )

    def _passing(self, name: str) -> torch.Tensor:
        """Read a tensor that is copied into its final form next."""
        return self._weights.get(name).to(device=self._device, dtype=self._dtype)

    def _linear(self, names: list[str], *, bias: bool) -> Linear:
        """Read products that share their input as one: weight [sum of out, in]."""
        weight = torch.cat([self._passing(f"{name}.weight") for name in names])
        return self._ops.linear(weight, torch.cat([self._passing(f"{name}.bias") for name in names]) if bias else None)

    def _gated(self, gate: str, up: str, *, bias: bool) -> GatedLinear:
        weights = self._passing(f"{gate}.weight"), self._passing(f"{up}.weight")
        return self._ops.gated_linear(
            *weights, (self._passing(f"{gate}.bias"), self._passing(f"{up}.bias")) if bias else None
        )

    def _qk_norm(self, config: ModelConfig, attention: str) -> torch.Tensor:
        queries = self._passing(f"{attention}.q_norm.weight").expand(config.num_heads, -1)
        keys = self._passing(f"{attention}.k_norm.weight").expand(config.num_kv_heads, -1)
        return torch.cat([queries, keys])  # [num_heads + num_kv_heads, head_dim]
