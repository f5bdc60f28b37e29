"""How much of a GPU's memory is left for KV, found out by running the largest steps.

Runs on the engine thread while it opens, once the weights are there; owns nothing once it returns. Invariant: what
it took to find out is given back.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StepMemory", "measure_steps", "pool_pages"]

_GIB: Final = 2**30
_MARGIN: Final = 1.1  # graphs of other sizes are not quite like those that were measured


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What steps take beside weights and KV, in bytes.

    Args:
        largest: activations and graph of the largest step.
        graph: one more graph, which shares the memory of the largest.
    """

    largest: int
    graph: int

    def total(self, graphs: int) -> int:
        """Return what an engine with this many graphs takes."""
        return int(_MARGIN * (self.largest + graphs * self.graph))


def measure_steps(device: torch.device, largest: Callable[[], None], smaller: Callable[[], None]) -> StepMemory:
    """Measure two steps by what the device has free before and after each.

    Args:
        device: where.
        largest: runs the largest step, and captures it if steps are captured.
        smaller: likewise, one that needs less memory.
    """
    before = _free(device)
    largest()
    after = torch.cuda.mem_get_info(device)[0]  # with what torch keeps of the step that ran uncaptured
    between = _free(device)
    smaller()
    return StepMemory(largest=max(0, before - after), graph=max(0, between - _free(device)))


def pool_pages(device: torch.device, *, memory_fraction: float, step_bytes: int, page_bytes: int, useful: int) -> int:
    """Return how many pages fit beside what is on the device now, and what steps will take.

    Args:
        device: which.
        memory_fraction: of the device's whole memory that may be in use.
        step_bytes: what steps will take.
        page_bytes: of a page in all layers.
        useful: most pages that requests could ever fill.

    Raises:
        ConfigurationError: not one page fits.
    """
    free, total = torch.cuda.mem_get_info(device)
    left = int(memory_fraction * total) - (total - free) - step_bytes
    pages = left // page_bytes - 1  # one is for padding
    if pages < 1:
        raise ConfigurationError(
            f"no memory is left for a KV pool: of {total / _GIB:.2f} GiB, memory_fraction={memory_fraction:g} may be "
            f"used, {(total - free) / _GIB:.2f} GiB are, and steps take {step_bytes / _GIB:.2f} GiB"
        )
    return min(pages, useful)


def _free(device: torch.device) -> int:
    """Return the bytes that the device has free, once torch keeps none back."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
