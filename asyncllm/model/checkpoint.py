"""A checkpoint on disk: its shape, its generation defaults and its tensors, checked against each other.

Runs on the engine thread while it opens; owns its weight source. Invariant: a `Checkpoint` that exists has all
tensors that its config needs, in the right shapes, and no others.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

from asyncllm.model.config_values import read_json
from asyncllm.model.dummy_weights import DummyWeights
from asyncllm.model.generation_config import GenerationConfig, read_generation_config
from asyncllm.model.gguf_weights import GgufWeights
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.tensor_names import check_names, check_shapes
from asyncllm.model.weights import SafetensorsWeights, WeightSource

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from asyncllm.config import LoadFormat

__all__ = ["Checkpoint"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Hold an open checkpoint; a context manager that closes its weights.

    Args:
        config: the model's shape.
        generation: its generation config.
        weights: its tensors.
    """

    config: ModelConfig
    generation: GenerationConfig
    weights: WeightSource

    @classmethod
    def open(cls, path: Path, *, load_format: LoadFormat, seed: int, device: torch.device | None = None) -> Checkpoint:
        """Open a folder or a .gguf file; reads configs and headers only.

        Args:
            path: as `find_model` returns it.
            load_format: "dummy" takes the config alone; otherwise the path decides.
            seed: of dummy weights.
            device: where dummy weights are made; None: on the CPU.

        Raises:
            ModelLoadError: the files are broken, contradict each other, or ask for what is not implemented.
        """
        weights: WeightSource | None
        if path.is_file():
            weights = gguf = GgufWeights(path)
            config, generation = gguf.config, GenerationConfig()
        else:
            weights = None
            config = ModelConfig.from_hf(read_json(path / "config.json"))
            generation = read_generation_config(path, vocab_size=config.vocab_size)
        if load_format == "dummy":
            if weights is not None:
                weights.close()
            weights = DummyWeights(config, seed=seed, device=device)
        elif weights is None:
            weights = SafetensorsWeights(path)
        try:
            check_names(config, weights.names())
            check_shapes(config, weights.shape)
        except BaseException:
            weights.close()
            raise
        return cls(config=config, generation=generation, weights=weights)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.weights.close()
