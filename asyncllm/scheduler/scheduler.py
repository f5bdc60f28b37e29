"""Who runs in the next step, and what a step that has run changes.

Runs on the engine thread; owns every live request from its submission on. Invariant: a request that is to end is
in no later step, and its pages, slot and lease return together at the commit of the last launched step that names
it. State advances when a step is launched, before its results are known; any number of steps may be in flight (the
engine has two at most), and they are committed in launch order.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from asyncllm.outputs import StepRecord
from asyncllm.request import Request, RequestState
from asyncllm.scheduler.admission import ReserveAdmission
from asyncllm.scheduler.running_set import RunningSet
from asyncllm.scheduler.sibling_prefixes import SiblingPrefixes
from asyncllm.scheduler.step import PromptChunk, ScheduledStep, SchedulingPolicy, Verdict
from asyncllm.scheduler.waiting_order import WaitingOrder

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from asyncllm.kv.cache_manager import CacheManager, RequestPages
    from asyncllm.scheduler.batch import Batch

__all__ = ["ScheduledStep", "Scheduler", "SchedulingPolicy", "Verdict"]


class Scheduler:
    """Admit requests, put steps together, and commit their results.

    Args:
        cache: pages, slots and prefixes; used by this scheduler alone.
        policy: bounds of a step.

    Raises:
        ValueError: the cache has more or fewer slots than requests may run.

    Attributes:
        blocked: whether the next request could not start in the last `schedule` for lack of a slot or of pages.
        prefix_hit_tokens: prompt tokens that the prefix cache answered, since the start.
        preemptions: how often a request was parked, since the start.
    """

    def __init__(self, cache: CacheManager, policy: SchedulingPolicy) -> None:
        if cache.free_slots != policy.max_running_requests:
            raise ValueError(f"{policy.max_running_requests} requests may run, the cache has {cache.free_slots} slots")
        self.blocked = False
        self.prefix_hit_tokens = 0
        self.preemptions = 0
        self._cache = cache
        self._policy = policy
        self._order = WaitingOrder()
        self._siblings = SiblingPrefixes(
            self._order, page_size=cache.page_size, step_token_budget=policy.step_token_budget
        )
        self._admission = ReserveAdmission(cache)
        self._running = RunningSet(cache, self._admission, max_requests=policy.max_running_requests)
        self._in_flight: collections.deque[ScheduledStep] = collections.deque()
        self._step_token_budget = policy.step_token_budget
        self._next_step = 0
        self._committed_steps = 0

    @property
    def waiting(self) -> int:
        """Requests submitted and not started."""
        return len(self._order) + len(self._siblings)

    @property
    def running(self) -> int:
        """Requests that hold a slot, paused and ending ones included."""
        return len(self._running)

    @property
    def paused(self) -> int:
        """Running requests whose reader stopped."""
        return self._running.paused

    @property
    def reserved_tokens(self) -> int:
        """Positions that running requests may still need."""
        return self._running.reserved_tokens

    def waiting_requests(self) -> list[Request]:
        """Return the requests that wait: first those that could start, head first, then those that wait for another."""
        return [*self._order, *self._siblings]

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests of one message; none of them starts before all are queued.

        Raises:
            PromptTooLongError: one of them could never start; then none is queued.
        """
        for request in requests:
            self._admission.check_fits_pool(request)
        for request in requests:
            request.move(RequestState.WAITING)
            self._order.add(request)

    def end(self, request: Request, *, keep_kv: bool = True) -> bool:
        """End a request, in whatever state it is: it is in no later step.

        Args:
            request: any that was submitted.
            keep_kv: whether others may use what it has computed; not if that may be wrong.

        Returns:
            True if nothing of it is left; False if its last launched step is still to be committed.
        """
        if not keep_kv:
            request.committed = 0
        if request.state is RequestState.WAITING:
            if not self._siblings.leave(request):
                self._order.remove(request)
            request.move(RequestState.FINISHED)
        elif request.state is RequestState.PREPARING:
            request.move(RequestState.FINISHED)
        elif request.state is RequestState.PREEMPTED:
            request.move(RequestState.WAITING)
            request.move(RequestState.FINISHED)
        elif request in self._running and request.state is not RequestState.ENDING:
            self._stop(request)
        return request.state is RequestState.FINISHED

    def pause(self, request: Request) -> None:
        """Leave a decoding request out of steps until `resume`; it keeps its pages and what is promised to it."""
        self._running.pause(request)

    def resume(self, request: Request) -> None:
        """Let a paused request decode on; a parked one waits for that, ahead of all that never started."""
        if request.state is RequestState.PREEMPTED:
            request.move(RequestState.WAITING)
            self._order.add(request)
        else:
            self._running.resume(request)

    def park(self, request: Request) -> bool:
        """Take slot, pages and promise back from a paused request; its KV goes to the prefix cache.

        Until `resume` it neither waits nor runs. Then it starts again with the tokens that it has as its prompt.

        Returns:
            False if a launched step still names it: then nothing is done, try again after the commit.

        Raises:
            RuntimeError: it is not paused.
        """
        parked = self._running.park(request, committed_steps=self._committed_steps)
        self.preemptions += parked
        return parked

    def schedule(self, only: Collection[Request] | None = None) -> ScheduledStep | None:
        """Start waiting requests, put the next step together, and advance its requests as launched.

        Args:
            only: after `roll_back`, leave out all but these, and start none.

        Returns:
            the step, or None if nothing can run now.
        """
        step, rows = self._next_step, self._running.rows
        self._siblings.expire(step)
        rows.choose()
        if rows.all_wait:
            self.blocked = False  # nobody tried to start
            return None
        chunks = self._plan_chunks(step, self._step_token_budget - len(rows.in_step), only)
        if not chunks and not rows.in_step:
            return None
        owned = self._cache.owned_pages
        self._cache.grow([*rows.page_needs(), *((chunk.pages, chunk.end) for chunk in chunks)])
        self._admission.grew(self._cache.owned_pages - owned)
        batch = rows.batch(step, chunks, self._cache.take_step_writes())
        decoding = tuple(rows.in_step)
        in_step = (*decoding, *(chunk.request for chunk in chunks))
        self._running.launch(step, chunks)
        scheduled = ScheduledStep(
            batch=batch,
            rows=in_step,
            sampled=(*decoding, *(chunk.request for chunk in chunks if chunk.last)),
            chunks=tuple(chunks),
            record=self._record(batch, in_step, prompts=len(chunks)),
        )
        self._in_flight.append(scheduled)
        self._next_step += 1
        return scheduled

    def commit(self, step: ScheduledStep, verdicts: Sequence[Verdict | None]) -> tuple[Request, ...]:
        """Take in what a step did, once it has run.

        Nothing of a request that is ending enters the cache. A step that failed is not committed: `roll_back`.

        Args:
            step: the oldest step in flight.
            verdicts: one for each of `step.sampled`; None drops the token of a request that is ending.

        Returns:
            the requests of which nothing is left now.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise RuntimeError(f"step {step.batch.index} is not the oldest in flight")
        self._in_flight.popleft()
        self._committed_steps = step.batch.index + 1
        with self._cache.releasing():
            for chunk in step.chunks:
                self._commit_chunk(chunk)
            finished = self._commit_tokens(step.sampled, verdicts)
            finished += self._running.finish_ending(committed_steps=self._committed_steps)
        return tuple(finished)

    def roll_back(self) -> None:
        """Forget the steps in flight, none of which is running any more: the oldest failed.

        Each request returns to what committed steps have done, and starts again from there: what the steps wrote is
        written again, by the same table writes and page copies, and seeds draw by position. Requests that are ending
        have ended. The next step holds nothing that only the device knows.
        """
        self._in_flight.clear()
        self._committed_steps = self._next_step
        with self._cache.releasing():
            self._running.finish_ending(committed_steps=self._committed_steps)
        for request in self._running.roll_back(next_step=self._next_step):
            self._siblings.end(request)
        self._cache.send_again()

    def start_alone(self, request: Request) -> bool:
        """Start a request that was never submitted, ahead of all that wait; False if there is no room for it."""
        if not self._cache.free_slots:
            return False
        pages = self._admission.start(request, self._cache.match(request.tokens(), request.namespace))
        if pages is None:
            return False
        request.move(RequestState.WAITING)
        self._running.begin(request, pages)
        return True

    def shrink_steps(self, failed: ScheduledStep) -> bool:
        """Let all later steps have half the tokens of one for which there was no memory; False if that cannot be."""
        half = max(failed.batch.query_tokens // 2, self._policy.max_running_requests + 1)
        if half >= min(failed.batch.query_tokens, self._step_token_budget):
            return False
        self._step_token_budget = half
        return True

    def check_integrity(self) -> None:
        """Compare all counts of pages and requests with what they count; O(pool).

        Raises:
            IntegrityError: with what differs.
        """
        self._running.check()

    def _plan_chunks(self, step: int, budget: int, only: Collection[Request] | None) -> list[PromptChunk]:
        """Give what decoding leaves of the budget to prompts, oldest first, starting requests while some is left."""
        chunks: list[PromptChunk] = []
        self.blocked = False
        begun = iter([r for r in self._running.prefilling if only is None or r in only])
        while budget > 0:
            request = next(begun, None) or (self._start_next(step) if only is None else None)
            if request is None:
                break
            token_ids = request.tokens()[request.computed : request.computed + budget]
            chunks.append(
                PromptChunk(
                    request=request,
                    pages=self._running.pages(request),
                    start=request.computed,
                    token_ids=token_ids,
                    last=request.computed + len(token_ids) == len(request.prompt) + request.sampled,
                )
            )
            budget -= len(token_ids)
        return chunks

    def _start_next(self, step: int) -> Request | None:
        """Start the next waiting request, if one can start."""
        while (request := self._order.head()) is not None:
            if self._admission.would_refuse(request):
                break
            scores = request.prompt_logprobs is not None and not request.sampled  # all of its prompt is to be computed
            match = self._cache.match(request.tokens()[:1] if scores else request.tokens(), request.namespace)
            shares = not scores and self._policy.share_inflight_prefixes and self._cache.shares(request.namespace)
            if shares and self._siblings.wait(request, match, step):
                continue
            pages = self._admission.start(request, match)
            if pages is None:
                break
            self._begin(request, pages)
            return request
        self.blocked = request is not None
        return None

    def _begin(self, request: Request, pages: RequestPages) -> None:
        self._order.remove(request)
        self._siblings.leave(request)
        if request.last_step < 0:
            self._order.note_start(request)
            request.cached_tokens = pages.cached_tokens
            self.prefix_hit_tokens += pages.cached_tokens
        self._running.begin(request, pages)
        self._siblings.begin(request)

    def _record(self, batch: Batch, in_step: Sequence[Request], *, prompts: int) -> StepRecord:
        return StepRecord(
            index=batch.index,
            kind="decode" if not prompts else "mixed" if prompts < len(in_step) else "prefill",
            request_ids=tuple([request.request_id for request in in_step]),
            query_tokens=batch.query_tokens,
            waiting=self.waiting,
            running=self.running,
            free_pages=self._cache.free_pages,
            reserved_tokens=self.reserved_tokens,
        )

    def _commit_chunk(self, chunk: PromptChunk) -> None:
        request = chunk.request
        if chunk.start == chunk.pages.cached_tokens:
            self._cache.copy_done(chunk.pages)
        if request.state is RequestState.ENDING:
            return
        request.committed = chunk.end
        self._cache.store(chunk.pages, request.tokens()[: chunk.end], request.namespace)
        if chunk.last:
            self._siblings.end(request)
        else:
            self._siblings.advance(request)

    def _commit_tokens(self, sampled: Sequence[Request], verdicts: Sequence[Verdict | None]) -> list[Request]:
        """Append the tokens of requests that go on or end with theirs; return those of which nothing is left."""
        finished: list[Request] = []
        ending = RequestState.ENDING
        for request, verdict in zip(sampled, verdicts, strict=True):
            if request.state is ending:
                continue
            if verdict is None:
                raise RuntimeError(f"{request!r} goes on, so its token needs a verdict")
            token_id, ends = verdict
            generated = request.generated
            generated.append(token_id)
            request.committed = len(request.prompt) + len(generated) - 1
            if ends or len(generated) == request.max_tokens:
                self._stop(request)
                if request.pages is None:
                    finished.append(request)
        return finished

    def _stop(self, request: Request) -> None:
        self._siblings.end(request)
        self._running.stop(request, committed_steps=self._committed_steps)
