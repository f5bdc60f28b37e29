"""Requests that wait while another computes the prefix both have, so that it is computed once.

Runs on the engine thread; owns who waits for whom. Invariant: a request that waits here holds no slot, lease or
promise; whom it waits for is being prefilled; and it waits a bounded number of steps.

Whole pages enter the cache at each commit of a prefill chunk. So where a request's match ends, the pages before
are also those that a request computing the very next page has committed: one page of each prefilling request,
the next that it will commit, is all that must be looked up. A last page that is not full counts for equal prompts
only: many prompts share a first few tokens that are not worth a wait.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.kv.cache_manager import PrefixMatch
    from asyncllm.request import Request
    from asyncllm.scheduler.waiting_order import WaitingOrder

__all__ = ["SiblingPrefixes"]

_PageKey = tuple[str, bytes]  # namespace, all tokens up to the page's end


class _Wait(NamedTuple):
    request: Request
    producer: Request
    shared_tokens: int  # counted from the prompts' begin
    until_step: int


class SiblingPrefixes:
    """Who commits which page next, and who waits for it.

    Args:
        order: the queue from which requests come to wait here, and to which they go back.
        page_size: tokens of a page.
        step_token_budget: most tokens of a step.
    """

    def __init__(self, order: WaitingOrder, *, page_size: int, step_token_budget: int) -> None:
        self._order = order
        self._page_size = page_size
        self._step_token_budget = step_token_budget
        self._producers: dict[_PageKey, Request] = {}
        self._next_page: dict[Request, _PageKey] = {}  # by producer
        self._waits: dict[int, _Wait] = {}  # by sequence number of who waits; heap entries that differ are stale
        self._waiters: dict[Request, list[tuple[int, int]]] = {}  # by producer: a heap of shared tokens, sequence
        self._deadlines: list[tuple[int, int]] = []  # heap of step, sequence
        self._waited: set[int] = set()  # sequence numbers of those that waited as long as they may

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that wait."""
        for wait in self._waits.values():
            yield wait.request

    def wait(self, request: Request, match: PrefixMatch, step: int) -> bool:
        """Let a request wait if another is computing what follows its match.

        Args:
            request: the head of the queue.
            match: what the cache has of it.
            step: index of the next step to launch.

        Returns:
            whether it waits, and is not in the queue any more.
        """
        tokens = request.tokens()
        most = len(tokens) - 1  # the last token is always computed
        if match.tokens == most or request.sequence in self._waited:
            return False
        producer = self._producers.get(self._page_key(request, match.whole_pages))
        if producer is None:
            return False
        shared = min(_common_tokens(tokens, producer.tokens()), most)
        if len(tokens) != len(producer.tokens()) or shared < most:
            shared -= shared % self._page_size
        steps = -(-(shared - match.tokens) // self._step_token_budget) + 2
        self._order.remove(request)
        self._waits[request.sequence] = _Wait(request, producer, shared, step + steps)
        heapq.heappush(self._waiters.setdefault(producer, []), (shared, request.sequence))
        heapq.heappush(self._deadlines, (step + steps, request.sequence))
        return True

    def leave(self, request: Request) -> bool:
        """Forget a request that ended or starts; whether it waited here."""
        self._waited.discard(request.sequence)
        return self._waits.pop(request.sequence, None) is not None

    def expire(self, step: int) -> None:
        """Send back the requests that have waited as long as they may; they wait for no other before they start."""
        while self._deadlines and self._deadlines[0][0] <= step:
            until_step, sequence = heapq.heappop(self._deadlines)
            wait = self._waits.get(sequence)
            if wait is not None and wait.until_step == until_step:
                self._waited.add(sequence)
                self._send_back(wait)

    def begin(self, producer: Request) -> None:
        """Note that a request starts to compute its prompt."""
        key = self._page_key(producer, producer.committed // self._page_size)
        self._next_page[producer] = key
        self._producers.setdefault(key, producer)

    def advance(self, producer: Request) -> None:
        """Note that a chunk was committed; send back the requests that need no more of this one."""
        self._withdraw(producer)
        self.begin(producer)
        waiters = self._waiters.get(producer, [])
        while waiters and waiters[0][0] <= producer.committed:
            self._wake(producer, heapq.heappop(waiters)[1])

    def end(self, producer: Request) -> None:
        """Note that a request computes no more of its prompt; send back all that wait for it."""
        self._withdraw(producer)
        for _, sequence in self._waiters.pop(producer, []):
            self._wake(producer, sequence)

    def _withdraw(self, producer: Request) -> None:
        key = self._next_page.pop(producer, None)
        if key is not None and self._producers.get(key) is producer:
            del self._producers[key]

    def _wake(self, producer: Request, sequence: int) -> None:
        wait = self._waits.get(sequence)
        if wait is not None and wait.producer is producer:  # it may have left, or wait for another now
            self._send_back(wait)

    def _send_back(self, wait: _Wait) -> None:
        del self._waits[wait.request.sequence]
        self._order.add(wait.request)

    def _page_key(self, request: Request, page: int) -> _PageKey:
        """Name a page by all that its KV depends on; the last page of a prompt may be filled in part."""
        return request.namespace, request.tokens()[: (page + 1) * self._page_size].tobytes()


def _common_tokens(tokens: npt.NDArray[np.int32], others: npt.NDArray[np.int32]) -> int:
    length = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:length] != others[:length])
    return int(differ[0]) if len(differ) else length
