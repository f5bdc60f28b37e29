"""The order in which waiting requests start.

Runs on the engine thread; owns the queue of requests that could start now. Invariant: the order depends on what
was called in which order, never on a clock, so that a run can be repeated.

A request counts as passed over each time that one with a later sequence number starts before it, its time in
preparation included: a text that takes long to tokenize was called earlier all the same. How often that happened
is then a function of the numbers started so far: at least N times just where the N-th largest number started
is larger than its own. The N largest are all that must be kept, and no waiting request is ever touched to count.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.request import Request

__all__ = ["WaitingOrder"]

# Ranks, first to last: began before and was parked; passed over often enough; all others.
_RESUMED, _PASSED_OVER, _FRESH = range(3)
_Key = tuple[int, int, int]  # rank, -priority, sequence


class WaitingOrder:
    """Requests by rank, then priority, then sequence number; every change costs O(log waiting), amortized.

    Args:
        passes_until_first: how often a request lets later ones start ahead of it before it goes first.
    """

    def __init__(self, *, passes_until_first: int = 64) -> None:
        self._passes_until_first = passes_until_first
        self._requests: dict[int, Request] = {}  # by sequence number
        self._keys: dict[int, _Key] = {}  # by sequence number; a heap entry that differs from it is stale
        self._order: list[_Key] = []  # heap
        self._fresh: list[int] = []  # heap of sequence numbers of rank _FRESH, stale ones included
        self._started: list[int] = []  # heap of the largest sequence numbers that started

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests, head first."""
        for key in sorted(self._keys.values()):
            yield self._requests[key[2]]

    def add(self, request: Request) -> None:
        """Let a request take its place; its sequence number must be no other's."""
        if request.sequence in self._requests:
            raise RuntimeError(f"{request!r} and {self._requests[request.sequence]!r} have one sequence number")
        self._requests[request.sequence] = request
        self._put(request, self._rank(request))

    def remove(self, request: Request) -> None:
        """Take a request out: it starts, ended, or waits for another's prefix."""
        del self._requests[request.sequence]
        del self._keys[request.sequence]
        self._compact()

    def head(self) -> Request | None:
        """Return the request that is next to start; None if none waits."""
        while self._order:
            key = self._order[0]
            if self._keys.get(key[2]) == key:
                return self._requests[key[2]]
            heapq.heappop(self._order)
        return None

    def note_start(self, request: Request) -> None:
        """Count that a request starts for the first time, ahead of all that wait with a smaller number."""
        if len(self._started) < self._passes_until_first:
            heapq.heappush(self._started, request.sequence)
        else:
            heapq.heappushpop(self._started, request.sequence)
        limit = self._first_not_passed()
        while self._fresh and self._fresh[0] < limit:
            sequence = heapq.heappop(self._fresh)
            key = self._keys.get(sequence)
            if key is not None and key[0] == _FRESH:
                self._put(self._requests[sequence], _PASSED_OVER)

    def _rank(self, request: Request) -> int:
        if request.last_step >= 0:
            return _RESUMED
        return _PASSED_OVER if request.sequence < self._first_not_passed() else _FRESH

    def _first_not_passed(self) -> int:
        """Every smaller sequence number was passed over often enough."""
        return self._started[0] if len(self._started) == self._passes_until_first else 0

    def _put(self, request: Request, rank: int) -> None:
        key = (rank, -request.priority, request.sequence)
        self._keys[request.sequence] = key
        heapq.heappush(self._order, key)
        if rank == _FRESH:
            heapq.heappush(self._fresh, request.sequence)

    def _compact(self) -> None:
        """Drop stale entries once they are the most: requests that were cancelled deep in the queue."""
        if len(self._order) > 2 * len(self._keys) + 64:
            self._order = sorted(self._keys.values())
        if len(self._fresh) > 2 * len(self._keys) + 64:
            self._fresh = sorted(key[2] for key in self._keys.values() if key[0] == _FRESH)
