"""Puts the fused path together: weights, KV, kernels, graphs and the runner.

Runs on the engine thread while it opens; owns nothing once it has returned. Invariant: when it raises, by itself or
because `progress` did, no graph and no memory of it stays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from asyncllm.config import check_pool_tokens
from asyncllm.model.cuda.compiling import compile_steps
from asyncllm.model.cuda.cuda_runner import CUDARunner
from asyncllm.model.cuda.fused_model import FusedModel
from asyncllm.model.cuda.fused_weights import FusedWeights
from asyncllm.model.cuda.graphs import StepGraphs
from asyncllm.model.cuda.kv_pages import KVPages
from asyncllm.model.cuda.layouts import StepLayouts
from asyncllm.model.cuda.memory import StepMemory, measure_steps, pool_pages
from asyncllm.model.cuda.staging import StepStaging
from asyncllm.model.cuda.streams import step_stream
from asyncllm.model.cuda.triton_kernels import AttentionScratch, TritonKernels, prompt_tile_tokens
from asyncllm.model.cuda.tuning import plan_step
from asyncllm.scheduler.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncllm.backend import Progress
    from asyncllm.config import EngineConfig
    from asyncllm.model.cuda.step_layout import StepLayout
    from asyncllm.model.cuda.tuning import StepPlan
    from asyncllm.model.decoder import Decoder

__all__ = ["FUSED", "PAGE_SIZE", "OpenFused", "open_fused"]

FUSED: Final = "triton"
"""The name that `attention_backend` gives this path."""
PAGE_SIZE: Final = 64
_KERNELS: Final = "kernels"
_GRAPHS: Final = "CUDA graphs"
_DEPENDENT_CAPABILITY: Final = (9, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenFused:
    """A runner, and the size that its KV pool came to."""

    runner: CUDARunner
    num_pages: int


class _Parts:
    """What has been made so far."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder, *, page_size: int, step_tokens: int, max_tokens: int
    ) -> None:
        model, device = decoder.config, decoder.device
        self.config = model
        self.device = device
        self._config = config
        self._decoder = decoder
        self._page_size = page_size
        self._max_tokens = max_tokens
        self._tile_tokens = prompt_tile_tokens(model)
        self.weights = FusedWeights.of(decoder)
        self.layouts = StepLayouts(
            max_rows=config.max_running_requests,
            max_tokens=step_tokens,
            tile_tokens=self._tile_tokens,
            all_in_tiles=config.batch_invariant,
        )
        self.plans: dict[StepLayout, StepPlan] = {
            layout: plan_step(model, layout.rows, decodes=layout.decodes) for layout in self.layouts.all()
        }
        parts = max(layout.rows * plan.decode.splits for layout, plan in self.plans.items())
        self._scratch = AttentionScratch(model, rows=config.max_running_requests, parts=parts, device=device)

    def kernels(self, *, compile_only: bool = False) -> dict[bool, TritonKernels]:
        """Make the kernels, for launches one after the other and for dependent ones."""
        capable = torch.cuda.get_device_capability(self._decoder.device) >= _DEPENDENT_CAPABILITY
        return {
            dependent: TritonKernels(
                self._decoder.config,
                self._decoder.dtype,
                self._scratch,
                dependent=dependent and capable,
                invariant=self._config.batch_invariant,
                compile_only=compile_only,
            )
            for dependent in (False, True)
        }

    def model(self, num_pages: int, kernels: Mapping[bool, TritonKernels], *, layers: int | None = None) -> FusedModel:
        """Make a model that can run, with all its layers or the first few."""
        pages = KVPages(
            self._decoder.config,
            num_pages=num_pages,
            page_size=self._page_size,
            num_slots=self._config.max_running_requests,
            max_model_tokens=self._max_tokens,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        weights = dataclasses.replace(self.weights, layers=self.weights.layers[:layers])
        return FusedModel(weights, pages, kernels, self.plans, prompt_tiles_only=self._config.batch_invariant)

    def staging(self) -> StepStaging:
        """Make host memory for inputs."""
        return StepStaging(
            num_slots=self._config.max_running_requests,
            size=max(layout.size for layout in self.plans),
            tile_tokens=self._tile_tokens,
            all_in_tiles=self._config.batch_invariant,
            pinned=True,
        )


def open_fused(
    config: EngineConfig,
    decoder: Decoder,
    progress: Progress,
    *,
    page_size: int,
    step_tokens: int,
    max_model_tokens: int,
) -> OpenFused:
    """Make the runner of a decoder whose weights are on a GPU.

    Args:
        config: the engine's settings.
        decoder: its weights are taken over.
        progress: told of the stages "kernels" and "CUDA graphs".
        page_size: tokens of a page.
        step_tokens: most tokens of a step.
        max_model_tokens: most positions of a request.

    Raises:
        ConfigurationError: the memory does not suffice.
    """
    device = decoder.device
    torch.cuda.current_stream(device).synchronize()  # the weights are there
    with torch.cuda.device(device), torch.cuda.stream(step_stream(device)), torch.inference_mode():
        parts = _Parts(config, decoder, page_size=page_size, step_tokens=step_tokens, max_tokens=max_model_tokens)
        compile_only = parts.model(1, parts.kernels(compile_only=True), layers=2)
        compile_steps(parts.plans, compile_only.step, functools.partial(progress, _KERNELS))
        del compile_only
        num_pages = _pool_pages(config, parts, page_size=page_size, max_tokens=max_model_tokens)
        kernels = parts.kernels()
        model, staging = parts.model(num_pages, kernels), parts.staging()
        step_stream(device).synchronize()  # KV is zeroed
    graphs = StepGraphs(model.step, device)
    try:
        if config.cuda_graphs:
            layouts = parts.layouts.all()
            graphs.capture(
                layouts,
                functools.partial(_fill_with_padding, model, staging),
                lambda done: progress(_GRAPHS, done, len(layouts)),
            )
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
        runner = CUDARunner(model, graphs, kernels[False], parts.layouts, staging)
    except BaseException:
        graphs.close()
        raise
    return OpenFused(runner=runner, num_pages=num_pages)


def _pool_pages(config: EngineConfig, parts: _Parts, *, page_size: int, max_tokens: int) -> int:
    """Return the pages of the pool: as asked for, or what is left."""
    if config.kv_pool_tokens is not None:
        check_pool_tokens(config.kv_pool_tokens, page_size)
        return config.kv_pool_tokens // page_size
    used = _measure(config, parts)
    return pool_pages(
        parts.device,
        memory_fraction=config.memory_fraction,
        step_bytes=used.total(len(parts.plans) if config.cuda_graphs else 0),
        page_bytes=KVPages.page_bytes(parts.config, page_size, parts.weights.embedding.dtype),
        useful=config.max_running_requests * -(-max_tokens // page_size),
    )


def _measure(config: EngineConfig, parts: _Parts) -> StepMemory:
    """Run the largest step and a small one with hardly any KV."""
    model, staging, device = parts.model(1, parts.kernels()), parts.staging(), parts.device
    graphs = StepGraphs(model.step, device)
    prepare = functools.partial(_fill_with_padding, model, staging)

    def measured(layout: StepLayout) -> None:
        if config.cuda_graphs:
            graphs.capture([layout], prepare)
        else:
            prepare(layout)
            graphs.run(layout)
            step_stream(device).synchronize()

    try:
        layouts = parts.layouts.all()
        return measure_steps(device, functools.partial(measured, layouts[-1]), functools.partial(measured, layouts[0]))
    finally:
        graphs.close()


def _fill_with_padding(model: FusedModel, staging: StepStaging, layout: StepLayout) -> None:
    """Put a step of padding alone into the model's input, on the current stream."""
    staged = staging.stage(_EMPTY, layout)
    model.input[: layout.size].copy_(staged.block)


def _empty_batch() -> Batch:
    ints, floats = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    return Batch(
        index=0,
        slots=ints,
        starts=ints,
        query_lens=ints,
        token_ids=ints,
        sample_rows=ints,
        temperatures=floats,
        top_ps=floats,
        top_ks=ints,
        min_ps=floats,
        seeds=np.zeros(0, dtype=np.int64),
        table_writes=np.zeros((3, 0), dtype=np.int32),
        page_copies=np.zeros((2, 0), dtype=np.int32),
    )


_EMPTY: Final = _empty_batch()
