"""One request on its way from a caller to the engine, and where its answer goes.

Made by the caller, handed over through the inbox, from then on owned by the engine thread; the fields that both
sides use are named below. Invariant: a submission gets exactly one end.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.mailbox import Mailbox
    from asyncllm.outputs import Completion, FinishReason, Token, TokenLogprob
    from asyncllm.request import Request
    from asyncllm.sampling_params import SamplingParams
    from asyncllm.text.advance import TextProgress
    from asyncllm.wakeups import Wakes

__all__ = ["BatchSink", "Ended", "ReadyRequest", "Sink", "StreamSink", "Submission"]


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended: a completion, or an error."""

    completion: Completion | None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request whose prompt is tokens and whose limits are resolved, with the state of its text."""

    request: Request
    text: TextProgress


class Sink(Protocol):
    """Where a request's events go. Called by the engine thread."""

    @property
    def mailbox(self) -> Mailbox[Token | Ended] | Mailbox[tuple[int, Ended]]:
        """Where its reader waits."""

    @property
    def wants_tokens(self) -> bool:
        """Whether single tokens are asked for, or only the end."""

    def token(self, token: Token, wakes: Wakes) -> None:
        """Deliver one token."""

    def end(self, ended: Ended, wakes: Wakes) -> None:
        """Deliver the end."""


class StreamSink:
    """One stream's mailbox: tokens, then the end."""

    __slots__ = ("mailbox",)
    wants_tokens = True

    def __init__(self, mailbox: Mailbox[Token | Ended]) -> None:
        self.mailbox = mailbox

    def token(self, token: Token, wakes: Wakes) -> None:
        """Deliver one token."""
        self.mailbox.put(token, wakes)

    def end(self, ended: Ended, wakes: Wakes) -> None:
        """Deliver the end."""
        self.mailbox.put(ended, wakes)


class BatchSink:
    """A mailbox that many requests of one call share: only their ends, with their place in the call."""

    __slots__ = ("_index", "mailbox")
    wants_tokens = False

    def __init__(self, mailbox: Mailbox[tuple[int, Ended]], index: int) -> None:
        self.mailbox = mailbox
        self._index = index

    def token(self, token: Token, wakes: Wakes) -> None:
        """Drop it: the completion holds everything."""

    def end(self, ended: Ended, wakes: Wakes) -> None:
        """Deliver the end."""
        self.mailbox.put((self._index, ended), wakes)


class Submission:
    """A request in the engine's hands.

    Args:
        request_id: unique among live requests.
        sink: where its events go.
        params: as the caller gave them.
        seed: of its draws.
        prepare: makes the ready request, from the sequence number drawn at the call; may take long or raise.
        compiles: whether it compiles a structure, which may take seconds.
        ready: what `prepare` gives, where the caller has it already.
        deadline: on the clock of `time.monotonic`; None for no timeout.
        timeout_seconds: what the caller gave, for the message.
        buffer_tokens: bound of unread and in-flight tokens; None: no pausing.

    Attributes:
        sequence: set by the front desk at registration.
        leaving: why the caller wants it ended; set under the front desk's lock, read by the engine thread.
        admitted: whether it left the count of waiting requests. Engine thread.
        pieces: its text so far. Engine thread.
        logprobs: of its tokens so far, as far as asked for. Engine thread.
        prompt_logprobs: of its prompt's tokens from the second on, as far as asked for. Engine thread.
        submitted_at, admitted_at, first_token_at, last_token_at: `time.monotonic` seconds. Engine thread.
        longest_gap_seconds: the longest time between two tokens. Engine thread.
        stop_reason: what ended it. Engine thread.
        ended: whether its end was delivered. Engine thread.
    """

    __slots__ = (
        "__weakref__",
        "admitted",
        "admitted_at",
        "buffer_tokens",
        "compiles",
        "deadline",
        "ended",
        "first_token_at",
        "last_token_at",
        "leaving",
        "logprobs",
        "longest_gap_seconds",
        "params",
        "pieces",
        "prepare",
        "prompt_logprobs",
        "ready",
        "request_id",
        "seed",
        "sequence",
        "sink",
        "stop_reason",
        "submitted_at",
        "timeout_seconds",
    )

    def __init__(
        self,
        *,
        request_id: str,
        sink: Sink,
        params: SamplingParams,
        seed: int,
        prepare: Callable[[int], ReadyRequest] | None,
        ready: ReadyRequest | None,
        timeout_seconds: float | None,
        buffer_tokens: int | None,
        compiles: bool = False,
    ) -> None:
        self.request_id = request_id
        self.sink = sink
        self.params = params
        self.seed = seed
        self.prepare = prepare
        self.compiles = compiles
        self.ready = ready
        self.timeout_seconds = timeout_seconds
        self.buffer_tokens = buffer_tokens
        self.submitted_at = time.monotonic()
        self.deadline = None if timeout_seconds is None else self.submitted_at + timeout_seconds
        self.sequence = -1
        self.leaving: FinishReason | None = None
        self.admitted = False
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.longest_gap_seconds: float | None = None
        self.stop_reason: str | int | None = None
        self.ended = False

    @property
    def request(self) -> Request | None:
        """The scheduler's request, once its prompt is ready."""
        return None if self.ready is None else self.ready.request

    def prepare_unless_ended(self) -> ReadyRequest | None:
        """Do on a worker thread what takes long; nothing for who left before a thread was free."""
        return None if self.ended or self.prepare is None else self.prepare(self.sequence)
