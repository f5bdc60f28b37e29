"""Matrix products in bfloat16 by the native kernel, on processors with a matrix unit.

Runs on the device's thread; weights are owned here and never change. Invariant: a row's result has the same bits
whatever other rows are in the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from asyncllm.model.native.library import NativeLibrary

__all__ = ["NativeGatedLinear", "NativeLinear", "can_multiply"]

_TILE: Final = 16  # outputs beside each other in a tile of sums
_BLOCK: Final = 2 * _TILE  # outputs whose weights are together
_DEPTH: Final = 32  # inputs of a tile
_PLAIN, _GATED = 0, 1  # kinds, as in products.c


def can_multiply(library: NativeLibrary, *, inputs: int, gates: int = _TILE) -> bool:
    """Tell whether the kernel computes products of rows this wide, and so many gates."""
    return library.can_multiply and inputs % _DEPTH == 0 and gates % _TILE == 0


class NativeLinear:
    """A `Linear` over weights in the order in which they are read.

    Args:
        library: whose `multiply` is used.
        weight: [out, in], bfloat16; it is copied and not kept.
        bias: [out] or None.
    """

    __slots__ = ("_product",)

    def __init__(self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._product = _Product(library, weight, bias, _PLAIN, outputs=weight.shape[0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        return self._product(x, None)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + self(x), [rows, out]."""
        return self._product(x, residual.contiguous())


class NativeGatedLinear:
    """A `GatedLinear` in one pass over the weights of both products.

    Args:
        library: whose `multiply` is used.
        gate: [out, in], bfloat16.
        up: likewise.
        bias: gate's, then up's, [out] each; or None.
    """

    __slots__ = ("_product",)

    def __init__(
        self,
        library: NativeLibrary,
        gate: torch.Tensor,
        up: torch.Tensor,
        bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        both = None if bias is None else _in_turn(*bias)
        self._product = _Product(library, _in_turn(gate, up), both, _GATED, outputs=gate.shape[0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        return self._product(x, None)


class _Product:
    """A call of `multiply` with its weight [sums, in] and bias [sums]; kind says how outputs are made of sums."""

    __slots__ = ("_bias", "_inputs", "_kind", "_multiply", "_outputs", "_sums", "_weight")

    def __init__(
        self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None, kind: int, *, outputs: int
    ) -> None:
        self._multiply = library.multiply
        self._sums, self._inputs = weight.shape
        self._outputs = outputs
        self._kind = kind
        self._weight = _in_blocks(weight)
        self._bias = None if bias is None else _padded(bias.float())

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty((x.shape[0], self._outputs))
        self._multiply(
            out.data_ptr(),
            x.data_ptr(),
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            x.shape[0],
            self._inputs,
            self._sums,
            self._kind,
        )
        return out


def _in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Put 16 rows of one and 16 of the other in turn: 2 x [out, ...] -> [2 * out, ...]."""
    return torch.stack([gate.unflatten(0, (-1, _TILE)), up.unflatten(0, (-1, _TILE))], dim=1).flatten(0, 2)


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Bring a weight into the order in which it is read: [out, in] -> [blocks, in / 2, 32, 2]."""
    return _padded(weight).view(-1, _BLOCK, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Add zeros to fill the last block: [out, ...] -> [blocks * 32, ...]."""
    missing = -tensor.shape[0] % _BLOCK
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor.contiguous()
