"""What the engine has for one reader: a queue that any loop or thread can wait at.

The engine thread puts, one reader at a time takes. Invariant: an event is seen by the reader: the reader leaves its
waiter before it looks again, the engine appends before it looks for a waiter. The engine never waits here.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncllm.wakeups import Door, Doors, LoopGoneError, ThreadWaiter, Waiter, Wakes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue from the engine thread to one reader.

    Attributes:
        paused: the engine stopped the request since too much is unread. Set by the engine, which then looks at
            `unread` again; taken back by the reader after it has popped. (In the other order both could miss
            the other's write, and the stream would stall for ever.)
        reader_door: where a reader waits now, else None.
        reader_gone: the loop that the reader waited on was found closed; another may take its place.
    """

    __slots__ = ("_events", "_on_room", "_waiter", "paused", "reader_door", "reader_gone")

    def __init__(self) -> None:
        self._events: collections.deque[T] = collections.deque()
        self._waiter: Waiter | None = None
        self._on_room: Callable[[], object] | None = None
        self.paused = False
        self.reader_door: Door | None = None
        self.reader_gone = False

    def on_room(self, callback: Callable[[], object]) -> None:
        """Have `callback` called by the reader once for each pause, when it has read on."""
        self._on_room = callback

    def find_reader_gone(self) -> bool:
        """Find out whether the loop that a reader waits on is closed; from any thread.

        The engine does not always know: a wake-up that was on its way when the loop stopped is never run.
        """
        door = self.reader_door
        if door is not None and not self.reader_gone:
            try:
                door.wake()
            except LoopGoneError:
                self.reader_gone = True
        return self.reader_gone

    @property
    def unread(self) -> int:
        """Events that wait to be read."""
        return len(self._events)

    def put(self, event: T, wakes: Wakes) -> None:
        """Leave an event; a waiting reader is fired, and woken when `wakes` is flushed. Engine thread only."""
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            wakes.fire(waiter)

    def pop(self) -> T | None:
        """Take the next event, or None. Reader only."""
        events = self._events
        if not events:  # nobody else takes any, so what is there stays
            return None
        event = events.popleft()
        if self.paused:
            self.paused = False
            if self._on_room is not None:
                self._on_room()
        return event

    async def get(self, doors: Doors) -> T:
        """Take the next event, waiting for it on the running loop."""
        event = self.pop()
        while event is None:
            door = doors.current()
            waiter = door.waiter()
            self.reader_door = door
            self._waiter = waiter
            try:
                event = self.pop()
                if event is None:
                    await waiter.wait()
                    event = self.pop()
            finally:
                self._waiter = None
                self.reader_door = None
        return event

    def get_blocking(self) -> T:
        """Take the next event, blocking this thread for it."""
        event = self.pop()
        while event is None:
            waiter = ThreadWaiter()
            self._waiter = waiter
            try:
                event = self.pop()
                if event is None:
                    waiter.wait()
                    event = self.pop()
            finally:
                self._waiter = None
        return event
