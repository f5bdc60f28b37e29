"""The engine thread: receive -> schedule -> launch -> advance text -> commit -> deliver.

Runs on a thread of its own, in a private event loop; owns the opened model, the scheduler and all per-request
state, and touches callers only through the front desk, the inbox and mailboxes. Holds no reference to the `Engine`.
Invariant: steps are launched and committed in the same order, at most two are in flight, and every way out of this
module (close, failure, cancelled opening) ends every live request and closes the model.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncllm.errors import AsyncLLMError, EngineClosedError, ModelLoadError
from asyncllm.inbox import Call, Cancel, Close, Inbox, Resume, Submit
from asyncllm.kv.cache_manager import CacheManager
from asyncllm.live_requests import LiveRequests
from asyncllm.outputs import EngineState, EngineStats
from asyncllm.scheduler.scheduler import Scheduler, SchedulingPolicy
from asyncllm.steps_in_flight import StepsInFlight
from asyncllm.switch_interval import SWITCH_INTERVAL, wake_on_time
from asyncllm.wakeups import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from asyncllm.backend import Backend, OpenBackend
    from asyncllm.config import EngineConfig
    from asyncllm.front_desk import FrontDesk
    from asyncllm.outputs import StepRecord
    from asyncllm.submission import Submission

__all__ = ["EngineLoop"]

PREPARING_THREADS: Final = 2
"""Long texts tokenized at once, and structures compiled beside them: more would take the cores from the steps."""

log = logging.getLogger("asyncllm")


class _OpeningCancelledError(Exception):
    """The caller who started the engine has left."""


class _Bell:
    """Wakes the engine's loop; `ring` is thread-safe, re-entrant and idempotent."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = anyio.Event()

    def ring(self) -> None:
        self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._event.set()

    def reset(self) -> None:
        """Forget earlier rings; to be called before looking for what they announced."""
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self, until: float | None) -> None:
        """Return when it is rung, or at `until` on the clock of `time.monotonic`."""
        if until is None:
            await self._event.wait()
            return
        with anyio.move_on_after(max(0.0, until - time.monotonic())):
            await self._event.wait()


class EngineLoop:
    """One opening of an engine, from the model's loading to the last page given back.

    Args:
        config: as the caller gave it.
        backend: opens the model.
        desk: shared with callers.
        inbox: from callers.
    """

    def __init__(self, config: EngineConfig, backend: Backend, desk: FrontDesk, inbox: Inbox) -> None:
        self._config = config
        self._backend = backend
        self._desk = desk
        self._inbox = inbox
        self.opened: Reply[OpenBackend] = Reply()
        self.closed: Reply[None] = Reply()
        self.drained: Reply[None] = Reply()
        self._listeners: tuple[Callable[[StepRecord], object], ...] = ()
        self._listeners_lock = threading.Lock()  # of callers and this thread; never held while one is called
        self.gave_up = False  # set before `closed`
        self._preparing: set[Submission] = set()
        self._at_work = False

    # -- life ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Be the engine thread: open, serve until closed or failed, give everything back."""
        wake_on_time()
        try:
            anyio.run(self._main, backend_options={"loop_factory": asyncio.SelectorEventLoop, "debug": False})
        except BaseException as error:  # noqa: BLE001  # whatever it is, callers must not wait for ever
            self._desk.fail(error)
            self.opened.fail(error)
        finally:
            if self._desk.state is not EngineState.FAILED:
                self._desk.move(EngineState.CLOSED)
            self._desk.stats = EngineStats(state=self._desk.state)
            self.drained.set(None)
            self.closed.set(None)

    def give_up(self, after_seconds: float) -> None:
        """Tell everybody that the engine is closed, though its thread hangs; on the thread of a caller that closes.

        Should the thread come back one day, it finds a `Close`, tells nobody anything, and gives the memory back.
        """
        self._inbox.connect(None)
        untold = self._desk.give_up(after_seconds)
        for message in self._inbox.take():
            if isinstance(message, Call):
                message.reply.fail(self._desk.closing_error())
        self._inbox.post(Close())
        if untold:
            self._live.end_for_hung_thread(untold)
        SWITCH_INTERVAL.leave(self)
        self.opened.fail(EngineClosedError("the engine was closed while it opened"))
        self.drained.set(None)
        self.gave_up = True
        self.closed.set(None)

    async def _main(self) -> None:
        self._bell = _Bell()
        self._inbox.connect(self._bell.ring)
        try:
            opened = self._open()
            if opened is None:
                return
            try:
                await self._serve_until_closed(opened)
            finally:
                self._rest()
                self._tell_everybody()
                self._steps.clear()
                opened.runner.close()
        finally:
            self._inbox.connect(None)

    def _tell_everybody(self) -> None:
        """End all live requests and unanswered calls; nobody can register any more."""
        self._inbox.connect(None)
        for message in self._inbox.take():
            if isinstance(message, Call):
                message.reply.fail(self._desk.closing_error())
        self._live.end_all()
        self._live.deliver()

    def _open(self) -> OpenBackend | None:
        """Open the model; None if that failed or was cancelled, with the reply answered and nothing kept."""

        def progress(stage: str, done: int, total: int) -> None:
            log.debug("%s: %d of %d", stage, done, total)
            if self._inbox.closing:
                raise _OpeningCancelledError(f"stopped at {stage}, {done} of {total}")

        try:
            opened = self._backend.open(self._config, progress)
            self._make_policy(opened)
        except _OpeningCancelledError as error:
            self.opened.fail(EngineClosedError(f"the engine was closed while it opened ({error})"))
            return None
        except Exception as error:  # noqa: BLE001  # told to whoever waits in `start`
            traceback.clear_frames(error.__traceback__)  # their locals hold weights
            if not isinstance(error, AsyncLLMError):
                wrapped = ModelLoadError(f"opening {self._config.model!r} failed: {error!r}")
                wrapped.__cause__ = error
                self.opened.fail(wrapped)
            else:
                self.opened.fail(error)
            return None
        return opened

    def _make_policy(self, opened: OpenBackend) -> None:
        """Make what decides over the opened model; close it again if its sizes contradict the settings."""
        config = self._config
        try:
            policy = SchedulingPolicy(
                max_running_requests=config.max_running_requests,
                step_token_budget=opened.step_token_budget,
                min_prefill_chunk=opened.min_prefill_chunk,
                share_inflight_prefixes=config.share_inflight_prefixes,
            )
            self._cache = CacheManager(
                num_pages=opened.num_pages,
                page_size=opened.page_size,
                num_slots=config.max_running_requests,
                max_pages_per_request=-(-opened.max_model_tokens // opened.page_size),
                prefix_cache=config.prefix_cache,
            )
            self._scheduler = Scheduler(self._cache, policy)
            self._live = LiveRequests(self._desk, self._scheduler, pause_grace_seconds=config.pause_grace_seconds)
            self._steps = StepsInFlight(
                self._scheduler,
                opened.runner,
                self._live,
                overlap=config.overlap,
                debug_checks=config.debug_checks,
                before_launch=self._work,
            )
        except BaseException:
            opened.runner.close()
            raise

    async def _serve_until_closed(self, opened: OpenBackend) -> None:
        # A structure may take seconds; texts, and as a rule other structures, go past it.
        self._tokenizing = anyio.CapacityLimiter(PREPARING_THREADS)
        self._compiling = anyio.CapacityLimiter(PREPARING_THREADS)
        try:
            async with anyio.create_task_group() as tasks:
                self._desk.move(EngineState.RUNNING)
                self._publish()
                self.opened.set(opened)
                await self._serve(tasks)
                self._desk.move(EngineState.CLOSING)
                tasks.cancel_scope.cancel()
        except BaseException as error:  # noqa: BLE001  # told to every caller
            cause = error
            while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
                cause = cause.exceptions[0]
            self._desk.fail(cause)
            log.error("the engine has failed: %r", cause)  # noqa: TRY400  # its frames were cleared

    # -- the loop --------------------------------------------------------------------------------------------

    async def _serve(self, tasks: TaskGroup) -> None:
        while self._receive(tasks):
            self._live.expire()
            self._live.check_pauses()
            launched = self._steps.launch()
            self._deliver()  # what the last commit brought, now that the device has work: readers want the GIL then
            if len(self._steps) and (not launched or self._steps.is_full):
                await self._wait_for_oldest(tasks)
                self._commit_oldest()
            else:
                self._publish()
                if not launched:
                    await self._idle()
            if self._preparing:
                await anyio.lowlevel.checkpoint()  # a blocking device wait never lets other tasks run

    def _receive(self, tasks: TaskGroup) -> bool:  # noqa: C901  # one case a message
        """Do what callers ask for; False if they ask to stop."""
        self._bell.reset()
        going_on = True
        for message in self._inbox.take():
            match message:
                case Submit(submissions):
                    for submission in self._live.receive(submissions):
                        self._preparing.add(submission)
                        tasks.start_soon(self._prepare, submission)
                case Cancel(submissions, dropped):
                    for submission in submissions:
                        if dropped and not submission.ended:
                            _warn_dropped(submission)
                        self._live.end(submission, dropped=dropped)
                case Resume(submission):
                    self._live.resume(submission)
                case Call(function, reply):
                    try:
                        answer = function()
                    except Exception as error:  # noqa: BLE001  # the caller's to see
                        reply.fail(error)
                    else:
                        self._publish()  # who reads the statistics next sees what was asked for
                        reply.set(answer)
                case Close():
                    going_on = False
        return going_on

    async def _prepare(self, submission: Submission) -> None:
        limiter = self._compiling if submission.compiles else self._tokenizing
        try:
            if submission.prepare is not None and not submission.ended:
                submission.ready = await anyio.to_thread.run_sync(
                    submission.prepare_unless_ended, abandon_on_cancel=True, limiter=limiter
                )
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:  # noqa: BLE001  # whatever it is, a panic in native code too, it is its own
            self._live.prepare_failed(submission, error)
        else:
            self._live.start([submission])
        finally:
            self._preparing.discard(submission)
            self._bell.ring()

    async def _wait_for_oldest(self, tasks: TaskGroup) -> None:
        """Wait for the oldest step while messages are read; a `Close` is left to the next turn."""
        step = self._steps.oldest
        if not step.call_when_done(self._bell.ring):
            step.wait()
            return
        while not step.done():
            await self._bell.wait(self._live.next_deadline)
            if not self._receive(tasks):
                self._inbox.post(Close())
                return
            self._live.expire()
            self._deliver()
            self._publish()

    def _commit_oldest(self) -> None:
        record = self._steps.finish_oldest()
        self._publish()  # before tokens are delivered: who gets one may look
        if record is not None:
            self._tell_listeners(record)

    def _deliver(self) -> None:
        self._live.deliver()
        self._check_drained()

    async def _idle(self) -> None:
        self._rest()
        await self._bell.wait(self._live.next_event)

    def _work(self) -> None:
        if not self._at_work and self._config.switch_interval_seconds is not None:
            SWITCH_INTERVAL.enter(self, self._config.switch_interval_seconds)
            self._at_work = True

    def _rest(self) -> None:
        if self._at_work:
            SWITCH_INTERVAL.leave(self)
            self._at_work = False

    # -- what callers see ------------------------------------------------------------------------------------

    def _publish(self) -> None:
        cache, scheduler, steps = self._cache, self._scheduler, self._steps
        self._desk.stats = EngineStats(
            state=self._desk.state,
            waiting=scheduler.waiting + sum(not submission.ended for submission in self._preparing),
            running=scheduler.running,
            paused=scheduler.paused,
            parked=self._live.parked,
            total_pages=cache.num_pages,
            free_pages=cache.free_pages,
            owned_pages=cache.owned_pages,
            cached_pages=cache.cached_pages,
            leased_pages=cache.leased_pages,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prompt_tokens=steps.prompt_tokens,
            generated_tokens=steps.generated_tokens,
            steps=steps.committed,
            preemptions=scheduler.preemptions,
            last_step_age_seconds=steps.last_commit_at,
        )

    def _check_drained(self) -> None:
        if self._desk.state is EngineState.DRAINING and not self._desk.live_count and not len(self._steps):
            self.drained.set(None)

    def add_listener(self, listener: Callable[[StepRecord], object]) -> None:
        """Call `listener` with each step's record from now on."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Callable[[StepRecord], object]) -> None:
        """Undo one `add_listener`; nothing if it is not there."""
        with self._listeners_lock:
            left = list(self._listeners)
            if listener in left:
                left.remove(listener)
            self._listeners = tuple(left)

    def _tell_listeners(self, record: StepRecord) -> None:
        for listener in self._listeners:
            try:
                listener(record)
            except BaseException:  # such as a test's failure
                log.exception("a step listener raised and is removed: %r", listener)
                self.remove_listener(listener)

    def check_integrity(self) -> None:
        """Check every page's whereabouts; on the engine thread."""
        self._scheduler.check_integrity()

    def reset_prefix_cache(self) -> int:
        """Free the cached pages that nobody leases; on the engine thread. Returns how many."""
        return self._cache.reset_prefix_cache()


def _warn_dropped(submission: Submission) -> None:
    """Tell that only the finalizer ended a stream; here, since a finalizer may run anywhere and must not warn."""
    try:
        warnings.warn(
            f"the stream of {submission.request_id!r} was dropped while it ran; "
            "write `async with engine.stream(...) as stream` to end it where you leave it",
            ResourceWarning,
            stacklevel=2,
        )
    except ResourceWarning:  # warnings are errors in this process; the engine thread has nobody to raise it to
        log.warning("the stream of %r was dropped while it ran", submission.request_id)
