"""The few driver calls of a step, made without letting the interpreter's lock go.

Runs on the engine thread; owns nothing but function pointers. Each call by way of torch lets the lock go and must win
it back, which beside a caller that burns CPU takes longer than the call. These only enqueue, and return within
microseconds. Invariant: whatever is missing (the driver under this name, a function of it, torch's handle of a
graph) means None, and the step goes by way of torch.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DirectCalls", "graph_handle"]

_DRIVER: Final = "libcuda.so.1"
_FUNCTIONS: Final = {
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuGraphLaunch": (ctypes.c_void_p, ctypes.c_void_p),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
}


class DirectCalls:
    """Enqueue on one stream.

    Args:
        functions: of the driver, by name; each returns 0 or an error's number.
        stream: the stream's handle.
        device: its device's index.
    """

    def __init__(self, functions: dict[str, Callable[..., int]], *, stream: int, device: int) -> None:
        self._copy_in, self._launch, self._copy_out, self._record = (functions[name] for name in _FUNCTIONS)
        self._stream = stream
        self._device = device

    @classmethod
    def find(cls, stream: torch.cuda.Stream) -> DirectCalls | None:
        """Look the driver's functions up; None if one is missing."""
        functions: dict[str, Callable[..., int]] = {}
        try:
            driver = ctypes.PyDLL(_DRIVER)  # unlike a CDLL, keeps the lock
            for name, arguments in _FUNCTIONS.items():
                function = getattr(driver, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
                functions[name] = function
        except (OSError, AttributeError):
            return None
        return cls(functions, stream=stream.cuda_stream, device=stream.device.index)

    def use_device(self) -> None:
        """Make the stream's device the thread's current one, to which the driver's calls go; once before others."""
        torch.cuda.set_device(self._device)

    def copy_in(self, target: int, source: int, size: int) -> None:
        """Copy bytes from the host, pinned, to the device.

        Raises:
            RuntimeError: the driver refused, as from the other calls.
        """
        _check(self._copy_in(target, source, size, self._stream))

    def launch(self, graph: int) -> None:
        """Run a graph, by its handle."""
        _check(self._launch(graph, self._stream))

    def copy_out(self, target: int, source: int, size: int) -> None:
        """Copy bytes from the device to the host, pinned."""
        _check(self._copy_out(target, source, size, self._stream))

    def record(self, event: int) -> None:
        """Record an event, by its handle."""
        _check(self._record(event, self._stream))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver refused to enqueue a step: error {error}")


def graph_handle(graph: torch.cuda.CUDAGraph) -> int | None:
    """Return a captured graph's handle, None where torch does not tell."""
    tell = getattr(graph, "raw_cuda_graph_exec", None)
    try:
        return None if tell is None else int(tell())
    except RuntimeError:
        return None
