"""What tests of the engine share: a clock that they set."""

from __future__ import annotations

import time
import types

import pytest

from asyncllm import live_requests as live_requests_module


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the seconds by which the clock that requests time out by is ahead."""
    ahead = [0.0]
    shifted = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(live_requests_module, "time", shifted)
    return ahead
