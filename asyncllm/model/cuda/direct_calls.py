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

    def enqueue(  # noqa: PLR0917 - called once a step, for a step's four calls
        self, source: int, target: int, size: int, graph: int, results: int, host: int, results_size: int, event: int
    ) -> None:
        """Copy a step's inputs in, run its graph, copy its results out, and record the event behind them.

        Args:
            source, target, size: addresses on the host, pinned, and on the device; bytes.
            graph: handle of the graph.
            results, host, results_size: addresses on the device and on the host, pinned; bytes.
            event: handle of the event.

        Raises:
            RuntimeError: the driver refused.
        """
        torch.cuda.set_device(self._device)  # the driver's calls go to the thread's current device
        stream = self._stream
        error = (
            self._copy_in(target, source, size, stream)
            or self._launch(graph, stream)
            or self._copy_out(host, results, results_size, stream)
            or self._record(event, stream)
        )
        if error:
            raise RuntimeError(f"the CUDA driver refused to enqueue a step: error {error}")


def graph_handle(graph: torch.cuda.CUDAGraph) -> int | None:
    """Return a captured graph's handle, None where torch does not tell."""
    tell = getattr(graph, "raw_cuda_graph_exec", None)
    try:
        return None if tell is None else int(tell())
    except RuntimeError:
        return None
