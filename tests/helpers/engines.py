"""Small engines for tests that any model will do for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import pytest

from asyncllm import Engine
from asyncllm.testing import ScriptedModel, scripted_engine

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["POOL", "TinyModelFolder", "each_model", "small_engine"]

POOL: Final[dict[str, object]] = {"kv_pool_tokens": 128, "page_size": 16, "min_prefill_chunk": 16}
"""A very small pool: 8 pages of 16 tokens."""

each_model: Final = pytest.mark.parametrize("kind", ["scripted", "tiny"])
"""Run the test on the scripted model and on a tiny random one."""


class TinyModelFolder(Protocol):
    """The fixture `tiny_model`."""

    def __call__(self) -> Path:
        """Return the folder of a tiny checkpoint."""


def small_engine(kind: str, tiny_model: TinyModelFolder, **fields: object) -> Engine:
    """Make an engine over the scripted model, which hashes, or over the tiny one, which is greedy; not started."""
    fields = {"debug_checks": True, "seed": 0, "max_running_requests": 64, **fields}
    if kind == "scripted":
        return scripted_engine(ScriptedModel(), default=None, **fields)
    usual = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "kv_pool_tokens": 4096}
    return Engine(tiny_model(), backend=None, **{**usual, **fields})
