"""The CUDA streams of this package: one a device for steps, one for captures.

Made on whichever engine thread asks first. Owned by the process for its life: libraries keep a workspace for each
stream that ever used them, so an engine that made its own would leave some behind. Invariant: what is enqueued on a
device's step stream runs in the order in which it was enqueued, whichever engine did it; captures of different
engines never overlap.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["capture_stream", "capturing", "step_stream"]

_CAPTURE: Final = threading.Lock()


@functools.cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all engines of a device run their steps."""
    return torch.cuda.Stream(device)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which graphs are captured, beside steps of other engines."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def capturing(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Have the capture stream of a device as the current one, alone."""
    with _CAPTURE, torch.cuda.device(device), torch.cuda.stream(capture_stream(device)):
        yield capture_stream(device)
