"""The engine thread's inbox: the one way in which callers talk to it.

`post` runs anywhere, also inside a finalizer, a signal handler or `post` itself: it appends to a deque and rings,
takes no lock and never blocks. The engine thread alone takes messages. Invariant: a message that was posted is
taken: the poster appends before it reads the flag, the taker clears the flag before it pops.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.submission import Submission
    from asyncllm.wakeups import Reply

__all__ = ["Call", "Cancel", "Close", "Inbox", "Message", "Resume", "Submit"]


@dataclasses.dataclass(frozen=True, slots=True)
class Submit:
    """New requests, read as a whole before the next admission."""

    submissions: tuple[Submission, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel:
    """A caller has left these requests, or aborted them."""

    submissions: tuple[Submission, ...]
    dropped: bool = False  # only a finalizer noticed


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """The reader of a paused request read on."""

    submission: Submission


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """Run something between two steps and answer with what it returns or raises."""

    function: Callable[[], T]
    reply: Reply[T]


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    """Stop after the step in flight."""


Message = Submit | Cancel | Resume | Call[Any] | Close


class Inbox:
    """A queue with one taker."""

    __slots__ = ("_messages", "_ring", "_rung")

    def __init__(self) -> None:
        self._messages: collections.deque[Message] = collections.deque()
        self._ring: Callable[[], object] | None = None
        self._rung = False

    def connect(self, ring: Callable[[], object] | None) -> None:
        """Say what wakes the taker (thread-safe, re-entrant); None when it is gone. Called by the taker."""
        self._ring = ring

    def post(self, message: Message) -> bool:
        """Leave a message. Returns False if nobody may be there to take it, before `connect` or after its undoing."""
        self._messages.append(message)
        ring = self._ring
        if ring is None:
            return False
        if not self._rung:
            self._rung = True
            try:
                ring()
            except RuntimeError:  # the taker's loop is closed
                return False
        return True

    def take(self) -> list[Message]:
        """Take all messages there are."""
        self._rung = False
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    @property
    def closing(self) -> bool:
        """Whether a `Close` waits to be read; asked while the engine opens, when nothing else can be posted."""
        return any(isinstance(message, Close) for message in tuple(self._messages))
