"""Puts the fused path together: sizes, weights, KV, kernels, graphs and the runner.

Runs on the engine thread while it opens; owns nothing once it has returned. Invariant: when it raises, by itself or
because `progress` did, no graph and no memory of it stays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from asyncllm.model.cuda.asked_rows import launch_asked
from asyncllm.model.cuda.compiling import compile_steps
from asyncllm.model.cuda.cuda_runner import CUDARunner
from asyncllm.model.cuda.fused_model import FusedModel, StepBuffers
from asyncllm.model.cuda.fused_weights import FusedWeights
from asyncllm.model.cuda.graphs import StepGraphs
from asyncllm.model.cuda.kv_pages import KVPages
from asyncllm.model.cuda.layouts import StepLayouts
from asyncllm.model.cuda.memory import StepMemory, measure_steps, pool_pages
from asyncllm.model.cuda.staging import StepStaging
from asyncllm.model.cuda.streams import step_stream
from asyncllm.model.cuda.told_rows import launch_told
from asyncllm.model.cuda.triton_kernels import AttentionScratch, TritonKernels, prompt_tile_tokens
from asyncllm.model.cuda.tuning import default_step_tokens, plan_step
from asyncllm.model.decoder import Decoder
from asyncllm.model.sizing import Memory, choose_sizes
from asyncllm.scheduler.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncllm.backend import Progress
    from asyncllm.config import EngineConfig
    from asyncllm.model.cuda.step_layout import StepLayout
    from asyncllm.model.cuda.tuning import StepPlan
    from asyncllm.model.model_config import ModelConfig
    from asyncllm.model.sizing import Sizes
    from asyncllm.model.weights import WeightSource

__all__ = ["open_fused"]

_PAGE_SIZE: Final = 64  # as fast as any other; small ones share more and waste less, but need more table writes
_MIN_PREFILL_CHUNK: Final = 256
_WEIGHTS: Final = "weights"
_KERNELS: Final = "kernels"
_GRAPHS: Final = "CUDA graphs"
_DEPENDENT_CAPABILITY: Final = (9, 0)


class _Parts:
    """What has been made so far."""

    def __init__(self, config: EngineConfig, decoder: Decoder, sizes: Sizes) -> None:
        self.device = decoder.device
        self._config = config
        self._decoder = decoder
        self._sizes = sizes
        self._tile_tokens = prompt_tile_tokens(decoder.config)
        self._weights = FusedWeights.of(decoder)
        self.layouts = StepLayouts(
            max_rows=config.max_running_requests,
            max_tokens=sizes.step_token_budget,
            tile_tokens=self._tile_tokens,
            all_in_tiles=config.batch_invariant,
        )
        self.plans: dict[StepLayout, StepPlan] = {
            layout: plan_step(decoder.config, layout.rows, decodes=layout.decodes) for layout in self.layouts.all()
        }
        self._buffers = StepBuffers(
            self.plans, vocab_size=len(self._weights.lm_head.weight), dtype=decoder.dtype, device=decoder.device
        )
        parts = max(layout.rows * plan.decode.splits for layout, plan in self.plans.items())
        self._scratch = AttentionScratch(
            decoder.config, rows=config.max_running_requests, parts=parts, device=decoder.device
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return KVPages.page_bytes(self._decoder.config, self._sizes.page_size, self._decoder.dtype)

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
            page_size=self._sizes.page_size,
            num_slots=self._config.max_running_requests,
            max_model_tokens=self._sizes.max_model_tokens,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        weights = dataclasses.replace(self._weights, layers=self._weights.layers[:layers])
        return FusedModel(
            weights, pages, self._buffers, kernels, self.plans, prompt_tiles_only=self._config.batch_invariant
        )

    def different_launches(self) -> list[Callable[[], None]]:
        """Give what launches, but that it is compiled only, every kernel of steps and of asking rows."""
        kernels = self.kernels(compile_only=True)
        model = self.model(1, kernels, layers=2)
        steps = {
            (plan, layout.decodes, layout.writes): functools.partial(model.step, layout)
            for layout, plan in self.plans.items()
        }
        pool = model.pages.token_pool
        return [
            *steps.values(),
            functools.partial(launch_asked, self._buffers, pool, kernels[True]),
            functools.partial(launch_told, self._buffers, kernels[True]),
        ]

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
    model: ModelConfig,
    weights: WeightSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> tuple[CUDARunner, Sizes]:
    """Load a model onto a GPU and make everything that its steps need.

    Args:
        config: the engine's settings.
        model: the model's shape.
        weights: read, not closed.
        device: which GPU.
        dtype: of weights, activations and KV.
        progress: told of the stages "weights", "kernels" and "CUDA graphs".

    Raises:
        ConfigurationError: the settings contradict the model, each other or the memory.
        ModelLoadError: a tensor cannot be read.
    """
    sizes = _sizes(config, model, device, dtype)
    progress(_WEIGHTS, 0, model.num_layers)
    with torch.cuda.device(device), torch.cuda.stream(step_stream(device)):
        decoder = Decoder(
            model,
            weights,
            dtype=dtype,
            device=device,
            max_model_tokens=sizes.max_model_tokens,
            on_layer=functools.partial(progress, _WEIGHTS),
        )
        with torch.inference_mode():
            return _open_runner(config, decoder, sizes, progress)


def _sizes(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Sizes:
    """Choose what the settings leave open; of the KV pool, the most that requests could fill."""
    chunk = config.min_prefill_chunk or _MIN_PREFILL_CHUNK
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    budget = config.step_token_budget or max(
        default_step_tokens(model, processors), config.max_running_requests + chunk
    )
    return choose_sizes(
        dataclasses.replace(config, step_token_budget=budget, min_prefill_chunk=chunk),
        model,
        Memory(free=None, total=None),
        element_bytes=dtype.itemsize,
        best_page_size=_PAGE_SIZE,
        gpu=True,
    )


def _open_runner(config: EngineConfig, decoder: Decoder, sizes: Sizes, progress: Progress) -> tuple[CUDARunner, Sizes]:
    device, parts = decoder.device, _Parts(config, decoder, sizes)
    compile_steps(parts.different_launches(), functools.partial(progress, _KERNELS))
    if config.kv_pool_tokens is None:
        sizes = _sizes_measured(config, parts, sizes)
    kernels = parts.kernels()
    model, staging = parts.model(sizes.num_pages, kernels), parts.staging()
    step_stream(device).synchronize()  # weights and KV are there: graphs are captured on another stream
    graphs = StepGraphs(model.step, device)
    try:
        if config.cuda_graphs:
            layouts = sorted(parts.layouts.all(), key=lambda each: each.tokens, reverse=True)
            graphs.capture(
                layouts,
                functools.partial(_fill_with_padding, model, staging),
                lambda done: progress(_GRAPHS, done, len(layouts)),
            )
            torch.cuda.empty_cache()
        return CUDARunner(model, graphs, kernels, parts.layouts, staging), sizes
    except BaseException:
        graphs.close()
        raise


def _sizes_measured(config: EngineConfig, parts: _Parts, sizes: Sizes) -> Sizes:
    """Return the sizes with what is left of the memory as the KV pool."""
    used = _measure(config, parts)
    num_pages = pool_pages(
        parts.device,
        memory_fraction=config.memory_fraction,
        step_bytes=used.total(len(parts.plans) if config.cuda_graphs else 0),
        page_bytes=parts.page_bytes,
        useful=sizes.num_pages,
    )
    context = sizes.max_model_tokens
    if config.max_model_tokens is None:
        context = min(context, num_pages * sizes.page_size + 1)
    return dataclasses.replace(sizes, num_pages=num_pages, max_model_tokens=context)


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
    model.buffers.input[: layout.size].copy_(staged.block)


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
