"""How many threads torch's operations use, for one thread of this process only.

Runs on the device's thread, before its first step; owns nothing. Invariant: no other thread's count changes.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["limit_torch_threads"]


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
