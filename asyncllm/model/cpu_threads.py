"""The threads that torch's operations use: how many, for one thread of this process only, and for how long.

Runs on the device's thread, before its first step, and on the engine thread while a model opens; owns nothing.
Invariant: no other thread's count changes, and the engine thread keeps no threads of OpenMP's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["limit_torch_threads", "run_and_forget_threads"]

T = TypeVar("T")


def limit_torch_threads(count: int) -> None:
    """Let torch operations of the calling thread use `count` threads, OpenMP's and MKL's alike.

    `torch.set_num_threads` does two things (measured with torch 2.13 and GNU OpenMP): it sets the calling thread's
    own count, which no other thread ever sees, and the default that a thread takes up at its first torch operation.
    The second reaches threads that the caller starts later, so it is put back at once, from a thread that ends then.
    To be called on a thread that has run no torch operation yet: what it finds is the default.
    """
    default = torch.get_num_threads()
    torch.set_num_threads(count)
    restore = threading.Thread(target=torch.set_num_threads, args=(default,), name="asyncllm restores threads")
    restore.start()
    restore.join()


def run_and_forget_threads(function: Callable[[], T]) -> T:
    """Call a function on a thread of its own and wait for it; return or raise what it does.

    OpenMP keeps a pool of threads for each thread that has run an operation in parallel. With GNU's, as soon as all
    pools together have more threads than there are processors, every thread that waits for its next operation sleeps
    instead of spinning: each of the 150 products of a small model's step then takes two wake-ups more, and the step
    twice as long (measured). A pool goes with its thread, so what loads a model runs on one that ends.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  # the caller's to see
            errors.append(error)

    thread = threading.Thread(target=run, name="asyncllm opens a model", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()
