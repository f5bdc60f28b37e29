"""How a kernel in Triton is launched.

Runs on the engine's CUDA stream; owns nothing. Invariant: no launch depends on values in device memory, so that what
is captured once is right for every step of the same padded size.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Launcher", "power_above"]


class Launcher:
    """Launch kernels.

    Args:
        dependent: let each kernel start before the one before has ended, where it can wait for it by itself.
        compile_only: launch nothing, only have the kernels compiled.
    """

    def __init__(self, *, dependent: bool, compile_only: bool) -> None:
        self._dependent = dependent
        self._compile_only = compile_only

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: object, warps: int, **options: object) -> None:  # noqa: ANN401
        """Launch a kernel on the current stream, or have it compiled."""
        options["num_warps"] = warps
        if "stages" in options:
            options["num_stages"] = options.pop("stages")
        if options.get("PDL"):
            options["launch_pdl"] = True
        if self._compile_only:
            kernel.warmup(*arguments, grid=grid, **options)
        else:
            kernel[grid](*arguments, **options)


def power_above(value: int) -> int:
    """Return the smallest power of two >= value."""
    return 1 << (value - 1).bit_length()
