"""The check that an engine has nothing left of what it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncllm.outputs import EngineState
from asyncllm.testing import check_nothing_left

if TYPE_CHECKING:
    from asyncllm import Engine

__all__ = ["Idle", "live_records"]

_PROBE: Final = (5, 6, 7, 8, 9)
_PROBE_TOKENS: Final = 4
_TURNS: Final = 100


class Idle:
    """What an engine says when it is fresh, to be compared with what it says after a test.

    Idle means: no request, no lease, each page free or in the cache, no record of any request, the step counter
    stands, and one further short request gives the tokens that it gave at first.
    """

    def __init__(self, engine: Engine, probe: tuple[int, ...]) -> None:
        self._engine = engine
        self._probe = probe

    @classmethod
    async def watch(cls, engine: Engine) -> Idle:
        """Ask a fresh engine."""
        idle = cls(engine, await _probe(engine))
        engine.reset_prefix_cache()
        return idle

    async def check(self) -> None:
        """Check that the engine is idle, and works."""
        self._check_nothing_left()
        steps = self._engine.stats().steps
        self._check_nothing_left()
        assert self._engine.stats().steps == steps, "an idle engine runs no steps"
        assert await _probe(self._engine) == self._probe
        self._check_nothing_left()

    def _check_nothing_left(self) -> None:
        assert self._engine.state is EngineState.RUNNING
        check_nothing_left(self._engine)
        assert live_records(self._engine) == 0


def live_records(engine: Engine) -> int:
    """Count what the engine keeps for requests, on both sides, once it has told its callers what it had to tell.

    It answers a call before it delivers the ends of the same turn, so a few turns may be needed.
    """
    count = _records(engine)
    for _ in range(_TURNS):
        if not count:
            break
        engine.check_integrity()
        count = _records(engine)
    return count


def _records(engine: Engine) -> int:
    opening = engine._life.opening
    assert opening is not None
    live = opening.loop._live
    kept = (live._submissions, live._by_request, live._bounded, live._tokens, live._ends)
    return opening.desk.live_count + sum(len(records) for records in kept)


async def _probe(engine: Engine) -> tuple[int, ...]:
    completion = await engine.generate(_PROBE, max_tokens=_PROBE_TOKENS, ignore_eos=True)
    return completion.token_ids
