"""A pytest plugin: `pytest_plugins = ["asyncllm.testing.plugin"]`.

Runs in pytest's main thread; the fixture owns the engines that a test makes. Invariant: each of them is checked for
what the test left in it, and closed, however the test ends. Works in plain tests and beside every async plugin,
since it needs no event loop.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import pytest

from asyncllm.testing.engines import as_model, check_nothing_left
from asyncllm.testing.engines import scripted_engine as make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.engine import Engine
    from asyncllm.testing.script import Replies, Reply
    from asyncllm.testing.scripted_model import ScriptedModel

__all__ = ["ScriptedEngineFactory", "scripted_engine"]


class ScriptedEngineFactory(Protocol):
    """Makes and starts engines; see `asyncllm.testing.scripted_engine`."""

    def __call__(
        self, replies: Replies | ScriptedModel | None = None, *, default: Reply | None = None, **fields: object
    ) -> Engine:
        """Return a running engine, closed when the test ends."""


@pytest.fixture
def scripted_engine() -> Iterator[ScriptedEngineFactory]:
    """Give a factory of running engines over scripted models; they are checked and closed when the test ends."""
    with contextlib.ExitStack() as closing:

        def make(
            replies: Replies | ScriptedModel | None = None, *, default: Reply | None = None, **fields: object
        ) -> Engine:
            model = as_model(replies, default)
            engine = make_engine(model, default=None, **fields)
            engine.start_blocking()
            closing.callback(engine.close)
            closing.callback(check_nothing_left, engine)
            closing.callback(model.release_all)
            return engine

        yield make
