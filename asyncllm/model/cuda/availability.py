"""Whether Triton's kernels can run here, found out by running one.

Runs on the engine thread while it opens; owns nothing. Invariant: whatever is missing (the package, a C compiler,
a GPU new enough) gives a reason, never an error.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.model.cuda.tuning import can_fuse

if TYPE_CHECKING:
    from asyncllm.model.model_config import ModelConfig

__all__ = ["check_context", "why_not_fused"]

_CAPABILITY: Final = (8, 0)


def check_context(device: torch.device) -> None:
    """Find out whether this process can still use a GPU: some errors in a kernel end that for good.

    Raises:
        ModelLoadError: it cannot.
    """
    try:
        torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        raise ModelLoadError(
            f"{device} cannot be used: {error}. If something on it failed before, restart the process"
        ) from error


def why_not_fused(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model cannot run on Triton's kernels, or None if it can."""
    if device.type != "cuda":
        return f"they do not run on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they compute bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if not can_fuse(config):
        return f"they take no heads of {config.head_dim}, {config.num_heads} on {config.num_kv_heads}"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"they need compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return _try_kernel(device)


def _try_kernel(device: torch.device) -> str | None:
    from asyncllm.model.cuda.kernels.gate import silu_and_multiply  # noqa: PLC0415 - Triton may be missing

    with torch.cuda.device(device), torch.inference_mode():
        gate_up = torch.ones((1, 32), dtype=torch.bfloat16, device=device)
        out = torch.zeros((1, 16), dtype=torch.bfloat16, device=device)
        try:
            silu_and_multiply[(1, 1)](gate_up, out, WIDTH=16, BLOCK=16, PDL=False, num_warps=1)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is another path
            return f"compiling one failed: {error!r}"
        return None if bool((out > 0).all()) else "one that was compiled computes nothing"
