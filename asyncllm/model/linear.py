"""The matrix products of a model, with what follows each of them folded in where a kernel can do it.

Runs on the device's thread; weights are owned here and never change. Invariant: with `PackedLinear` in float32 a
row's result has the same bits whatever other rows are in the call (measured over shapes, row counts and thread
counts; tests hold it). A product of one row is the exception that oneDNN makes, by a kernel of its own that adds in
another order: such a row is computed twice over, as two.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

__all__ = ["GatedLinear", "Linear", "PackedGatedLinear", "PackedLinear", "PlainGatedLinear", "PlainLinear", "can_pack"]

_ONEDNN: Final = torch.ops.mkldnn  # what `torch.compile` uses on a CPU; private, so `can_pack` tries it first
_ROWS_HINT: Final = 32  # the row count that weights are laid out for; best of 1, 16 and 32 over all row counts


class Linear(Protocol):
    """y = x @ weight.T + bias, for x [rows, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [rows, out] + self(x), which may be residual's memory."""


class GatedLinear(Protocol):
    """The first half of a gated MLP: silu(x @ gate.T) * (x @ up.T), for x [rows, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""


class PlainLinear:
    """A `Linear` in plain torch.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + self(x), [rows, out]."""
        return residual + F.linear(x, self.weight, self.bias)


class PlainGatedLinear:
    """A `GatedLinear` in plain torch, both products as one.

    Args:
        gate: [out, in].
        up: [out, in].
        bias: gate's, then up's, [out] each; or None.
    """

    __slots__ = ("gate_up",)

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, bias: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        self.gate_up = PlainLinear(torch.cat([gate, up]), None if bias is None else torch.cat(bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [rows, 2 * out] -> 2 x [rows, out]
        return F.silu(gate) * up


class PackedLinear:
    """A `Linear` over weights in oneDNN's own layout, on the CPU: 1.5 to 2 times as fast as `F.linear` there.

    Args:
        weight: [out, in] on the CPU; it is copied into the layout and not kept.
        bias: [out] or None.
    """

    __slots__ = ("_bias", "_one_row_differs", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight: torch.Tensor = _ONEDNN._reorder_linear_weight(weight, _ROWS_HINT)  # noqa: SLF001
        self._bias = bias
        self._one_row_differs = weight.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        return self._run(x, "none")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """Return the silu of self(x), [rows, out]."""
        return self._run(x, "swish")

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + self(x), [rows, out]."""
        return self._combine(x, residual, "add")

    def times(self, factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return factor [rows, out] * self(x)."""
        return self._combine(x, factor, "mul")

    def _run(self, x: torch.Tensor, then: str) -> torch.Tensor:
        if self._one_row_differs and x.shape[0] == 1:
            return self._run(x.expand(2, -1), then)[:1]
        y: torch.Tensor = _ONEDNN._linear_pointwise(x, self._weight, self._bias, then, [], "")  # noqa: SLF001
        return y

    def _combine(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        if self._one_row_differs and x.shape[0] == 1:
            return self._combine(x.expand(2, -1), other.expand(2, -1), how)[:1]
        y: torch.Tensor = _ONEDNN._linear_pointwise.binary(x, other, self._weight, self._bias, how)  # noqa: SLF001
        return y


class PackedGatedLinear:
    """A `GatedLinear` of two `PackedLinear`s: silu and the product are part of theirs.

    Args:
        gate: [out, in].
        up: [out, in].
        bias: gate's, then up's, [out] each; or None.
    """

    __slots__ = ("_gate", "_up")

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, bias: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        gate_bias, up_bias = (None, None) if bias is None else (bias[0].clone(), bias[1].clone())
        self._gate = PackedLinear(gate, gate_bias)
        self._up = PackedLinear(up, up_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        return self._up.times(self._gate.silu(x), x)


def can_pack(dtype: torch.dtype) -> bool:
    """Try the packed products, which torch does not promise to keep, against plain ones.

    Returns:
        True if they are there for this dtype and give what `F.linear` gives.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    weight = torch.randn(48, 32, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    x = torch.randn(3, 32, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    try:
        gated = PackedGatedLinear(weight, weight)(x)
        added = PackedLinear(weight).add_to(gated, x)
    except (AttributeError, RuntimeError):
        return False
    expected = PlainLinear(weight).add_to(PlainGatedLinear(weight, weight)(x), x)
    tolerance = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
    return bool(torch.allclose(added, expected, rtol=0.0, atol=tolerance))
