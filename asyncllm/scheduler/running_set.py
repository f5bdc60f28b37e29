"""The requests that hold a slot: where each is, what it holds, and what it may still need.

Runs on the engine thread; owns their states from start to end, the decoding ones' columns, and their counts.
Invariant: what a request holds returns in one place, `_release`, once no launched step names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import IntegrityError
from asyncllm.request import Request, RequestState
from asyncllm.scheduler.batch_builder import DecodingRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.kv.cache_manager import CacheManager, RequestPages
    from asyncllm.scheduler.admission import ReserveAdmission
    from asyncllm.scheduler.step import PromptChunk

__all__ = ["RunningSet"]


class RunningSet:
    """Move started requests along: prefilling, decoding, paused, ending.

    Args:
        cache: where their pages are.
        admission: what was promised to them.
        max_requests: most requests that run at once.

    Attributes:
        rows: the decoding requests.
        prefilling: those whose prompts are not wholly in launched steps, oldest first.
        paused: how many have a reader that stopped.
        reserved_tokens: positions that they may still need.
    """

    def __init__(self, cache: CacheManager, admission: ReserveAdmission, *, max_requests: int) -> None:
        self.rows = DecodingRows(max_rows=max_requests, page_size=cache.page_size)
        self.prefilling: list[Request] = []
        self.paused = 0
        self.reserved_tokens = 0
        self._cache = cache
        self._admission = admission
        self._pages: dict[Request, RequestPages] = {}
        self._ending: list[Request] = []
        self._sampled_since = 0  # the device has what was sampled last only from this step on

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, request: Request) -> bool:
        return request in self._pages

    def pages(self, request: Request) -> RequestPages:
        """Return a running request's KV."""
        return self._pages[request]

    def begin(self, request: Request, pages: RequestPages) -> None:
        """Take in a request that was admitted."""
        request.move(RequestState.PREFILLING)
        request.pages = pages
        request.computed = pages.cached_tokens
        request.committed = pages.leased_tokens  # the copied page is there when the first step has run
        self._pages[request] = pages
        self.prefilling.append(request)
        self.reserved_tokens += request.worst_case_tokens - request.computed

    def launch(self, step: int, chunks: Sequence[PromptChunk]) -> None:
        """Move the decoding requests and those of `chunks` to where they are when step number `step` has run."""
        self.reserved_tokens -= len(self.rows.in_step)
        self.rows.advance(step)
        for chunk in chunks:
            request = chunk.request
            request.computed = chunk.end
            request.last_step = step
            self.reserved_tokens -= len(chunk.token_ids)
            if chunk.last:
                request.sampled += 1
                request.move(RequestState.DECODING)
                self.prefilling.remove(request)
                if request.sampled < request.max_tokens:
                    self.rows.add(request, chunk.pages)

    def pause(self, request: Request) -> None:
        """Leave a decoding request out of steps; it keeps its pages and what is promised to it."""
        request.move(RequestState.PAUSED)
        self.paused += 1
        self.rows.mark_stale()

    def resume(self, request: Request) -> None:
        """Let a paused request decode on."""
        self.rows.compact()  # drops the row that it may still have
        request.move(RequestState.DECODING)
        self.paused -= 1
        if request.last_step < self._sampled_since:
            self._compute_again(request)
        elif request.sampled < request.max_tokens:
            self.rows.add(request, self._pages[request])

    def roll_back(self, *, next_step: int) -> list[Request]:
        """Return every request to what committed steps have done; no step is in flight any more.

        Requests keep their pages. Those that decode start again from their last token: it is given to the next
        step as a prompt's is, since what the device sampled last is not known.

        Returns:
            the paused ones: whatever of their prompts is missing, nobody computes it for now.
        """
        self._sampled_since = next_step
        again = []
        for request, pages in self._pages.items():
            if request.state is RequestState.ENDING:
                continue
            computed = request.committed if pages.source is None else pages.cached_tokens
            self.reserved_tokens += request.computed - computed
            request.computed = computed
            request.sampled = len(request.generated)
            if request.state is RequestState.DECODING:
                again.append(request)
        for request in reversed(again):
            self._compute_again(request)
        self.rows.mark_stale()
        self.rows.compact()
        return [request for request in self._pages if request.state is RequestState.PAUSED]

    def _compute_again(self, request: Request) -> None:
        request.move(RequestState.PREFILLING)
        self.prefilling.insert(0, request)

    def park(self, request: Request, *, committed_steps: int) -> bool:
        """Take back all that a paused request holds; False, and nothing is done, while a launched step names it."""
        if request.state is not RequestState.PAUSED:
            raise RuntimeError(f"{request!r} is not paused, so it cannot be parked")
        if request.last_step >= committed_steps:
            return False
        self._give_up(request)
        self._release(request, RequestState.PREEMPTED)
        return True

    def stop(self, request: Request, *, committed_steps: int) -> None:
        """Leave a request out of all later steps; release it if all steps that name it are committed."""
        self._give_up(request)
        if request.last_step < committed_steps:
            self._release(request, RequestState.FINISHED)
            return
        if request.state is RequestState.PAUSED:
            request.move(RequestState.DECODING)  # the way from a pause to an end that is not at once
        request.move(RequestState.ENDING)
        self._ending.append(request)

    def finish_ending(self, *, committed_steps: int) -> list[Request]:
        """Release the ending requests that no launched step names any more, and return them."""
        if not self._ending:
            return []
        finished = [request for request in self._ending if request.last_step < committed_steps]
        self._ending = [request for request in self._ending if request.last_step >= committed_steps]
        for request in finished:
            self._release(request, RequestState.FINISHED)
        return finished

    def check(self) -> None:
        """Compare the counts with what they count.

        Raises:
            IntegrityError: with what differs.
        """
        self._cache.check_integrity(self._pages.values())
        going_on = {r: pages for r, pages in self._pages.items() if r.state is not RequestState.ENDING}
        states = [request.state for request in self._pages]
        promised = sum(self._admission.promise(request, pages) for request, pages in going_on.items())
        for name, counted, found in (
            ("promised pages", self._admission.promised_pages, promised),
            ("reserved tokens", self.reserved_tokens, sum(r.worst_case_tokens - r.computed for r in going_on)),
            ("paused requests", self.paused, states.count(RequestState.PAUSED)),
            ("prefilling requests", len(self.prefilling), states.count(RequestState.PREFILLING)),
            ("ending requests", len(self._ending), states.count(RequestState.ENDING)),
            ("decoding requests", sum(map(_decodes, self.rows.requests)), sum(map(_decodes, self._pages))),
        ):
            if counted != found:
                raise IntegrityError(f"{name}: {counted} by count, {found} when looked through")
        if promised > self._cache.available_pages:
            raise IntegrityError(f"{promised} pages are promised, {self._cache.available_pages} are available")

    def _give_up(self, request: Request) -> None:
        """Take a request out of steps and of what is promised."""
        if request.state is RequestState.PREFILLING:
            self.prefilling.remove(request)
        elif request.state is RequestState.PAUSED:
            self.paused -= 1
        self.rows.mark_stale()
        self._admission.give_up(request, self._pages[request])
        self.reserved_tokens -= request.worst_case_tokens - request.computed

    def _release(self, request: Request, state: RequestState) -> None:
        """Return everything that a request holds: the one door."""
        pages = self._pages.pop(request)
        self._cache.release(pages, request.tokens()[: request.committed], request.namespace)
        request.pages = None
        request.move(state)


def _decodes(request: Request) -> bool:
    return request.state is RequestState.DECODING and request.sampled < request.max_tokens
