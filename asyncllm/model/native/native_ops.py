"""Products, norms, rope and the KV store by the native kernels.

Runs on the device's thread; owns nothing. Invariant: tensors are bfloat16, on the CPU and contiguous where the
kernels read or write rows; `why_not_native` was asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncllm.model.layer_ops import PlainLayerOps
from asyncllm.model.native.native_products import NativeGatedLinear, NativeLinear, can_multiply

if TYPE_CHECKING:
    from asyncllm.model.linear import GatedLinear, Linear
    from asyncllm.model.native.library import NativeLibrary
    from asyncllm.model.rope import RotaryTables

__all__ = ["NativeLayerOps"]


class NativeLayerOps:
    """`LayerOps` of compiled kernels; products only where the processor has a matrix unit, else oneDNN's.

    Args:
        library: built for the model's shape.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._plain = PlainLayerOps()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """See `LayerOps`."""
        if can_multiply(self._library, inputs=weight.shape[1]):
            return NativeLinear(self._library, weight, bias)
        return self._plain.linear(weight, bias)

    def gated_linear(
        self, gate: torch.Tensor, up: torch.Tensor, bias: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> GatedLinear:
        """See `LayerOps`."""
        if can_multiply(self._library, inputs=gate.shape[1], gates=gate.shape[0]):
            return NativeGatedLinear(self._library, gate, up, bias)
        return self._plain.gated_linear(gate, up, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps`."""
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        self._library.rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, eps)
        return out

    def at(self, rope: RotaryTables, positions: torch.Tensor, cells: torch.Tensor) -> _NativePlaces:
        """See `LayerOps`."""
        return _NativePlaces(self._library, rope, positions.contiguous(), cells.contiguous())


class _NativePlaces:
    """Positions and cells, int64 [tokens] each; a `StepPlaces`."""

    def __init__(
        self, library: NativeLibrary, rope: RotaryTables, positions: torch.Tensor, cells: torch.Tensor
    ) -> None:
        self._library = library
        self._rope = rope
        self._positions = positions
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
        tokens, all_heads, head_dim = qkv.shape
        kv_heads = keys.shape[2]
        heads = all_heads - 2 * kv_heads
        queries = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        self._library.rotate_and_store(
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            qkv.data_ptr(),
            self._rope.cos.data_ptr(),
            self._rope.sin.data_ptr(),
            None if qk_norm is None else qk_norm.data_ptr(),
            self._positions.data_ptr(),
            self._cells.data_ptr(),
            tokens,
            heads,
            kv_heads,
            eps,
        )
        return queries
