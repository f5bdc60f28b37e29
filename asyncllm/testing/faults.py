"""What a test arranges to go wrong, or to wait, in a scripted model's steps.

Shared by the test's tasks and threads and the scripted device's thread, behind one lock. Invariant: what is
arranged for one step or token happens once; the rest, until its engine closes, when held steps are let go too.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Self

from asyncllm.wakeups import Doors, Reply

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["HeldStep", "StepFaults"]

PATIENCE_SECONDS: Final = 60.0


class HeldStep:
    """A step that stands before it reads anything, until it is released.

    Works from asyncio, trio and plain threads. As a context manager it releases the step when it is left.

    Args:
        patience_seconds: a step that is not released within them fails, so that a test that forgot it does not hang.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._doors = Doors()
        self._reached: Reply[None] = Reply()
        self._released = threading.Event()

    async def reached(self) -> None:
        """Wait in a task, on any event loop, until the step has begun and stands."""
        await self._reached.get(self._doors)

    def wait_reached(self, timeout: float = PATIENCE_SECONDS) -> None:
        """Block the calling thread until the step has begun and stands.

        Raises:
            TimeoutError: it did not begin within `timeout` seconds.
        """
        self._reached.get_blocking(timeout)

    def release(self) -> None:
        """Let the step go on. May be called more than once, and before the step has begun."""
        self._released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _stand(self) -> None:
        self._reached.set(None)
        if not self._released.wait(self._patience_seconds):
            raise TimeoutError(f"a held step was not released within {self._patience_seconds:g} seconds")


class StepFaults:
    """Keep what is arranged for which step; `None` stands for the next step that begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int | None, HeldStep] = {}
        self._failing: dict[int | None, BaseException] = {}
        self._standing: HeldStep | None = None
        self._spoilt: dict[tuple[int, ...], int] = {}
        self._dead: tuple[int, BaseException] | None = None  # from which step on
        self._too_large: tuple[int, BaseException] | None = None  # more tokens than these
        self._guilty: dict[tuple[int, ...], BaseException] = {}

    def hold(self, step: int | None, *, patience_seconds: float) -> HeldStep:
        """Arrange for a step to stand."""
        with self._lock:
            return self._held.setdefault(step, HeldStep(patience_seconds))

    def fail(self, step: int | None, error: BaseException) -> None:
        """Arrange for a step to raise."""
        with self._lock:
            self._failing[step] = error

    def fail_from(self, step: int, error: BaseException) -> None:
        """Arrange for all steps from this one on to raise."""
        self._dead = (step, error)

    def fail_above(self, tokens: int, error: BaseException) -> None:
        """Arrange for all steps with more tokens to raise."""
        self._too_large = (tokens, error)

    def fail_with(self, prompt: tuple[int, ...], error: BaseException) -> None:
        """Arrange for all steps to raise that hold a request with this prompt."""
        with self._lock:
            self._guilty[prompt] = error

    def begin(self, step: int, tokens: int) -> None:
        """Stand, then raise, as arranged for this step and its number of tokens; called by the device's thread."""
        while (held := self._next_to_stand(step)) is not None:
            held._stand()  # noqa: SLF001  (two halves of one thing)
        with self._lock:
            self._standing = None
            key = step if step in self._failing else None
            error = self._failing.pop(key, None)
        for limit, found in ((self._dead, step), (self._too_large, tokens - 1)):
            if error is None and limit is not None and found >= limit[0]:
                error = limit[1]
        if error is not None:
            raise error

    @property
    def accuses(self) -> bool:
        """Whether steps fail because of who is in them."""
        return bool(self._guilty)

    def check_row(self, sequence: list[int]) -> None:
        """Raise if a step with this row is to fail; called by the device's thread, after all was written."""
        with self._lock:
            for prompt, error in self._guilty.items():
                if tuple(sequence[: len(prompt)]) == prompt:
                    raise error

    def spoil(self, prompt: tuple[int, ...], token: int) -> None:
        """Arrange for one token of the next request with this prompt not to be finite."""
        with self._lock:
            self._spoilt[prompt] = token

    @property
    def spoils(self) -> bool:
        """Whether any token is still to be spoilt."""
        return bool(self._spoilt)

    def is_spoilt(self, sequence: list[int]) -> bool:
        """Whether the token after this sequence is one of them; called by the device's thread, once for each."""
        with self._lock:
            for prompt, token in self._spoilt.items():
                if len(sequence) == len(prompt) + token and tuple(sequence[: len(prompt)]) == prompt:
                    del self._spoilt[prompt]
                    return True
        return False

    def end(self) -> None:
        """Let everything go that stands; the next engine's steps fail no more."""
        self.release_all()
        self._dead = self._too_large = None
        with self._lock:
            self._guilty.clear()

    def release_all(self) -> None:
        """Let everything go that stands, and drop what was arranged to stand."""
        with self._lock:
            held = [*self._held.values(), *([self._standing] if self._standing else [])]
            self._held.clear()
        for one in held:
            one.release()

    def _next_to_stand(self, step: int) -> HeldStep | None:
        with self._lock:
            self._standing = self._held.pop(step, None) or self._held.pop(None, None)
            return self._standing
