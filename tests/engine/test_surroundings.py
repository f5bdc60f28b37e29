"""Strange surroundings: what a caller has set for the whole process changes no token, and is left as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.warm_process import WarmProcess

PROGRAM = """
import asyncio, gc, json, os, sys
{before}
import asyncllm

async def main():
    async with asyncllm.Engine(sys.argv[1], dtype="float32", kv_pool_tokens=1024, page_size=16, seed=1) as engine:
        {beside}
        runs = (
            engine.generate([5, 6, 7 + i], max_tokens=12, ignore_eos=True, temperature=float(i % 2), seed=i)
            for i in range(4)
        )
        tokens = [completion.token_ids for completion in await asyncio.gather(*runs)]
        await engine.check_integrity_async()
    return tokens

tokens = asyncio.run(main())
{after}
print(json.dumps(tokens))
"""

# name: what is set before, what is open beside the engine, what must still hold afterwards
SURROUNDINGS = {
    "torch's default dtype and device": (
        "import torch; torch.set_default_dtype(torch.bfloat16); torch.set_default_device('meta')",
        "",
        "assert torch.get_default_dtype() is torch.bfloat16; assert torch.empty(1).is_meta",
    ),
    "deterministic algorithms": (
        "import torch; torch.use_deterministic_algorithms(True)",
        "",
        "assert torch.are_deterministic_algorithms_enabled()",
    ),
    "anomaly detection, and a thread count of torch's": (
        "import torch; torch.autograd.set_detect_anomaly(True, check_nan=True); torch.set_num_threads(2)",
        "",
        "assert torch.is_grad_enabled(); assert torch.is_anomaly_enabled(); assert torch.get_num_threads() == 2",
    ),
    "uvloop's policy": (
        "import uvloop; asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())",
        "",
        "assert isinstance(asyncio.get_event_loop_policy(), uvloop.EventLoopPolicy)",
    ),
    "a collector that never rests": ("gc.set_threshold(1)", "", "assert gc.get_threshold()[0] == 1"),
    "a switch interval of its own": ("sys.setswitchinterval(0.02)", "", "assert sys.getswitchinterval() == 0.02"),
    "a switch interval changed meanwhile": (
        "",
        "sys.setswitchinterval(0.001)",
        "assert sys.getswitchinterval() == 0.001",
    ),
    "another engine beside it": (
        "",
        (
            "global other; other = await asyncllm.Engine(sys.argv[1], dtype='float32', kv_pool_tokens=512).__aenter__()"
            "; busy = asyncio.ensure_future(other.generate([9] * 20, max_tokens=60, ignore_eos=True))"
        ),
        "other.close()",
    ),
}


class TinyModelFolder(Protocol):
    """Makes a checkpoint, once a session."""

    def __call__(self, architecture: str = "llama") -> Path:
        """Return its folder."""


def run(model: Path, before: str, *flags: str, **environment: str) -> list[list[int]]:
    """Run Python from its start."""
    command = [sys.executable, *flags, "-c", PROGRAM.format(before=before, beside="", after=""), str(model)]
    return tokens(subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment))


def tokens(done: subprocess.CompletedProcess[str]) -> list[list[int]]:
    """Return what a process printed. Anything on standard error is a failure."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    printed: list[list[int]] = json.loads(done.stdout)
    return printed


@pytest.fixture(scope="module")
def expected(tiny_model: TinyModelFolder) -> list[list[int]]:
    """The tokens in plain surroundings."""
    return run(tiny_model(), "")


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_the_caller_has_set_changes_nothing_and_stays(
    name: str, expected: list[list[int]], tiny_model: TinyModelFolder, warm_process: WarmProcess
) -> None:
    before, beside, after = SURROUNDINGS[name]
    program = PROGRAM.format(before=before, beside=beside, after=after)
    assert tokens(warm_process.run(program, tiny_model())) == expected


def test_asyncios_debug_mode_changes_nothing(expected: list[list[int]], tiny_model: TinyModelFolder) -> None:
    """What it tells of callbacks that took 0.1 s depends on the machine; everything else would be an error."""
    quiet = "import logging; logging.getLogger('asyncio').setLevel(logging.ERROR)"
    assert run(tiny_model(), quiet, "-X", "dev", PYTHONASYNCIODEBUG="1") == expected


def test_warnings_as_errors_change_nothing(expected: list[list[int]], tiny_model: TinyModelFolder) -> None:
    # torch and transformers warn while they are imported, which is theirs
    before = "import torch, transformers, transformers.models.llama, warnings; warnings.simplefilter('error')"
    assert run(tiny_model(), before) == expected
