"""Random weights in a config's shape, for measurements and tests that need no real model.

Runs on the engine thread while it opens; owns nothing but a seed. Invariant: same config and seed, same weights,
in whatever order they are asked for.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.model.tensor_names import tensor_shapes

if TYPE_CHECKING:
    from asyncllm.model.model_config import ModelConfig

__all__ = ["DummyWeights"]

_BLOCK: Final = 1048573  # a prime, so that no two rows of a matrix are alike


class DummyWeights:
    """Make tensors as a checkpoint would have them, with activations of a usual size.

    Large ones repeat a block of random numbers: drawing billions of them would take minutes.

    Args:
        config: the shapes.
        seed: of all tensors together.
        device: where tensors are put together, from numbers that are the same on all; None: the CPU.
    """

    def __init__(self, config: ModelConfig, *, seed: int, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._shapes = tensor_shapes(config)
        self._seed = seed

    def names(self) -> frozenset[str]:
        """Return the names of all tensors that the config needs."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def get(self, name: str) -> torch.Tensor:
        """Make one tensor, float32: norms of ones, everything else normal with variance 1 / columns."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.float32, device=self._device)
        generator = torch.Generator("cpu").manual_seed((self._seed + zlib.crc32(name.encode())) % 2**63)
        size = math.prod(shape)
        block = torch.randn(min(size, _BLOCK), generator=generator, dtype=torch.float32, device="cpu")
        block = (block * shape[-1] ** -0.5).to(self._device)
        repeated: torch.Tensor = block.repeat(-(-size // len(block)))
        return repeated[:size].view(shape)

    def close(self) -> None:
        """Do nothing: there is nothing to let go."""
