"""Builds the native kernels with the machine's C compiler and loads them.

Runs on the engine thread while a model opens, never during a step. Owns nothing: a library that is loaded stays in
the process. Invariant: whatever is missing (a compiler, OpenMP, a processor that this was tried on) gives a reason,
never another error; nothing is left on the disk.

The kernels use the threads of torch's own OpenMP: a second runtime's threads would wait for work on the same cores.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import platform
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from asyncllm.model.model_config import ModelConfig

__all__ = ["NativeLibrary", "NativeUnavailableError", "load_native", "why_not_native"]

_SOURCES: Final = tuple(
    pathlib.Path(__file__).with_name(name) for name in ("kernels.c", "products.c", "tile_attention.c")
)
_COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # all that vectorizing needs; NaN stays NaN
)
_X86_FLAGS: Final = ("-mprefer-vector-width=512",)  # GCC takes half a register otherwise
_COMPILE_SECONDS: Final = 60.0
_LANES: Final = 16
_MAX_HEAD_DIM: Final = 256
_MAX_GROUP: Final = 16

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeUnavailableError(Exception):
    """The kernels cannot be built or loaded here; says why."""


class NativeLibrary:
    """The kernels' entry points, with their argument types.

    Attributes:
        rms_norm: see `asyncllm_rms_norm` in kernels.c.
        rotate_and_store: see `asyncllm_rotate_and_store`.
        attend: see `asyncllm_attend`.
        multiply: see `asyncllm_multiply` in products.c.
        can_multiply: whether the processor has what `multiply` needs.
        attend_tiles: see `asyncllm_attend_tiles` in tile_attention.c.
        can_attend_tiles: whether processor and head_dim are what `attend_tiles` needs.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.rms_norm = library.asyncllm_rms_norm
        self.rms_norm.argtypes = [*[_POINTER] * 3, *[_INT] * 2, _FLOAT]
        self.rotate_and_store = library.asyncllm_rotate_and_store
        self.rotate_and_store.argtypes = [*[_POINTER] * 9, *[_INT] * 3, _FLOAT]
        self.attend = library.asyncllm_attend
        self.attend.argtypes = [*[_POINTER] * 11, *[_INT] * 6, _FLOAT]
        self.multiply = library.asyncllm_multiply
        self.multiply.argtypes = [*[_POINTER] * 5, *[_INT] * 4]
        self.attend_tiles = library.asyncllm_attend_tiles
        self.attend_tiles.argtypes = [_POINTER] * 6
        for function in (self.rms_norm, self.rotate_and_store, self.attend, self.multiply, self.attend_tiles):
            function.restype = None
        self.can_multiply = bool(library.asyncllm_can_multiply())
        self.can_attend_tiles = bool(library.asyncllm_can_attend_tiles())


def why_not_native(model: ModelConfig, dtype: torch.dtype) -> str | None:
    """Tell why a model cannot run on the kernels, wherever it is; None if it can."""
    group = model.num_heads // model.num_kv_heads
    if dtype != torch.bfloat16:
        return f"they compute bfloat16, not {str(dtype).removeprefix('torch.')}"
    if model.head_dim % _LANES or model.head_dim > _MAX_HEAD_DIM:
        return f"head_dim={model.head_dim} is not a multiple of {_LANES} up to {_MAX_HEAD_DIM}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a key head, more than {_MAX_GROUP}"
    return None


@functools.cache  # what is loaded cannot be unloaded, so the same kernels are never built twice in a process
def load_native(head_dim: int, group: int) -> NativeLibrary:
    """Build and load the kernels for a model's shape; takes about a second.

    Args:
        head_dim: width of a head.
        group: query heads of a key head.

    Raises:
        NativeUnavailableError: there is no compiler, or it fails, or torch runs without OpenMP.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailableError(f"there is no C compiler ({', '.join(_COMPILERS)})")
    openmp = _openmp_of_torch()
    flags = [*_FLAGS, *(_X86_FLAGS if platform.machine() == "x86_64" else ())]
    sizes = [f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"]
    with tempfile.TemporaryDirectory(prefix="asyncllm-") as folder:
        linked, objects = f"{folder}/kernels.so", [f"{folder}/{source.stem}.o" for source in _SOURCES]
        for source, compiled in zip(_SOURCES, objects, strict=True):
            _run([compiler, *flags, *sizes, "-c", str(source), "-o", compiled])
        _run([compiler, "-shared", *objects, openmp, "-lm", "-o", linked])
        try:
            return NativeLibrary(ctypes.CDLL(linked))  # stays mapped when the file is gone
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"what was built cannot be loaded: {error}") from error


def _openmp_of_torch() -> str:
    """Find the file of the OpenMP runtime that torch uses; others may be loaded beside it."""
    try:
        torch_library = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = ctypes.cast(torch_library.omp_get_max_threads, ctypes.c_void_p).value or 0
        mapped = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"torch's OpenMP runtime is not found: {error}") from error
    for line in mapped:
        addresses, *_rest, file = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= function < last and file.startswith("/"):
            return file
    raise NativeUnavailableError("torch's OpenMP runtime is in no file")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)  # noqa: S603
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise NativeUnavailableError(f"{command[0]} failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} failed: {error}") from error
