"""Small models with random weights and pages, and steps for them, as the fused path runs them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model.cuda.fused_model import FusedModel, StepBuffers
from asyncllm.model.cuda.fused_weights import FusedLayer, FusedWeights
from asyncllm.model.cuda.kv_pages import KVPages
from asyncllm.model.cuda.layouts import StepLayouts
from asyncllm.model.cuda.plain_kernels import PlainKernels
from asyncllm.model.cuda.staging import StepStaging
from asyncllm.model.cuda.step_layout import StepLayout
from asyncllm.model.cuda.tuning import PromptTile, plan_step
from asyncllm.model.decoder import Decoder
from asyncllm.model.linear import PlainLinear
from asyncllm.model.model_config import ModelConfig
from asyncllm.scheduler.batch import Batch
from helpers.batches import make_batch
from helpers.model_steps import TensorSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.model.cuda.step_layout import StepSections
    from asyncllm.model.cuda.tuning import StepPlan
    from helpers.batches import Row

__all__ = [
    "SLOTS",
    "FusedSteps",
    "Sampling",
    "make_config",
    "make_layout",
    "make_pages",
    "make_step",
    "make_weights",
    "random_batch",
]

SLOTS = 24
PAGE_SIZE = 16
MAX_TOKENS = 256


def make_config(**fields: object) -> ModelConfig:
    """Describe a small model whose heads the kernels take."""
    config: dict[str, object] = {
        "model_type": "qwen3",
        "vocab_size": 500,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_hf(config | fields)


def make_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> FusedWeights:
    """Draw weights of a usual size."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int, scale: float | None = None, shift: float = 0.0) -> torch.Tensor:
        value = torch.randn(shape, generator=generator) * (scale or shape[-1] ** -0.5) + shift
        return value.to(device, dtype)

    def linear(outputs: int, inputs: int, *, bias: bool = False) -> PlainLinear:
        return PlainLinear(draw(outputs, inputs), draw(outputs, scale=0.1) if bias else None)

    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    layers = tuple(
        FusedLayer(
            input_norm=draw(config.hidden_size, scale=0.1, shift=1.0),
            qkv=linear((heads + 2 * kv_heads) * width, config.hidden_size, bias=config.qkv_bias),
            head_norm=draw(2, width, scale=0.1, shift=1.0) if config.qk_norm else None,
            o=linear(config.hidden_size, heads * width, bias=config.o_bias),
            post_attention_norm=draw(config.hidden_size, scale=0.1, shift=1.0),
            gate_up=linear(2 * config.intermediate_size, config.hidden_size, bias=config.mlp_bias),
            down=linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
        )
        for _ in range(config.num_layers)
    )
    angles = torch.outer(torch.arange(MAX_TOKENS), 10000.0 ** (-torch.arange(0, 1, 2 / width)))
    return FusedWeights(
        embedding=draw(config.vocab_size, config.hidden_size, scale=0.5),
        layers=layers,
        norm=draw(config.hidden_size, scale=0.1, shift=1.0),
        lm_head=linear(config.vocab_size, config.hidden_size),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
    )


def make_pages(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, page_size: int = PAGE_SIZE, seed: int = 1
) -> KVPages:
    """Make pages with random content, and a table in which every slot has all its pages, scattered."""
    columns = MAX_TOKENS // page_size
    num_pages = SLOTS * columns
    pages = KVPages(
        config,
        num_pages=num_pages,
        page_size=page_size,
        num_slots=SLOTS,
        max_model_tokens=MAX_TOKENS,
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator("cpu").manual_seed(seed)
    pages.kv.copy_(torch.randn(pages.kv.shape, generator=generator))
    pages.table[:SLOTS] = torch.randperm(num_pages, generator=generator).view(SLOTS, columns).to(torch.int32)
    pages.token_pool.copy_(torch.randint(0, config.vocab_size, (SLOTS + 1,), generator=generator))
    return pages


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How rows draw their tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def random_batch(
    query_lens: Sequence[int],
    *,
    seed: int = 0,
    sampling: Sampling | None = None,
    vocab_size: int = 500,
    writes: Sequence[tuple[int, int, int]] = (),
    index: int = 0,
) -> Batch:
    """Make a step: rows in random slots, of random lengths, those of one token with the token sampled last."""
    rng = np.random.default_rng(seed)
    rows = len(query_lens)
    lens = np.array(query_lens, dtype=np.int32)
    sampling = sampling or Sampling()
    return Batch(
        index=index,
        slots=rng.permutation(SLOTS)[:rows].astype(np.int32),
        starts=rng.integers(0, MAX_TOKENS - lens + 1, dtype=np.int32),
        query_lens=lens,
        token_ids=np.concatenate(
            [[-1] if n == 1 else rng.integers(0, vocab_size, n) for n in query_lens], dtype=np.int32, casting="unsafe"
        ),
        sample_rows=np.arange(rows, dtype=np.int32),
        temperatures=np.full(rows, sampling.temperature, dtype=np.float32),
        top_ps=np.full(rows, sampling.top_p, dtype=np.float32),
        top_ks=np.full(rows, sampling.top_k, dtype=np.int32),
        min_ps=np.full(rows, sampling.min_p, dtype=np.float32),
        seeds=rng.integers(0, 2**62, rows, dtype=np.int64),
        table_writes=np.array(writes, dtype=np.int32).reshape(-1, 3).T,
        page_copies=np.zeros((2, 0), dtype=np.int32),
    )


def make_layout(batch: Batch, *, rows: int | None = None, tokens: int | None = None, tiles: int = 0) -> StepLayout:
    """Give a padded size that a batch fits."""
    rows = rows or batch.rows
    return StepLayout(tokens=tokens or batch.query_tokens, rows=rows, tiles=tiles, writes=16)


def make_step(
    batch: Batch, layout: StepLayout, device: torch.device, *, tile_tokens: int = 64, all_in_tiles: bool = False
) -> StepSections[torch.Tensor]:
    """Stage a batch and put it on the device."""
    staging = StepStaging(
        num_slots=SLOTS, size=layout.size, tile_tokens=tile_tokens, all_in_tiles=all_in_tiles, pinned=False
    )
    return layout.device(staging.stage(batch, layout).block.to(device))


class FusedSteps:
    """A reference model of transformers behind the fused path's steps; each slot owns the pages of a whole context.

    Args:
        reference: the model.
        device: where the steps run: plain kernels on the CPU, Triton's on a GPU.
        dtype: of the computation.
        page_size: tokens of a page.
        max_tokens: of a step.
        invariant: whether the number of rows changes nothing.
    """

    def __init__(
        self,
        reference: PreTrainedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        page_size: int = 16,
        max_tokens: int = 256,
        invariant: bool = False,
    ) -> None:
        self.config = config = ModelConfig.from_hf(reference.config.to_dict())
        source = TensorSource(reference.state_dict())
        with pytest.MonkeyPatch.context() as patch:  # on the CPU, too, weights stay as they are
            patch.setattr("asyncllm.model.layer_ops.can_pack", lambda _dtype: False)
            self.decoder = Decoder(
                config, source, dtype=dtype, device=device, max_model_tokens=config.max_position_embeddings
            )
        tile_tokens = PromptTile().block // (1 << (config.num_heads // config.num_kv_heads - 1).bit_length())
        self.layouts = StepLayouts(
            max_rows=SLOTS, max_tokens=max_tokens, tile_tokens=tile_tokens, all_in_tiles=invariant
        )
        plans = {each: plan_step(config, each.rows, decodes=each.decodes) for each in self.layouts.all()}
        columns = -(-config.max_position_embeddings // page_size)
        self.pages = KVPages(
            config,
            num_pages=SLOTS * columns,
            page_size=page_size,
            num_slots=SLOTS,
            max_model_tokens=config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )
        generator = torch.Generator("cpu").manual_seed(0)
        self.pages.table[:SLOTS] = (
            torch.randperm(SLOTS * columns, generator=generator).view(SLOTS, columns).to(device, torch.int32)
        )
        kernels = {
            flag: self._kernels(device, dtype, plans, dependent=flag, invariant=invariant) for flag in (False, True)
        }
        buffers = StepBuffers(plans, vocab_size=config.vocab_size, dtype=dtype, device=device)
        self.model = FusedModel(
            FusedWeights.of(self.decoder), self.pages, buffers, kernels, plans, prompt_tiles_only=invariant
        )
        self.staging = StepStaging(
            num_slots=SLOTS,
            size=max(each.size for each in plans),
            tile_tokens=tile_tokens,
            all_in_tiles=invariant,
            pinned=False,
        )

    def _kernels(
        self,
        device: torch.device,
        dtype: torch.dtype,
        plans: Mapping[StepLayout, StepPlan],
        *,
        dependent: bool,
        invariant: bool,
    ) -> StepKernels:
        if device.type == "cpu":
            return PlainKernels(self.config, dtype)
        from asyncllm.model.cuda.triton_kernels import AttentionScratch, TritonKernels

        parts = max(layout.rows * plan.decode.splits for layout, plan in plans.items())
        scratch = AttentionScratch(self.config, rows=SLOTS, parts=parts, device=device)
        return TritonKernels(self.config, dtype, scratch, dependent=dependent, invariant=invariant)

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Run a step; return the logits after each row's last token, float32 [rows, vocab] on the CPU."""
        batch = make_batch(0, rows)
        layout = self.layouts.choose(batch, self.staging.tiles(batch))
        staged = self.staging.stage(batch, layout)
        with torch.inference_mode():
            self.model.buffers.input[: layout.size].copy_(staged.block)
            logits = self.model.logits(layout)
        return logits[torch.from_numpy(staged.places).to(logits.device)].float().cpu()
