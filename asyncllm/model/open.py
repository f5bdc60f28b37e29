"""Opens a model: finds its files, chooses what the settings leave open, loads it, puts it together with its tokenizer.

Runs on the engine thread, once a start; owns nothing once it has returned. Invariant: when it raises, by itself or
because `progress` did, no thread, file or memory of it stays.
"""

from __future__ import annotations

import functools
import logging
import secrets
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.backend import OpenBackend
from asyncllm.errors import ConfigurationError
from asyncllm.model.attention.choice import choose_kernels
from asyncllm.model.checkpoint import Checkpoint
from asyncllm.model.cpu_device import CPUDevice
from asyncllm.model.cpu_threads import limit_torch_threads, run_and_forget_threads
from asyncllm.model.cuda.availability import check_context, why_not_fused
from asyncllm.model.cuda_device import CUDADevice
from asyncllm.model.decoder import Decoder
from asyncllm.model.gguf_header import read_gguf_header
from asyncllm.model.hardware import choose_device, choose_dtype, free_memory_bytes, total_memory_bytes
from asyncllm.model.runner import ModelRunner
from asyncllm.model.sizing import Memory, choose_sizes
from asyncllm.model.sources import find_model, find_tokenizer
from asyncllm.text.gguf_tokenizer import gguf_tokenizer
from asyncllm.text.load import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm.backend import Progress, StepRunner
    from asyncllm.config import EngineConfig
    from asyncllm.model.attention.interface import AttentionBackend
    from asyncllm.model.model_config import ModelConfig
    from asyncllm.model.runner import Device
    from asyncllm.model.sizing import Sizes
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["TorchBackend"]

_WEIGHTS: Final = "weights"
_TOKENIZER: Final = "tokenizer"
_KV: Final = "KV pool"
_FUSED: Final = "triton"  # the attention backend of the GPU's own path

log = logging.getLogger("asyncllm")


class TorchBackend:
    """Opens real models; a `Backend`."""

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """Load everything; see `Backend`.

        Raises:
            ModelLoadError: the model cannot be found, read or computed.
            ConfigurationError: the settings do not fit the model or the machine.
        """
        device = choose_device(config.device)
        if device.type == "cpu":
            return run_and_forget_threads(functools.partial(self._open, config, device, progress))
        check_context(device)
        return self._open(config, device, progress)

    def _open(self, config: EngineConfig, device: torch.device, progress: Progress) -> OpenBackend:
        path = find_model(config.model, revision=config.revision, load_format=config.load_format, progress=progress)
        seed = secrets.randbits(63) if config.seed is None else config.seed
        with Checkpoint.open(path, load_format=config.load_format, seed=seed, device=device) as checkpoint:
            model, generation = checkpoint.config, checkpoint.generation
            tokenizer = _tokenizer(config, path, progress)
            dtype = choose_dtype(config.dtype, device, checkpoint=model.dtype)
            start = _start_fused if _runs_fused(config, model, device, dtype) else _start
            runner, sizes, attention = start(config, checkpoint, device, dtype, progress)
        return OpenBackend(
            runner=runner,
            tokenizer=tokenizer,
            model_config=model,
            generation=generation.defaults,
            eos_token_ids=model.eos_token_ids | generation.eos_token_ids | _eos_token_ids(tokenizer),
            page_size=sizes.page_size,
            num_pages=sizes.num_pages,
            max_model_tokens=sizes.max_model_tokens,
            step_token_budget=sizes.step_token_budget,
            min_prefill_chunk=sizes.min_prefill_chunk,
            resolved={
                "device": str(device),
                "dtype": str(dtype).removeprefix("torch."),
                "load_format": _load_format(config, path),
                "cpu_threads": config.cpu_threads or torch.get_num_threads(),
                "attention_backend": attention,
                "kv_pool_tokens": sizes.pool_tokens,
                "page_size": sizes.page_size,
                "max_model_tokens": sizes.max_model_tokens,
                "step_token_budget": sizes.step_token_budget,
                "min_prefill_chunk": sizes.min_prefill_chunk,
            },
        )


def _runs_fused(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Decide whether a model runs on Triton's kernels.

    Raises:
        ConfigurationError: it cannot, and was asked to.
    """
    if config.attention_backend not in ("auto", _FUSED) or (
        config.attention_backend == "auto" and device.type == "cpu"
    ):
        return False
    reason = why_not_fused(model, device, dtype)
    if reason is not None and config.attention_backend == _FUSED:
        raise ConfigurationError(f"attention_backend={_FUSED!r}: Triton's kernels cannot be used: {reason}")
    if reason is not None:
        log.warning("Triton's kernels cannot be used: %s; %s runs on plain torch", reason, device)
    return reason is None


def _start_fused(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress
) -> tuple[StepRunner, Sizes, str]:
    from asyncllm.model.cuda.open_fused import open_fused  # noqa: PLC0415 - Triton is not everywhere

    runner, sizes = open_fused(
        config, checkpoint.config, checkpoint.weights, device=device, dtype=dtype, progress=progress
    )
    return runner, sizes, _FUSED


def _start(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress
) -> tuple[StepRunner, Sizes, str]:
    attention, ops = choose_kernels(config.attention_backend, model=checkpoint.config, device=device, dtype=dtype)
    sizes = _sizes(config, checkpoint.config, attention, device, dtype)
    progress(_WEIGHTS, 0, checkpoint.config.num_layers)
    decoder = Decoder(
        checkpoint.config,
        checkpoint.weights,
        dtype=dtype,
        device=device,
        max_model_tokens=sizes.max_model_tokens,
        ops=ops,
        on_layer=functools.partial(progress, _WEIGHTS),
    )
    return _runner(config, decoder, attention, sizes, progress), sizes, attention.name


def _tokenizer(config: EngineConfig, path: Path, progress: Progress) -> Tokenizer | None:
    if config.tokenizer is not None:
        path = find_tokenizer(config.tokenizer, progress=progress)
    progress(_TOKENIZER, 0, 1)
    # By way of the checked header: reading it as `gguf` does takes seconds, and trusts it.
    tokenizer = gguf_tokenizer(read_gguf_header(path).settings) if path.is_file() else load_tokenizer(path)
    progress(_TOKENIZER, 1, 1)
    if tokenizer is not None:
        tokenizer.load_chat_renderer()
    return tokenizer


def _eos_token_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    return frozenset() if tokenizer is None else tokenizer.eos_token_ids


def _sizes(
    config: EngineConfig, model: ModelConfig, attention: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> Sizes:
    sizes = choose_sizes(
        config,
        model,
        Memory(free=free_memory_bytes(device), total=total_memory_bytes(device)),
        element_bytes=dtype.itemsize,
        best_page_size=attention.default_page_size,
        gpu=device.type == "cuda",
    )
    attention.check_page_size(sizes.page_size)
    return sizes


def _runner(
    config: EngineConfig, decoder: Decoder, attention: AttentionBackend, sizes: Sizes, progress: Progress
) -> ModelRunner:
    progress(_KV, 0, 1)
    device = _device(decoder.device, config.cpu_threads)
    try:
        runner = ModelRunner(
            decoder,
            attention,
            device,
            num_slots=config.max_running_requests,
            max_step_tokens=sizes.step_token_budget,
            page_size=sizes.page_size,
            num_pages=sizes.num_pages,
        )
        if decoder.device.type == "cuda":  # steps run on a stream of their own
            torch.cuda.current_stream(decoder.device).synchronize()
        progress(_KV, 1, 1)
        return runner
    except BaseException:
        device.close()
        raise


def _device(device: torch.device, cpu_threads: int | None) -> Device:
    if device.type == "cuda":
        return CUDADevice(device)
    return CPUDevice() if cpu_threads is None else CPUDevice(functools.partial(limit_torch_threads, cpu_threads))


def _load_format(config: EngineConfig, path: Path) -> str:
    if config.load_format == "dummy":
        return "dummy"
    return "gguf" if path.is_file() else "safetensors"
