"""The async generator that a caller holds.

Runs in the caller's task, on any loop; owns nothing but its place in its mailbox. The engine holds no reference to
it, so that dropping it is noticed. Invariant: every token that was delivered is yielded once, in order, then the
end; whichever way the caller leaves, the engine is told once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from asyncllm.errors import EngineClosedError, StreamInUseError
from asyncllm.inbox import Cancel
from asyncllm.outputs import Token

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from asyncllm.front_desk import FrontDesk
    from asyncllm.inbox import Inbox
    from asyncllm.mailbox import Mailbox
    from asyncllm.outputs import Completion, FinishReason
    from asyncllm.submission import Ended, Submission
    from asyncllm.wakeups import Doors

__all__ = ["TokenStream"]


def _drop(inbox: Inbox, submission: Submission, process_id: int) -> None:
    """Tell the engine that a stream was dropped. May run anywhere: appends and rings, nothing else."""
    if os.getpid() == process_id and not submission.ended:
        inbox.post(Cancel((submission,), dropped=True))


class TokenStream(AsyncGenerator[Token, None]):
    """The tokens of one request, as they are generated.

    Iterate it in any task, on any loop, one consumer at a time; write `async with engine.stream(...) as stream`
    so that leaving the block, in whichever way, ends the request.

    Attributes:
        request_id: the request's id.
    """

    __slots__ = ("__weakref__", "_closed", "_consuming", "_desk", "_done_callbacks", "_doors", "_ended", "_engine",
                 "_finalizer", "_finish_reason", "_inbox", "_mailbox", "_submission", "request_id")  # fmt: skip

    def __init__(
        self,
        *,
        engine: object,
        submission: Submission,
        mailbox: Mailbox[Token | Ended],
        desk: FrontDesk,
        inbox: Inbox,
        doors: Doors,
    ) -> None:
        self.request_id = submission.request_id
        self._engine = engine  # an engine lives while a stream of it does
        self._submission = submission
        self._mailbox = mailbox
        self._desk = desk
        self._inbox = inbox
        self._doors = doors
        self._ended: Ended | None = None
        self._done_callbacks: list[Callable[[Completion], object]] = []
        self._finish_reason: FinishReason | None = None
        self._consuming = False
        self._closed = False
        self._finalizer = weakref.finalize(self, _drop, inbox, submission, os.getpid())
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<TokenStream {self.request_id!r} {self._finish_reason or 'open'}>"

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, once its last token or its end was read; else None."""
        return self._finish_reason

    # -- iteration -------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """Return the next token.

        Raises:
            StopAsyncIteration: there are no more, or the stream was closed.
            DeadlineExceededError: the request's timeout has passed.
            RequestFailedError: the request failed.
            EngineError: the engine was closed or has failed.
            StreamInUseError: another consumer is waiting in it.
        """
        if self._closed:
            raise StopAsyncIteration
        event = await self._next_event()
        if isinstance(event, Token):
            return event
        self._closed = True
        if event.error is not None:
            raise event.error
        raise StopAsyncIteration

    async def _next_event(self) -> Token | Ended:
        if self._ended is not None:
            return self._ended
        if self._consuming and not self._mailbox.find_reader_gone():
            raise StreamInUseError(f"the stream of {self.request_id!r} has a consumer already; make a stream for each")
        self._consuming = True
        try:
            if self._mailbox.unread:
                # A reader that is behind never waits, so it must let its loop and its own cancellation through;
                # before the pop, that no token is lost. One that keeps up waits for each token and pays nothing.
                await self._doors.current().checkpoint()
            event = await self._mailbox.get(self._doors)
        except BaseException:  # cancelled while waiting, or the loop is going down
            self._leave()
            raise
        finally:
            self._consuming = False
        self._note(event)
        return event

    def _note(self, event: Token | Ended) -> None:
        if isinstance(event, Token):
            self._finish_reason = event.finish_reason
            return
        self._ended = event
        self._finalizer.detach()
        if event.completion is not None:
            self._finish_reason = event.completion.finish_reason
            for callback in self._done_callbacks:
                callback(event.completion)

    def add_done_callback(self, callback: Callable[[Completion], object]) -> None:
        """Have `callback` called with the completion, once, by the reader that comes to the end.

        Not called if the stream is left before, or ends with an error.
        """
        self._done_callbacks.append(callback)

    async def asend(self, value: None) -> Token:
        """Same as `__anext__`; `value` must be None."""
        if value is not None:
            raise TypeError("a TokenStream takes no values: asend(None) only")
        return await self.__anext__()

    async def athrow(
        self, typ: BaseException | type[BaseException], val: object = None, tb: TracebackType | None = None, /
    ) -> Token:
        """End the request and raise the exception."""
        await self.aclose()
        if isinstance(typ, type):
            typ = typ() if val is None else typ(val)
        raise typ.with_traceback(tb)

    async def aclose(self) -> None:
        """End the request, if it has not ended, and the iteration. Idempotent, never waits."""
        self.close()

    def close(self) -> None:
        """Same as `aclose`, for code that is not async."""
        self._closed = True
        self._leave()

    def abort(self) -> bool:
        """End the request; tokens that were delivered are still yielded. Returns whether it was live."""
        if not self._desk.leave(self._submission, "aborted"):
            return False
        self._inbox.post(Cancel((self._submission,)))
        return True

    def _leave(self) -> None:
        self._finalizer.detach()
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- the whole -------------------------------------------------------------------------------------------

    async def result(self) -> Completion:
        """Read on to the end and return the whole completion, a partial one if the request was ended early.

        Raises:
            DeadlineExceededError, RequestFailedError, EngineError: as iteration does.
        """
        while self._ended is None:
            await self._next_event()
        if self._ended.completion is None:
            raise self._ended.error or EngineClosedError(f"{self.request_id!r} has no completion")
        return self._ended.completion

    # -- without a loop --------------------------------------------------------------------------------------

    def next_blocking(self) -> Token | None:
        """Return the next token, blocking this thread; None after the last. Raises as `__anext__` does."""
        if self._closed:
            return None
        event: Token | Ended | None = self._ended
        if event is None:
            self._doors.check_thread()
            event = self._mailbox.get_blocking()
            self._note(event)
        if isinstance(event, Token):
            return event
        self._closed = True
        if event.error is not None:
            raise event.error
        return None
