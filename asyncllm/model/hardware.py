"""What there is to run on: the device, the dtype that it multiplies best, its free memory.

Runs on the engine thread while it opens; owns nothing. Invariant: looking changes nothing; on the CPU no more memory
is called free than the process may take without being killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncllm.config import DType

__all__ = ["choose_device", "choose_dtype", "free_memory_bytes", "total_memory_bytes"]

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16", "bf16")
_BFLOAT16_CAPABILITY: Final = (8, 0)
_MEMINFO: Final = Path("/proc/meminfo")
_CONTAINER: Final = Path("/sys/fs/cgroup")


def choose_device(name: str) -> torch.device:
    """Return the device that a name means; "auto" is the first GPU, or the CPU where there is none.

    Raises:
        ConfigurationError: there is no such device.
    """
    count = torch.cuda.device_count()
    known = ["cpu", *(f"cuda:{index}" for index in range(count))]
    wanted = {"auto": known[min(1, count)], "cuda": "cuda:0"}.get(name, name)
    if wanted not in known:
        raise ConfigurationError(f"device={name!r} is not there; there are: {', '.join(known)}")
    return torch.device(wanted)


def choose_dtype(name: DType, device: torch.device, *, checkpoint: str) -> torch.dtype:
    """Return the dtype that a name means.

    Args:
        name: "auto" is bfloat16 where the device multiplies it natively, else float32; but float16 stays itself
            on a GPU.
        device: computes with it.
        checkpoint: what the checkpoint's tensors are.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda" and checkpoint == "float16":
        return torch.float16
    return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32


def free_memory_bytes(device: torch.device) -> int | None:
    """Return how much memory could be taken now; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [value for value in (_available_bytes(), _container_bytes()) if value is not None]
    return min(free, default=None)


def total_memory_bytes(device: torch.device) -> int | None:
    """Return a GPU's memory; None for the CPU, whose memory belongs to others as well."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY
    # Not in every torch that this runs with; without it float32 is right everywhere.
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in _BFLOAT16_INSTRUCTIONS)


def _available_bytes() -> int | None:
    """Return what the system could give without swapping (Linux)."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _container_bytes() -> int | None:
    """Return what a container's limit leaves: its file cache is given up before anyone is killed."""
    try:
        limit = int((_CONTAINER / "memory.max").read_text(encoding="ascii"))
        used = int((_CONTAINER / "memory.current").read_text(encoding="ascii"))
        lines = (_CONTAINER / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no limit reads "max"
        return None
    cache = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
    return max(0, limit - used + cache)
