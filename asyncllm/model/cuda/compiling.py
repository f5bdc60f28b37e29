"""Compiles the Triton kernels that steps will launch, several at a time.

Runs on the engine thread while it opens, with worker threads that end before it returns. Owns nothing: what is
compiled stays in Triton's own caches, in memory and on disk. Invariant: no kernel is launched.
"""

from __future__ import annotations

import concurrent.futures
import os
from typing import TYPE_CHECKING, Final

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["compile_steps"]

_MOST_THREADS: Final = 16


def compile_steps(
    launches: Sequence[Callable[[], object]],
    on_step: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Have kernels compiled.

    Args:
        launches: each launches some, if only they were not compiled only.
        on_step: told (launches gone through, all) before each and at the end; raises to stop.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with (
        concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="asyncllm compile") as executor,
        triton.AsyncCompileMode(executor),
        torch.inference_mode(),
    ):
        for done, launch in enumerate(launches):
            on_step(done, len(launches))
            launch()
    on_step(len(launches), len(launches))
