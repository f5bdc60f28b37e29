"""A stream at a given moment of its life, beside another that runs: steps stand where a test says so, nothing sleeps.

Steps 0 and 1 are the neighbour's; the stream's prompt is computed in three chunks from step 2 on, and the last of
them samples its first token. One more step is launched behind each that stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any, Final

import anyio

from asyncllm.inbox import Call
from asyncllm.outputs import EngineState
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left, scripted_engine
from asyncllm.wakeups import Reply
from helpers.idle import live_records

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from asyncllm import Engine, EngineStats, StepRecord, TokenStream
    from asyncllm.testing import HeldStep

__all__ = [
    "MOMENTS",
    "NEIGHBOUR",
    "PROMPT",
    "READ",
    "STEPS",
    "TOKENS",
    "Scene",
    "check_neighbour",
    "held_engine_thread",
    "scene_at",
    "sequence",
]

NEIGHBOUR: Final = (1, 2, 3)
NEIGHBOUR_TOKENS: Final = 30
PROMPT: Final = (9,) * 50  # beside the neighbour's row, of 20 tokens a step: chunks of 19, 19 and 12
TOKENS: Final = 6
AFTERWARDS: Final = (*PROMPT[:2], 7, 7, 7)
FIELDS: Final[dict[str, Any]] = {"max_running_requests": 4, "min_prefill_chunk": 16, "step_token_budget": 20}

STEPS: Final = {"first chunk": 2, "middle chunk": 3, "last chunk": 4, "decode": 7, "finishing step": 3 + TOKENS}
READ: Final = {"decode": 2, "finishing step": 4, "after the end": 2}  # tokens that are there then; else none
MOMENTS: Final = ["before it is read", "waiting", *STEPS, "paused", "after the end"]


def sequence(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the scripted model says to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(HashedTokens()(tokens))
    return tuple(tokens[len(prompt) :])


@dataclasses.dataclass(slots=True)
class Scene:
    """An engine in which a neighbour runs, and the moment at which something happens to the stream beside it."""

    engine: Engine
    model: ScriptedModel
    moment: str
    clock: list[float]
    neighbour: TokenStream
    neighbours_first_step: HeldStep
    records: list[StepRecord]
    exits: contextlib.ExitStack  # lets everything go on that stands
    step: HeldStep | None = None

    @property
    def tokens(self) -> int:
        """How many tokens can be read at the moment."""
        return READ.get(self.moment, 0)

    def open(self, **options: Any) -> TokenStream:  # noqa: ANN401  # of `Engine.stream`
        """Open the stream; its steps stand at the moment."""
        if self.moment in STEPS:
            self.step = self.exits.enter_context(self.model.hold_at_step(STEPS[self.moment]))
        if self.moment == "paused":
            options["buffer_tokens"] = 3
        stream = self.engine.stream(PROMPT, max_tokens=TOKENS, request_id="left", **options)
        if self.moment not in {"before it is read", "waiting"}:
            self.neighbours_first_step.release()
        return stream

    async def arrive(self) -> None:
        """Wait until the engine is where the moment is, and every task has done what it can."""
        if self.step is not None:
            await self.step.reached()
        elif self.moment == "waiting":
            await self._until(lambda stats: stats.waiting == 1)
        elif self.moment == "paused":
            await self._until(lambda stats: stats.paused == 1)
        elif self.moment == "after the end":
            await self._until(lambda stats: stats.running == stats.waiting == 0)
        await anyio.wait_all_tasks_blocked()

    async def _until(self, holds: Callable[[EngineStats], bool]) -> None:
        while not holds(self.engine.stats()):
            await self.engine.check_integrity_async()


@contextlib.asynccontextmanager
async def scene_at(moment: str, clock: list[float], model: ScriptedModel | None = None) -> AsyncIterator[Scene]:
    """Begin with a neighbour that runs; in the end nothing is left, and the engine, if open, works."""
    model = model or ScriptedModel()
    async with scripted_engine(model, **FIELDS) as engine:
        first = model.hold_at_step(0)
        neighbour = engine.stream(NEIGHBOUR, max_tokens=NEIGHBOUR_TOKENS)
        await first.reached()
        # The engine answers the first call before it launches step 1 or behind it, and the second one behind it: what
        # is submitted from now on is in step 2 at the earliest.
        await engine.check_integrity_async()
        await engine.check_integrity_async()
        scene = Scene(engine, model, moment, clock, neighbour, first, [], contextlib.ExitStack())
        engine.add_step_listener(scene.records.append)
        with scene.exits:
            if moment == "before it is read":
                scene.exits.enter_context(held_engine_thread(engine))
            scene.exits.enter_context(first)
            yield scene
        if engine.state is EngineState.RUNNING:
            check_nothing_left(engine)
            assert live_records(engine) == 0
            again = await engine.generate(AFTERWARDS, max_tokens=TOKENS)
            assert again.token_ids == sequence(AFTERWARDS, TOKENS)
            check_nothing_left(engine)


@contextlib.contextmanager
def held_engine_thread(engine: Engine) -> Iterator[None]:
    """Keep the engine thread from reading its messages: what is called meanwhile is read together."""
    entered, gate = threading.Event(), threading.Event()

    def stand() -> None:
        entered.set()
        gate.wait(300)

    opening = engine._life.opening
    assert opening is not None
    opening.inbox.post(Call(stand, Reply()))
    entered.wait(300)
    try:
        yield
    finally:
        gate.set()


async def check_neighbour(scene: Scene) -> None:
    """Check that the neighbour has the tokens that it has alone."""
    tokens = tuple([token.id async for token in scene.neighbour])
    assert tokens == sequence(NEIGHBOUR, NEIGHBOUR_TOKENS)
