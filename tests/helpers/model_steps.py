"""Tiny random models of transformers, and the same ones behind this package's steps, to be compared.

Nothing is written to disk. Everything is float32 on one thread of the CPU unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncllm.model.attention.cpu import CPUAttention
from asyncllm.model.batch_tensors import BatchTensors
from asyncllm.model.decoder import Decoder
from asyncllm.model.device_model import DeviceModel
from asyncllm.model.model_config import ModelConfig
from helpers.batches import Row, make_batch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from asyncllm.model.attention.interface import AttentionBackend
    from asyncllm.model.layer_ops import LayerOps

__all__ = ["TensorSource", "TinyDecoder", "make_reference", "reference_logits"]

CPU = torch.device("cpu")


def make_reference(architecture: str = "llama", fields: Mapping[str, object] | None = None) -> PreTrainedModel:
    """Make a random model of two layers, width 64, 200 tokens and 128 positions."""
    usual: dict[str, object] = {
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(architecture, **(usual | dict(fields or {})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # at zero and one they would not be tested
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after each token of one sequence: float32 [tokens, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens], device="cpu"), use_cache=False).logits[0]
    return logits


class TensorSource:
    """A `WeightSource` over tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.asked: list[str] = []

    def names(self) -> frozenset[str]:
        """Return all names."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._tensors[name].shape)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        self.asked.append(name)
        return self._tensors[name]

    def close(self) -> None:
        """Do nothing."""


class TinyDecoder:
    """A reference model behind this package's steps; each slot owns the pages of a whole context.

    Args:
        model: the reference.
        page_size: tokens of a page.
        num_slots: requests at once.
        max_model_tokens: positions of a request; None: the model's context.
        shuffled: whether a slot's pages lie in random order.
        dtype: of the computation.
        attention: the kernels; None: those of the CPU.
        kernels: likewise, with what runs between the products.
        padded_rows: put into every step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        page_size: int = 16,
        num_slots: int = 8,
        max_model_tokens: int | None = None,
        shuffled: bool = True,
        dtype: torch.dtype = torch.float32,
        attention: AttentionBackend | None = None,
        kernels: tuple[AttentionBackend, LayerOps] | None = None,
        padded_rows: int = 0,
    ) -> None:
        self.config = ModelConfig.from_hf(model.config.to_dict())
        max_tokens = max_model_tokens or self.config.max_position_embeddings
        max_pages = -(-max_tokens // page_size)
        self.source = TensorSource(model.state_dict())
        chosen, ops = kernels or (attention or CPUAttention(dtype), None)
        decoder = Decoder(self.config, self.source, dtype=dtype, device=CPU, max_model_tokens=max_tokens, ops=ops)
        self.model = DeviceModel(
            decoder,
            chosen,
            num_slots=num_slots,
            max_pages=max_pages,
            page_size=page_size,
            num_pages=num_slots * max_pages,
        )
        self.staging = BatchTensors(
            num_slots=num_slots,
            max_pages=max_pages,
            max_step_tokens=4096,
            vocab_size=self.config.vocab_size,
            pinned=False,
        )
        pages = np.arange(num_slots * max_pages)
        if shuffled:
            np.random.default_rng(0).shuffle(pages)
        self.pages = pages.reshape(num_slots, max_pages)
        self._padded_rows = padded_rows
        table = [(slot, column, int(page)) for slot, row in enumerate(self.pages) for column, page in enumerate(row)]
        self.logits([Row(0, 0, [0])], table=table)

    def logits(
        self,
        rows: Sequence[Row],
        *,
        table: Sequence[tuple[int, int, int]] = (),
        copies: Sequence[tuple[int, int]] = (),
    ) -> torch.Tensor:
        """Run a step; return the logits after each token of each row, in the rows' order: [tokens, vocab]."""
        staged = self.staging.stage(make_batch(0, rows, table=table, copies=copies), padded_rows=self._padded_rows)
        inputs = staged.on_device(CPU)
        last = {int(slot): int(token) for slot, token in zip(inputs.sampled_slots, inputs.sampled, strict=True)}
        wanted = [last[row.slot] - len(row.tokens) + 1 + place for row in rows for place in range(len(row.tokens))]
        with torch.inference_mode():
            self.model.write_pages(inputs)
            return self.model.logits(staged, dataclasses.replace(inputs, sampled=torch.tensor(wanted, device="cpu")))
