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
    from collections.abc import Callable, Mapping

    from asyncllm.model.cuda.step_layout import StepLayout
    from asyncllm.model.cuda.tuning import StepPlan

__all__ = ["compile_steps"]

_MOST_THREADS: Final = 16
_FEW_ROWS: Final = 16  # the sampler's kernels differ there


def compile_steps(
    plans: Mapping[StepLayout, StepPlan],
    step: Callable[[StepLayout], object],
    on_step: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Have the kernels of all plans compiled.

    Args:
        plans: what will run.
        step: goes through a step with kernels that are compiled only.
        on_step: told (plans looked at, plans) before each and at the end; raises to stop.
    """
    different = {
        (plan, layout.decodes, layout.rows <= _FEW_ROWS, layout.writes): layout for layout, plan in plans.items()
    }
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with (
        concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="asyncllm compile") as executor,
        triton.AsyncCompileMode(executor),
        torch.inference_mode(),
    ):
        for done, layout in enumerate(different.values()):
            on_step(done, len(different))
            step(layout)
    on_step(len(different), len(different))
