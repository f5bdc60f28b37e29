"""The engine's settings.

Runs anywhere; owns nothing. Invariant: an `EngineConfig` that exists is consistent as far as it can be seen
without the model; the rest is checked when the engine starts.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from typing import Literal, get_args

from asyncllm.errors import ConfigurationError

__all__ = ["Admission", "EngineConfig", "LoadFormat", "PrefixCache"]

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
PrefixCache = Literal["radix", "none"]
Admission = Literal["reserve"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Say what an engine runs and within which bounds; `None` means "chosen when the engine starts".

    Args:
        model: a folder, a .gguf file, "smollm2-135m-instruct", or a name on the Hugging Face hub.
        revision: the hub's branch, tag or commit.
        tokenizer: a folder or hub name to take the tokenizer from, instead of the model's own.
        dtype: "auto" takes bfloat16 where the processor multiplies it natively, else float32.
        device: "auto", "cpu", "cuda" or "cuda:N".
        cpu_threads: threads of a step on the CPU; None: torch's own choice.
        load_format: "auto" looks at the files; "dummy" makes random weights in the config's shape.
        kv_pool_tokens: tokens that the KV pool holds, a multiple of the page size; None: measured.
        memory_fraction: of the device's memory that weights, activations and KV may take together.
        page_size: tokens of a KV page; None: the attention backend's best.
        max_model_tokens: most tokens of prompt and output together; None: the model's context.
        max_running_requests: most requests in a step.
        max_waiting_requests: most requests submitted and not admitted; one more raises `QueueFullError`. None: any.
        step_token_budget: most tokens a step computes, >= max_running_requests + min_prefill_chunk. None: chosen.
        min_prefill_chunk: tokens that the oldest prompt gets in each step. None: 64 on the CPU, 256 on a GPU.
        pause_grace_seconds: how long a paused request keeps its KV while another waits for it.
        prefix_cache: "radix" shares the KV of common prefixes; "none" keeps nothing.
        share_inflight_prefixes: let a request wait for another that computes the prefix both have.
        admission: "reserve" starts a request only when its worst case fits.
        overlap: launch a step before the results of the one before are read.
        cuda_graphs: replay CUDA graphs where a step's shape allows it.
        attention_backend: "auto" or a backend's name.
        batch_invariant: make a request's tokens on a GPU independent of its neighbours.
        close_timeout_seconds: how long closing waits for the step in flight, or for the next file of a model that
            opens; then the engine thread is left to itself.
        switch_interval_seconds: the interpreter's thread switch interval while steps run; None: left alone.
        seed: of dummy weights, and of the seeds drawn for requests without one; None: random.
        debug_checks: check the KV's integrity after every step.

    Raises:
        ConfigurationError: a value is out of range or two of them contradict each other.
    """

    model: str | os.PathLike[str]
    revision: str | None = None
    tokenizer: str | os.PathLike[str] | None = None
    dtype: DType = "auto"
    device: str = "auto"
    cpu_threads: int | None = None
    load_format: LoadFormat = "auto"
    kv_pool_tokens: int | None = None
    memory_fraction: float = 0.9
    page_size: int | None = None
    max_model_tokens: int | None = None
    max_running_requests: int = 256
    max_waiting_requests: int | None = None
    step_token_budget: int | None = None
    min_prefill_chunk: int | None = None
    pause_grace_seconds: float = 1.0
    prefix_cache: PrefixCache = "radix"
    share_inflight_prefixes: bool = True
    admission: Admission = "reserve"
    overlap: bool = True
    cuda_graphs: bool = True
    attention_backend: str = "auto"
    batch_invariant: bool = False
    close_timeout_seconds: float = 30.0
    switch_interval_seconds: float | None = 5e-5
    seed: int | None = None
    debug_checks: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
            raise ConfigurationError(f"model must be a path or a name, not {self.model!r}")
        for name, choices in (
            ("dtype", get_args(DType)),
            ("load_format", get_args(LoadFormat)),
            ("prefix_cache", get_args(PrefixCache)),
            ("admission", get_args(Admission)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("share_inflight_prefixes", "overlap", "cuda_graphs", "batch_invariant", "debug_checks"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in (
            "cpu_threads",
            "kv_pool_tokens",
            "page_size",
            "max_model_tokens",
            "max_running_requests",
            "step_token_budget",
            "min_prefill_chunk",
        ):
            _check_count(name, getattr(self, name), low=1)
        _check_count("max_waiting_requests", self.max_waiting_requests, low=0)
        _check_count("seed", self.seed, low=0)
        _check_number("memory_fraction", self.memory_fraction, above=0.0, to=1.0)
        _check_number("pause_grace_seconds", self.pause_grace_seconds, above=-math.inf, to=math.inf, low=0.0)
        _check_number("close_timeout_seconds", self.close_timeout_seconds, above=0.0, to=threading.TIMEOUT_MAX)
        if self.switch_interval_seconds is not None:
            _check_number("switch_interval_seconds", self.switch_interval_seconds, above=0.0, to=1.0)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.kv_pool_tokens is not None and self.page_size is not None:
            check_pool_tokens(self.kv_pool_tokens, self.page_size)
        if self.step_token_budget is not None and self.min_prefill_chunk is not None:
            check_step_budget(self.step_token_budget, self.max_running_requests, self.min_prefill_chunk)


def check_pool_tokens(pool_tokens: int, page_size: int) -> None:
    """Refuse a pool that is not a whole number of pages, naming the nearest that are."""
    if pool_tokens % page_size:
        below = pool_tokens // page_size * page_size
        nearest = f"{below} or {below + page_size}" if below else f"{page_size}"
        raise ConfigurationError(
            f"kv_pool_tokens={pool_tokens} is not a multiple of the page size {page_size}; the nearest are {nearest}"
        )


def check_step_budget(step_token_budget: int, max_running_requests: int, min_prefill_chunk: int) -> None:
    """Refuse a step budget in which decoding requests could starve prompts."""
    least = max_running_requests + min_prefill_chunk
    if step_token_budget < least:
        raise ConfigurationError(
            f"step_token_budget={step_token_budget} is less than max_running_requests + min_prefill_chunk = "
            f"{max_running_requests} + {min_prefill_chunk} = {least}; raise it, or lower one of them"
        )


def _check_count(name: str, value: object, *, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigurationError(f"{name} must be an integer >= {low}, not {value!r}")


def _check_number(name: str, value: object, *, above: float, to: float, low: float | None = None) -> None:
    allowed = f"a number > {above:g} and <= {to:g}" if low is None else f"a finite number >= {low:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"{name} must be {allowed}, not {value!r}")
    if not above < value <= to or (low is not None and value < low):
        raise ConfigurationError(f"{name} must be {allowed}, not {value}")
