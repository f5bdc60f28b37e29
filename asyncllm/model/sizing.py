"""How large everything is made: pages, KV pool, context, steps.

Runs on the engine thread while it opens, imports no torch; owns nothing. Invariant: `Sizes` that exist fit the
model's context, each other and the memory that was found free.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

from asyncllm.config import check_pool_tokens, check_step_budget
from asyncllm.errors import ConfigurationError
from asyncllm.model.tensor_names import tensor_shapes

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig
    from asyncllm.model.model_config import ModelConfig

__all__ = ["Memory", "Sizes", "choose_sizes"]

_GIB: Final = 2**30
_CPU_STEP_TOKENS: Final = 512  # more only makes neighbours wait longer: products are at their best from 128 rows on
_GPU_STEP_TOKENS: Final = 4096
_CPU_CHUNK: Final = 64
_GPU_CHUNK: Final = 256
_CPU_POOL_BYTES: Final = _GIB  # of a pool that nobody asked for, unless one whole context needs more
_LEAST_PAGES: Final = 64  # of a small pool, where pages can be smaller
_SMALLEST_PAGE: Final = 16
_LOGIT_COPIES: Final = 4  # float32 [rows, vocab] that sampling holds at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Say what memory there is, in bytes.

    Args:
        free: what could be taken now; None: nobody knows.
        total: of a GPU; None: the CPU's, where the fraction is one of what is free.
    """

    free: int | None
    total: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Hold what was chosen; see `EngineConfig` for the meanings."""

    page_size: int
    num_pages: int
    max_model_tokens: int
    step_token_budget: int
    min_prefill_chunk: int

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_pages * self.page_size


def choose_sizes(
    config: EngineConfig, model: ModelConfig, memory: Memory, *, element_bytes: int, best_page_size: int, gpu: bool
) -> Sizes:
    """Choose what `config` leaves open, and check what it says.

    Args:
        config: the engine's settings.
        model: the model's shape.
        memory: before anything of the model is there.
        element_bytes: of weights, activations and KV.
        best_page_size: the attention backend's.
        gpu: whether it runs on one.

    Raises:
        ConfigurationError: the settings contradict the model, each other or the memory.
    """
    chunk = config.min_prefill_chunk or (_GPU_CHUNK if gpu else _CPU_CHUNK)
    least = config.max_running_requests + chunk
    budget = config.step_token_budget or max(_GPU_STEP_TOKENS if gpu else _CPU_STEP_TOKENS, least)
    check_step_budget(budget, config.max_running_requests, chunk)
    context = config.max_model_tokens or model.context_tokens
    if context > model.context_tokens:
        raise ConfigurationError(f"max_model_tokens={context} is more than the model's context {model.context_tokens}")
    page_size = config.page_size or _page_size(config, best_page_size, gpu=gpu)
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * element_bytes
    left = _bytes_left(config, model, memory, element_bytes=element_bytes, budget=budget)
    if config.kv_pool_tokens is not None:
        check_pool_tokens(config.kv_pool_tokens, page_size)
        num_pages = config.kv_pool_tokens // page_size
        if left is not None and config.kv_pool_tokens * token_bytes > left:
            raise ConfigurationError(
                f"kv_pool_tokens={config.kv_pool_tokens} need {_gib(config.kv_pool_tokens * token_bytes)}, but the "
                f"weights leave {_gib(left)}; the most is {max(0, left) // (page_size * token_bytes) * page_size}"
            )
    else:
        num_pages = _num_pages(config, left, context, page_size=page_size, token_bytes=token_bytes, gpu=gpu)
    return Sizes(
        page_size=page_size,
        num_pages=num_pages,
        # Longer requests are refused by the pool; tables are as long as this.
        max_model_tokens=context if config.max_model_tokens else min(context, num_pages * page_size + 1),
        step_token_budget=budget,
        min_prefill_chunk=chunk,
    )


def _page_size(config: EngineConfig, best: int, *, gpu: bool) -> int:
    """Return the backend's best; on the CPU, where any will do, a smaller one that suits a small pool."""
    pool, size = config.kv_pool_tokens, best
    if gpu or pool is None:
        return size
    while size > _SMALLEST_PAGE and pool < _LEAST_PAGES * size:
        size //= 2
    while pool % size:
        size //= 2
    return size


def _bytes_left(
    config: EngineConfig, model: ModelConfig, memory: Memory, *, element_bytes: int, budget: int
) -> int | None:
    """Return what weights and a step's activations leave for KV; None where nobody knows."""
    if memory.free is None:
        return None
    weights = element_bytes * sum(math.prod(shape) for shape in tensor_shapes(model).values())
    width = 4 * model.hidden_size + 3 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    logits = 4 * _LOGIT_COPIES * config.max_running_requests * model.vocab_size
    usable = config.memory_fraction * (memory.free if memory.total is None else memory.total)
    taken = 0 if memory.total is None else memory.total - memory.free
    left = int(usable) - taken - weights - budget * width * element_bytes - logits
    if left <= 0:
        raise ConfigurationError(
            f"weights of {_gib(weights)} and a step of {budget} tokens do not fit: {_gib(memory.free)} of memory are "
            f"free, of which memory_fraction={config.memory_fraction:g} may be used"
        )
    return left


def _num_pages(
    config: EngineConfig, left: int | None, context: int, *, page_size: int, token_bytes: int, gpu: bool
) -> int:
    """Return the pages of a pool that nobody asked for: what can be used, within what is there."""
    useful = config.max_running_requests * -(-context // page_size)
    if not gpu:  # a program's memory is not a GPU's: a pool is zeroed when made, and others want some too
        useful = min(useful, max(_CPU_POOL_BYTES, context * token_bytes) // (page_size * token_bytes))
        left = None if left is None else left // 4
    fits = useful if left is None else left // (page_size * token_bytes)
    if not min(useful, fits):
        raise ConfigurationError(f"no memory is left for a KV pool: a page takes {_gib(page_size * token_bytes)}")
    return min(useful, fits)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
