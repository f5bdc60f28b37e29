"""The threads of torch's operations: none of a loading outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Protocol

import pytest

from asyncllm.config import EngineConfig
from asyncllm.model.cpu_threads import run_and_forget_threads
from asyncllm.model.open import TorchBackend

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, time, torch
from asyncllm.model.cpu_threads import run_and_forget_threads

def threads():
    return len(os.listdir("/proc/self/task"))

before, during = threads(), []

def work():
    torch.ones(2**22).exp().sum()
    during.append(threads())

run_and_forget_threads(work)
assert during[0] > before + 1, "OpenMP has started threads for the one that worked"
while threads() > before:  # a thread that was joined may still be ending
    time.sleep(0.001)
"""


class TinyModelFolder(Protocol):
    """Makes a checkpoint, once a session."""

    def __call__(self, architecture: str = "llama") -> Path:
        """Return its folder."""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")  # noqa: PTH112
def test_openmps_threads_end_with_the_work() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_what_the_work_gives_and_raises_comes_back() -> None:
    assert run_and_forget_threads(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_and_forget_threads(lambda: 1 // 0)


def test_a_model_loads_on_a_thread_that_has_ended_afterwards(tiny_model: TinyModelFolder) -> None:
    seen: set[threading.Thread] = set()

    def note(_what: str, _done: int, _total: int) -> None:
        seen.add(threading.current_thread())

    opened = TorchBackend().open(EngineConfig(model=tiny_model(), device="cpu", kv_pool_tokens=1024), note)
    opened.runner.close()
    assert seen
    assert threading.current_thread() not in seen
    assert not any(thread.is_alive() for thread in seen)
