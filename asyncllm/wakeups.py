"""Waking whoever waits, on whichever event loop or thread, without ever blocking the one who wakes.

Runs on both sides: a caller makes a waiter and waits; the engine thread fires waiters and wakes doors. A door
belongs to one event loop (or to all plain threads). Invariant: a waiter that was fired is set as soon as its loop
next runs, and a loop gets at most one wake-up until it has drained what was fired: `fire` appends before `wake`
reads the flag, `_drain` clears the flag before it pops, so that either the drain sees the waiter or the engine
sees the cleared flag.
"""

from __future__ import annotations

import asyncio
import collections
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from asyncllm.errors import WrongThreadError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import trio

__all__ = ["Door", "Doors", "LoopGoneError", "Reply", "ThreadWaiter", "Waiter", "Wakes"]

T = TypeVar("T")


class LoopGoneError(Exception):
    """The event loop that a reader waits on is closed."""


class Waiter(Protocol):
    """One reader, waiting once."""

    @property
    def door(self) -> Door:
        """Where it waits."""

    def set(self) -> None:
        """Let it go on; called on its own loop (or, for a thread, from anywhere). Idempotent."""


class AsyncWaiter(Waiter, Protocol):
    """A reader on an event loop."""

    def wait(self) -> Awaitable[None]:
        """Return once `set` was called."""


class Door(Protocol):
    """How the engine reaches the readers of one event loop."""

    def fire(self, waiter: Waiter) -> None:
        """Note a waiter to be set at the next wake-up."""

    def wake(self) -> None:
        """Have all fired waiters set soon. Raises LoopGoneError if that can never be."""


class LoopDoor(Door, Protocol):
    """A door of an event loop."""

    def serves(self, loop: object) -> bool:
        """Whether it is this loop's."""

    def waiter(self) -> AsyncWaiter:
        """Make a waiter for the running task."""

    async def checkpoint(self) -> None:
        """Let the loop's other tasks run, and a cancellation of this one through."""


class _AsyncioWaiter:
    __slots__ = ("_future", "door")

    def __init__(self, door: _AsyncioDoor, future: asyncio.Future[None]) -> None:
        self.door: Door = door
        self._future = future

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


class _AsyncioDoor:
    """Holds its loop weakly: a door must not keep a loop alive that its owner has dropped."""

    __slots__ = ("__weakref__", "_fired", "_loop", "_name", "_woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._name = repr(loop)
        self._fired: collections.deque[Waiter] = collections.deque()
        self._woken = False

    def serves(self, loop: object) -> bool:
        return self._loop() is loop

    def waiter(self) -> AsyncWaiter:
        loop = self._loop()
        if loop is None:
            raise LoopGoneError(self._name)
        return _AsyncioWaiter(self, loop.create_future())

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    def fire(self, waiter: Waiter) -> None:
        self._fired.append(waiter)

    def wake(self) -> None:
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise LoopGoneError(self._name)
        if self._woken:
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._drain)
        except RuntimeError as error:  # it was closed just now
            raise LoopGoneError(self._name) from error

    def _drain(self) -> None:
        self._woken = False
        while self._fired:
            self._fired.popleft().set()


class _TrioWaiter:
    __slots__ = ("_event", "door")

    def __init__(self, door: _TrioDoor, event: trio.Event) -> None:
        self.door: Door = door
        self._event = event

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


class _TrioDoor:
    """Needs no flag of its own: trio drops a second idempotent call that waits already."""

    __slots__ = ("__weakref__", "_drain_callback", "_fired", "_token")

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = weakref.ref(token)
        self._fired: collections.deque[Waiter] = collections.deque()
        self._drain_callback: Callable[[], object] = self._drain  # one object, so that trio sees equal calls

    def serves(self, loop: object) -> bool:
        return self._token() is loop

    def waiter(self) -> AsyncWaiter:
        import trio  # noqa: PLC0415  # only where trio runs

        return _TrioWaiter(self, trio.Event())

    async def checkpoint(self) -> None:
        import trio  # noqa: PLC0415  # only where trio runs

        await trio.lowlevel.checkpoint()

    def fire(self, waiter: Waiter) -> None:
        self._fired.append(waiter)

    def wake(self) -> None:
        import trio  # noqa: PLC0415  # only where trio runs

        token = self._token()
        if token is None:
            raise LoopGoneError("a trio run that has ended")
        try:
            token.run_sync_soon(self._drain_callback, idempotent=True)
        except trio.RunFinishedError as error:
            raise LoopGoneError("a trio run that has ended") from error

    def _drain(self) -> None:
        while self._fired:
            self._fired.popleft().set()


class _ThreadDoor:
    """All plain threads: each waiter is set directly."""

    __slots__ = ()

    def fire(self, waiter: Waiter) -> None:
        waiter.set()

    def wake(self) -> None:
        pass


class ThreadWaiter:
    """A thread that blocks; a lock held from the start, since releasing one never blocks the releaser."""

    __slots__ = ("_lock", "door")

    def __init__(self) -> None:
        self.door: Door = _ThreadDoor()
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let the thread go on; from any thread, idempotent."""
        try:
            self._lock.release()
        except RuntimeError:  # set already
            return

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until set; False if `timeout_seconds` passed first. KeyboardInterrupt passes through."""
        return self._lock.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds)


class Doors:
    """The doors of the loops that callers use; entries die with their loops.

    Attributes:
        engine_thread: the one that wakes: whoever waits on it waits for ever, so it has no door.
    """

    def __init__(self) -> None:
        self.engine_thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._by_loop: weakref.WeakKeyDictionary[object, LoopDoor] = weakref.WeakKeyDictionary()
        self._last: LoopDoor | None = None  # asked for last: most often the next one's too

    def check_thread(self) -> None:
        """Raise WrongThreadError on the engine's own thread, which cannot wait for itself."""
        if threading.current_thread() is self.engine_thread:
            raise WrongThreadError(
                "this call waits for the engine, so it cannot be made on the engine's own thread, in a step listener "
                "or a logits hook: make it in a task or thread of yours (stats, stream and abort never wait)"
            )

    def current(self) -> LoopDoor:
        """The running loop's door.

        Raises:
            RuntimeError: outside of a running asyncio or trio loop.
            WrongThreadError: the loop runs on the engine's own thread.
        """
        loop, last = _running_loop(), self._last
        if last is not None and last.serves(loop):
            return last
        self.check_thread()
        with self._lock:
            door = self._by_loop.get(loop)
            if door is None:
                door = _AsyncioDoor(loop) if isinstance(loop, asyncio.AbstractEventLoop) else _TrioDoor(loop)
                self._by_loop[loop] = door
        self._last = door
        return door


def _running_loop() -> asyncio.AbstractEventLoop | trio.lowlevel.TrioToken:
    """Trio is asked first: in its guest mode an asyncio loop runs around it."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_trio_token()  # type: ignore[no-any-return]  # a module found by name is untyped
    return asyncio.get_running_loop()


class Wakes:
    """The doors to wake at the end of a delivery; owned by the engine thread."""

    def __init__(self) -> None:
        self._doors: dict[Door, None] = {}

    def fire(self, waiter: Waiter) -> None:
        """Fire a waiter now; its door is woken at `flush`."""
        waiter.door.fire(waiter)
        self._doors[waiter.door] = None

    def flush(self) -> list[tuple[Door, LoopGoneError]]:
        """Wake each door once; return those whose loop is gone."""
        gone = []
        doors, self._doors = self._doors, {}
        for door in doors:
            try:
                door.wake()
            except LoopGoneError as error:
                gone.append((door, error))
        return gone


class Reply(Generic[T]):
    """One value or error, set once by the engine thread; any number of waiters on any loop or thread."""

    def __init__(self) -> None:
        self._waiters: collections.deque[Waiter] = collections.deque()
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """Whether it was set."""
        return self._done

    def set(self, value: T) -> None:
        """Answer, unless it was answered already."""
        if not self._done:
            self._value.append(value)
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Answer by an error, unless it was answered already."""
        if not self._done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._done = True
        wakes = Wakes()
        while self._waiters:
            wakes.fire(self._waiters.popleft())
        wakes.flush()  # a loop that is gone has nobody left to tell

    async def get(self, doors: Doors) -> T:
        """Wait on the running loop. Raises what the engine answered."""
        waiter = doors.current().waiter()
        self._waiters.append(waiter)
        if not self._done:  # read after the waiter is in: `_finish` sets it before it pops
            await waiter.wait()
        return self._result()

    def get_blocking(self, timeout_seconds: float | None = None) -> T:
        """Block this thread. Raises what the engine answered, or TimeoutError."""
        waiter = ThreadWaiter()
        self._waiters.append(waiter)
        if not self._done and not waiter.wait(timeout_seconds) and not self._done:
            raise TimeoutError(f"no answer from the engine within {timeout_seconds} s")
        return self._result()

    def _result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]
