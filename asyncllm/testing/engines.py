"""Engines over a scripted model, and the check that nothing of their requests is left.

Runs on the test's threads; owns nothing. Invariant: `check_nothing_left` never waits longer than a request that
is ending needs.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Final

from asyncllm.engine import Engine
from asyncllm.outputs import EngineState
from asyncllm.testing.scripted_model import ScriptedModel

if TYPE_CHECKING:
    from asyncllm.outputs import EngineStats
    from asyncllm.testing.script import Replies, Reply

__all__ = ["as_model", "check_nothing_left", "collect_garbage", "scripted_engine"]

_STEPS_OF_AN_END: Final = 3  # two launched steps may name a request that was left, and one may have begun before
_PATIENCE_SECONDS: Final = 30.0  # for a caller's message and a slow step; a paused request never ends by itself


def scripted_engine(
    replies: Replies | ScriptedModel | None = None, *, default: Reply | None = None, **fields: object
) -> Engine:
    """Make an engine over a scripted model, not started yet.

    Args:
        replies: what the model says, or the model itself (to hold or fail its steps later); None: hashed text.
        default: the reply to prompts that a mapping does not hold.
        **fields: fields of `EngineConfig`. Unless given, the pages' bookkeeping is checked after each step, seeds
            are drawn the same way each time, and the pool holds 4096 tokens in pages of 16.

    Raises:
        ValueError: a default beside a model.
        ConfigurationError: as `Engine`.
    """
    usual = {"debug_checks": True, "seed": 0, "max_running_requests": 64}
    return Engine("scripted", backend=as_model(replies, default), **{**usual, **fields})


def as_model(replies: Replies | ScriptedModel | None, default: Reply | None) -> ScriptedModel:
    """Make a model of replies, unless they are one.

    Raises:
        ValueError: a default beside a model.
    """
    if not isinstance(replies, ScriptedModel):
        return ScriptedModel(replies, default=default)
    if default is not None:
        raise ValueError("give the default to the ScriptedModel")
    return replies


def check_nothing_left(engine: Engine) -> None:
    """Check that an open engine has nothing to do and has all its pages back.

    Requests that are ending, and streams that were dropped, are waited for. An engine that is not running passes.

    Raises:
        AssertionError: requests run on, wait, or hold pages.
        IntegrityError: pages are not accounted for.
    """
    first: EngineStats | None = None
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while engine.state in (EngineState.RUNNING, EngineState.DRAINING):
        engine.check_integrity()
        stats = engine.stats()
        if not (stats.running or stats.waiting or stats.parked):
            if stats.free_pages + stats.cached_pages != stats.total_pages or stats.leased_pages:
                raise AssertionError(f"no request is left, but pages are held: {stats}")
            return
        if first is None:
            first = stats
            collect_garbage()  # streams that a test dropped inside a cycle, such as a task with its exception
        if stats.steps - first.steps > _STEPS_OF_AN_END or time.monotonic() > deadline:
            raise AssertionError(
                f"{stats.running} requests run and {stats.waiting} wait, {stats.parked} are parked: a "
                "stream was neither read to its end nor closed (write `async with engine.stream(...) as stream`)"
            )


def collect_garbage() -> None:
    """Free what only cycles hold, for certain.

    While any thread collects (and runs a callback or a finalizer meanwhile), `gc.collect` returns at once in all
    others. That shows: it has not found the cycle made here.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        if gc.collect():
            return
        time.sleep(0.001)  # let the other thread go on
