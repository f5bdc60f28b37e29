"""What the engine thread knows of each live request beside its scheduling: its text, its clock, its reader.

Runs on the engine thread only, but for what is told when that hangs; owns the submissions that were received and the
events that wait to be delivered. Invariant: a submission gets one end, decided at the front desk (`retire`), and
nothing after it; what a step brought is delivered together, after its commit.
"""

from __future__ import annotations

import collections
import heapq
import time
from typing import TYPE_CHECKING, Final

from asyncllm.errors import AsyncLLMError, DeadlineExceededError, EngineError, RequestFailedError
from asyncllm.outputs import Completion, Timing, Token, Usage
from asyncllm.request import RequestState
from asyncllm.scheduler.scheduler import Verdict
from asyncllm.submission import Ended, Submission
from asyncllm.wakeups import LoopGoneError, Wakes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.front_desk import FrontDesk
    from asyncllm.outputs import FinishReason
    from asyncllm.request import Request
    from asyncllm.scheduler.batch import StepResult
    from asyncllm.scheduler.scheduler import ScheduledStep, Scheduler
    from asyncllm.text.advance import TextStep
    from asyncllm.wakeups import Door

__all__ = ["LiveRequests"]

_FORGOTTEN_AT_ONCE: Final = 64
"""Deadlines of ended requests that may be kept, beside twice as many as requests are live."""


_new_tuple: Final = tuple.__new__
"""Makes what is made per request and step: a named tuple's own `__new__` is a Python function, twice as slow."""


class LiveRequests:
    """The submissions in the engine's hands."""

    def __init__(self, desk: FrontDesk, scheduler: Scheduler, *, pause_grace_seconds: float) -> None:
        self._desk = desk
        self._scheduler = scheduler
        self._pause_grace_seconds = pause_grace_seconds
        self._submissions: dict[Submission, None] = {}
        self._by_request: dict[Request, Submission] = {}
        self._bounded: dict[Submission, None] = {}  # those with buffer_tokens
        self._paused: dict[Submission, float] = {}  # since when; longest first
        self._parked: set[Submission] = set()
        self._deadlines: list[tuple[float, int, Submission]] = []
        self._tokens: list[tuple[Submission, Token]] = []
        self._ends: list[tuple[Submission, FinishReason | None, Exception | None]] = []
        self._left_queue = 0
        self._wakes = Wakes()

    def __len__(self) -> int:
        return len(self._submissions)

    # -- arrival ---------------------------------------------------------------------------------------------

    def receive(self, submissions: Iterable[Submission]) -> list[Submission]:
        """Take new submissions; those that are ready go to the scheduler as one message. Returns the others."""
        unprepared: list[Submission] = []
        ready: list[Submission] = []
        for submission in submissions:
            if submission.leaving is not None:  # it left before it was read: it never runs
                self._submissions[submission] = None
                self.end(submission)
                continue
            self._submissions[submission] = None
            if submission.deadline is not None:
                heapq.heappush(self._deadlines, (submission.deadline, submission.sequence, submission))
            (unprepared if submission.ready is None else ready).append(submission)
        self.start(ready)
        return unprepared

    def start(self, submissions: Iterable[Submission]) -> None:
        """Hand submissions whose prompt is ready to the scheduler."""
        requests = []
        for submission in submissions:
            request = submission.request
            if request is None or submission.ended:
                continue
            self._by_request[request] = submission
            if submission.buffer_tokens is not None:
                self._bounded[submission] = None
            requests.append(request)
        if requests:
            self._scheduler.submit(requests)

    def note_admitted(self, requests: Iterable[Request]) -> None:
        """Note requests that a step has just named for the first time."""
        now = time.monotonic()
        for request in requests:
            submission = self._by_request.get(request)
            if submission is not None and not submission.admitted:
                submission.admitted = True
                submission.admitted_at = now
                self._left_queue += 1

    # -- progress --------------------------------------------------------------------------------------------

    def note_findings(self, step: ScheduledStep, result: StepResult) -> None:
        """Take what a step tells beside its tokens, before `advance`; few steps have any."""
        for row, scores in result.prompt_logprobs.items():
            if (submission := self._by_request.get(step.rows[row])) is not None:
                submission.prompt_logprobs.extend(scores)
        for sample, logprob in result.logprobs.items():
            if (submission := self._by_request.get(step.sampled[sample])) is not None:
                submission.logprobs.append(logprob)
        for sample, error in result.failures.items():
            if (submission := self._by_request.get(step.sampled[sample])) is not None:
                self.end(submission, error=self._failed(submission, "its logits hook failed", error))

    def advance(  # noqa: C901, PLR0911  # an exit for each fate
        self, request: Request, token_id: int, *, finite: bool, now: float
    ) -> Verdict | None:
        """Take one sampled token: the scheduler's verdict, None if it is dropped. Delivers nothing yet."""
        submission = self._by_request.get(request)
        if submission is None:
            return None
        if submission.leaving is not None or submission.ready is None:
            self.end(submission)
            return None
        if request.constraint is not None and request.constraint.failure is not None:
            self.end(submission, error=self._failed(submission, request.constraint.failure))
            return None
        if not finite:
            what = "its logits were not finite, or its options left no token"
            self.end(submission, error=self._failed(submission, what), keep_kv=False)
            return None
        if submission.params.max_tokens == 0:
            return self._end_scored(submission, token_id)
        try:
            step = submission.ready.text.advance(token_id)
        except BaseException as error:  # noqa: BLE001  # a tokenizer's fault is its own request's, a panic too
            self.end(submission, error=self._failed(submission, "decoding its tokens failed", error))
            return None
        if step.finish_reason is not None and self._desk.retire(submission) is not None:
            self.end(submission)  # its caller left just before
            return None
        self._note_time(submission, now)
        if step.text:
            submission.pieces.append(step.text)
        if submission.sink.wants_tokens:
            self._tokens.append((submission, self._token(submission, step, token_id, len(request.generated))))
        if step.finish_reason is None:
            return _new_tuple(Verdict, (token_id, False))
        submission.stop_reason = step.stop_reason
        self._finish(submission, step.finish_reason, None)
        return Verdict(token_id, ends=True)

    def _end_scored(self, submission: Submission, token_id: int) -> Verdict | None:
        """End a request that only scores its prompt: the token that it sampled is none of its own."""
        if self._desk.retire(submission) is not None:
            self.end(submission)
            return None
        self._finish(submission, "length", None)
        return Verdict(token_id, ends=True)

    def _token(self, submission: Submission, step: TextStep, token_id: int, index: int) -> Token:
        text, finish_reason, _, content, tool_calls = step
        logprob = top = usage = None
        if submission.logprobs:
            logprob, top = submission.logprobs[-1].logprob, submission.logprobs[-1].top
        if finish_reason is not None:
            usage = self._usage(submission, index + 1)
        content = text if content is None else content
        return _new_tuple(Token, (text, token_id, index, logprob, top, finish_reason, usage, content, tool_calls))

    @staticmethod
    def _note_time(submission: Submission, now: float) -> None:
        if submission.last_token_at is None:
            submission.first_token_at = now
        else:
            gap, longest = now - submission.last_token_at, submission.longest_gap_seconds
            if longest is None or gap > longest:
                submission.longest_gap_seconds = gap
        submission.last_token_at = now

    # -- pauses ----------------------------------------------------------------------------------------------

    def check_pauses(self) -> None:
        """Pause the requests whose readers lag, before a step is built or those that decode begin again."""
        if not self._bounded:
            return
        undelivered = self._undelivered()
        for submission in self._bounded:
            request = submission.request
            if request is None or request.state is not RequestState.DECODING:
                continue
            if not self._is_full(submission, request, undelivered):
                continue
            mailbox = submission.sink.mailbox
            mailbox.paused = True
            if self._is_full(
                submission, request, undelivered
            ):  # looked at again: the reader may not have seen the flag
                self._scheduler.pause(request)
                self._paused[submission] = time.monotonic()
            else:
                mailbox.paused = False

    def resume(self, submission: Submission) -> None:
        """Let a paused or parked request go on; `check_pauses` stops it again if there is still no room."""
        if submission not in self._paused and submission not in self._parked:
            return  # it has ended
        self._paused.pop(submission, None)
        self._parked.discard(submission)
        if submission.request is not None:
            self._scheduler.resume(submission.request)

    def resume_those_with_room(self) -> None:
        """Let paused requests go on that lost what was in flight, since a step failed: it may not be full any more.

        Their readers may have nothing to read, and so would never resume them.
        """
        undelivered = self._undelivered()
        for submission in list(self._paused):
            if submission.request is not None and not self._is_full(submission, submission.request, undelivered):
                submission.sink.mailbox.paused = False
                self.resume(submission)

    def park_longest_paused(self) -> bool:
        """Take the pages of the longest pause, if it is over the grace, for a request that waits for them."""
        submission = next(iter(self._paused), None)
        if submission is None or submission.request is None:
            return False
        if time.monotonic() < self._paused[submission] + self._pause_grace_seconds:
            return False
        if not self._scheduler.park(submission.request):
            return False  # a launched step names it still: after its commit
        del self._paused[submission]
        self._parked.add(submission)
        return True

    @property
    def parked(self) -> int:
        """How many requests hold nothing until their reader reads on."""
        return len(self._parked)

    def _undelivered(self) -> collections.Counter[Submission]:
        """Count the tokens that are committed and in no mailbox yet."""
        return collections.Counter(submission for submission, _ in self._tokens)

    @staticmethod
    def _is_full(submission: Submission, request: Request, undelivered: collections.Counter[Submission]) -> bool:
        coming = request.sampled - len(request.generated) + undelivered[submission]
        return submission.sink.mailbox.unread + coming >= (submission.buffer_tokens or 0)

    # -- ends ------------------------------------------------------------------------------------------------

    def step_failed(self, request: Request, cause: Exception) -> None:
        """End a request with which no step runs."""
        submission = self._by_request.get(request)
        if submission is not None:
            self.end(submission, error=self._failed(submission, f"each step with it failed: {cause!r}", cause))

    def end(
        self,
        submission: Submission,
        *,
        error: Exception | None = None,
        dropped: bool = False,
        keep_kv: bool = True,
    ) -> None:
        """End a request without a token: its caller left (or dropped it), its time is up, or `error`."""
        if submission.ended or submission not in self._submissions:
            return
        leaving = self._desk.retire(submission)
        reason = leaving or ("aborted" if dropped else None)
        request = submission.request
        if request is not None and request in self._by_request:
            self._scheduler.end(request, keep_kv=keep_kv)
        self._finish(submission, reason, None if reason is not None else error)

    def _finish(self, submission: Submission, reason: FinishReason | None, error: Exception | None) -> None:
        submission.ended = True
        self._submissions.pop(submission, None)
        self._bounded.pop(submission, None)
        self._paused.pop(submission, None)
        self._parked.discard(submission)
        if submission.request is not None:
            self._by_request.pop(submission.request, None)
        if not submission.admitted:
            submission.admitted = True
            self._left_queue += 1
        self._ends.append((submission, reason, error))

    def end_all(self) -> None:
        """End everybody: the engine closes or has failed. Touches neither scheduler nor KV.

        Asks the desk who is live: a caller may have registered, and its message not be here yet.
        """
        for submission in self._desk.live():
            reason = self._desk.retire(submission)
            error = None if reason is not None else self._desk.closing_error()
            self._finish(submission, reason, error)

    def expire(self) -> None:
        """End the requests whose deadline has passed; forget the deadlines of those that ended before, now and then."""
        if len(self._deadlines) > 2 * len(self._submissions) + _FORGOTTEN_AT_ONCE:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
            heapq.heapify(self._deadlines)
        now = time.monotonic()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].ended):
            _, _, submission = heapq.heappop(self._deadlines)
            if not submission.ended:
                error = DeadlineExceededError(
                    f"the request's timeout of {submission.timeout_seconds:g} s has passed",
                    completion=self._completion(submission, "timeout"),
                    request_id=submission.request_id,
                )
                self.end(submission, error=error)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` should be called next, on the clock of `time.monotonic`."""
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def next_event(self) -> float | None:
        """When an idle engine has something to do by itself: a deadline, or a pause long enough to be parked."""
        times = [] if self.next_deadline is None else [self.next_deadline]
        if self._scheduler.blocked and self._paused:
            times.append(next(iter(self._paused.values())) + self._pause_grace_seconds)
        return min(times, default=None)

    # -- delivery --------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Put what waits into the mailboxes and wake each reader's loop once."""
        if self._left_queue:
            self._desk.left_queue(self._left_queue)
            self._left_queue = 0
        while True:
            tokens, self._tokens = self._tokens, []
            for submission, token in tokens:
                submission.sink.token(token, self._wakes)
            ends, self._ends = self._ends, []
            for submission, reason, error in ends:
                if not self._desk.note_told(submission):
                    continue  # a caller that closed has told it, since this thread hung
                completion = None if reason is None else self._completion(submission, reason)
                submission.sink.end(Ended(completion, error), self._wakes)
            gone = self._wakes.flush()
            if not gone:
                return
            for door, cause in gone:
                self._end_readers_at(door, cause, ended=[submission for submission, _, _ in ends])

    def end_for_hung_thread(self, submissions: Iterable[Submission]) -> None:
        """Tell the ends that the engine thread cannot tell; on the thread of a caller that closes.

        Reads what the engine thread may be changing, and changes nothing that it reads.
        """
        wakes = Wakes()
        for submission in submissions:
            reason = submission.leaving
            completion = None if reason is None else self._completion(submission, reason)
            error = None if reason is not None else self._desk.closing_error()
            submission.sink.end(Ended(completion, error), wakes)
        wakes.flush()  # a loop that is gone has nobody left to tell

    def _end_readers_at(self, door: Door, cause: LoopGoneError, *, ended: Iterable[Submission]) -> None:
        """A loop is closed: all that wait there end; the others go on. What ended just now can be read elsewhere."""
        for submission in ended:
            if submission.sink.mailbox.reader_door is door:
                submission.sink.mailbox.reader_door = None
                submission.sink.mailbox.reader_gone = True
        for submission in list(self._submissions):
            if submission.sink.mailbox.reader_door is door:
                error = EngineError(f"the event loop that waited for {submission.request_id!r} is closed: {cause}")
                submission.sink.mailbox.reader_door = None
                submission.sink.mailbox.reader_gone = True
                self.end(submission, error=error)

    # -- values ----------------------------------------------------------------------------------------------

    @staticmethod
    def _failed(submission: Submission, what: str, cause: BaseException | None = None) -> RequestFailedError:
        error = RequestFailedError(
            f"request {submission.request_id!r} failed: {what}", request_id=submission.request_id
        )
        error.__cause__ = cause
        return error

    def prepare_failed(self, submission: Submission, error: BaseException) -> None:
        """End a request whose prompt could not be made ready."""
        if not isinstance(error, AsyncLLMError):
            error = self._failed(submission, "preparing its prompt failed", error)
        self.end(submission, error=error)

    @staticmethod
    def _usage(submission: Submission, completion_tokens: int) -> Usage:
        request, asked = submission.request, submission.params.max_tokens
        return Usage(
            prompt_tokens=0 if request is None else len(request.prompt),
            cached_tokens=0 if request is None else request.cached_tokens,
            completion_tokens=completion_tokens,
            max_tokens=asked or 0 if request is None or asked == 0 else request.max_tokens,
        )

    def _completion(self, submission: Submission, reason: FinishReason) -> Completion:
        request = submission.request
        params = submission.params
        token_ids = () if request is None or params.max_tokens == 0 else tuple(request.generated)
        now = time.monotonic()
        first, last = submission.first_token_at, submission.last_token_at
        itl_mean = None
        if first is not None and last is not None and len(token_ids) > 1:
            itl_mean = (last - first) / (len(token_ids) - 1)
        started = submission.submitted_at
        text = "".join(submission.pieces)
        tools = None if submission.ready is None else submission.ready.text.tools
        return Completion(
            request_id=submission.request_id,
            text=text,
            content=text if tools is None else "".join(tools.content),
            tool_calls=() if tools is None else tuple(tools.calls),
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=submission.stop_reason,
            usage=self._usage(submission, len(token_ids)),
            timing=Timing(
                queued_seconds=None if submission.admitted_at is None else submission.admitted_at - started,
                ttft_seconds=None if first is None else first - started,
                itl_mean_seconds=itl_mean,
                itl_max_seconds=submission.longest_gap_seconds,
                total_seconds=now - started,
            ),
            seed=submission.seed,
            logprobs=None if params.logprobs is None else tuple(submission.logprobs[: len(token_ids)]),
            prompt_logprobs=None if params.prompt_logprobs is None else (None, *submission.prompt_logprobs),
        )
