"""What a decoder layer does apart from attention: matrix products, norms, rope, the KV store.

Runs on the device's thread; owns nothing. Invariant: every kind of `LayerOps` computes what `PlainLayerOps` does, up
to rounding; a token's result depends on that token alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from asyncllm.model.linear import PackedGatedLinear, PackedLinear, PlainGatedLinear, PlainLinear, can_pack
from asyncllm.model.rope import rotate

if TYPE_CHECKING:
    from asyncllm.model.linear import GatedLinear, Linear
    from asyncllm.model.rope import RotaryTables

__all__ = ["LayerOps", "PlainLayerOps", "StepPlaces"]


class StepPlaces(Protocol):
    """Where a step's tokens are: their positions, and the cells of their keys and values."""

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Turn queries and keys by their positions, and write keys and values to their cells.

        Args:
            qkv: [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
            qk_norm: [num_heads + num_kv_heads, head_dim], what each head is normed with before it is turned; or None.
            eps: of that norm.
            keys: [pages, page_size, num_kv_heads, head_dim], a layer's; written.
            values: likewise.

        Returns:
            The queries, [tokens, num_heads, head_dim].
        """


class LayerOps(Protocol):
    """Kernels for one device and dtype."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Make a product of its weight [out, in], where and as it is, and bias [out]."""

    def gated_linear(
        self, gate: torch.Tensor, up: torch.Tensor, bias: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> GatedLinear:
        """Make the first half of a gated MLP of its weights [out, in], and biases [out] of each."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Divide by the root mean square over the last dimension, then multiply by weight: x [..., width]."""

    def at(self, rope: RotaryTables, positions: torch.Tensor, cells: torch.Tensor) -> StepPlaces:
        """Work out once a step what all layers need.

        Args:
            rope: the rotary tables.
            positions: int64 [tokens].
            cells: int64 [tokens], page * page_size + offset of each.
        """


class PlainLayerOps:
    """`LayerOps` in plain torch, on any device; on the CPU with products of oneDNN's where they are to be had."""

    def __init__(self) -> None:
        self._packs: dict[torch.dtype, bool] = {}  # whether a trial of oneDNN's went well

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """See `LayerOps`."""
        return PackedLinear(weight, bias) if self._can_pack(weight) else PlainLinear(weight, bias)

    def gated_linear(
        self, gate: torch.Tensor, up: torch.Tensor, bias: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> GatedLinear:
        """See `LayerOps`."""
        return PackedGatedLinear(gate, up, bias) if self._can_pack(gate) else PlainGatedLinear(gate, up, bias)

    def _can_pack(self, weight: torch.Tensor) -> bool:
        if weight.device.type != "cpu":
            return False
        if weight.dtype not in self._packs:
            self._packs[weight.dtype] = can_pack(weight.dtype)
        return self._packs[weight.dtype]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps`."""
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def at(self, rope: RotaryTables, positions: torch.Tensor, cells: torch.Tensor) -> _PlainPlaces:
        """See `LayerOps`."""
        return _PlainPlaces(rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1), cells)


class _PlainPlaces:
    """Cosines and sines [tokens, 1, head_dim] and cells [tokens]; a `StepPlaces`."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, cells: torch.Tensor) -> None:
        self._cos = cos
        self._sin = sin
        self._cells = cells

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """See `StepPlaces`."""
        kv_heads = keys.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if qk_norm is not None:
            qk = F.rms_norm(qk, (qk.shape[-1],), None, eps) * qk_norm  # each head by itself
        qk = rotate(qk, self._cos, self._sin)
        keys.flatten(0, 1).index_copy_(0, self._cells, qk[:, heads:])
        values.flatten(0, 1).index_copy_(0, self._cells, v)
        return qk[:, :heads]
