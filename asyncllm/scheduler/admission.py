"""Whether the next request may start: its worst case must fit beside all that is promised already.

Runs on the engine thread; owns the promise, a running total in pages. Invariant: what is promised never exceeds
the pages that are free or evictable, so that a started request never lacks one, whatever the page size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import PromptTooLongError

if TYPE_CHECKING:
    from asyncllm.kv.cache_manager import CacheManager, PrefixMatch, RequestPages
    from asyncllm.request import Request

__all__ = ["ReserveAdmission"]


class ReserveAdmission:
    """Start a request only when the pages of its worst case are there; nothing is ever preempted.

    A request's promise is what its worst case needs, rounded up to pages for itself, less the pages that its row
    has. It shrinks page by page as the row grows, and is given up as soon as the request will not run again.

    Args:
        cache: where the pages are.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._promised = 0
        self._given_up = 0
        self._refused: tuple[int, int, int] | None = None  # sequence number, cache version, promises given up

    @property
    def promised_pages(self) -> int:
        """Pages that started requests may still need."""
        return self._promised

    def check_fits_pool(self, request: Request) -> None:
        """Refuse a request whose worst case is larger than an empty pool: it could never start.

        Raises:
            PromptTooLongError: with the numbers.
        """
        num_pages = self._cache.num_pages
        if self._worst_case_pages(request) <= num_pages:
            return
        pool_tokens = num_pages * self._cache.page_size
        limit_tokens = pool_tokens + 1  # the last token's KV is never written
        raise PromptTooLongError(
            f"a prompt of {len(request.prompt)} tokens with max_tokens={request.max_tokens} does not fit the KV pool, "
            f"which has room for {limit_tokens}; shorten the prompt, lower max_tokens, or raise kv_pool_tokens",
            prompt_tokens=len(request.prompt),
            limit_tokens=limit_tokens,
            pool_tokens=pool_tokens,
            request_id=request.request_id,
        )

    def would_refuse(self, request: Request) -> bool:
        """Whether `start` is known to fail, without a match: no slot, or nothing changed since it was refused."""
        return self._cache.free_slots == 0 or self._refused == self._moment(request)

    def start(self, request: Request, match: PrefixMatch) -> RequestPages | None:
        """Reserve the request's worst case and attach the matched prefix.

        A match that ends inside a page needs its source page beside its own copy for a while. Where just this one
        page is missing, the request goes without the partial page rather than wait for a pool that is larger.

        Returns:
            its slot and pages, or None if it must wait.
        """
        pages = self._attach(request, match)
        if pages is None and match.tokens > match.whole_pages * self._cache.page_size:
            pages = self._attach(request, match.without_copy(self._cache.page_size))
        if pages is None:
            self._refused = self._moment(request)
            return None
        self._promised += self.promise(request, pages)
        return pages

    def promise(self, request: Request, pages: RequestPages) -> int:
        """Pages that the request may still need."""
        return self._worst_case_pages(request) - pages.num_pages

    def grew(self, num_pages: int) -> None:
        """Note that rows of started requests got pages that were promised to them."""
        self._promised -= num_pages

    def give_up(self, request: Request, pages: RequestPages) -> None:
        """Note that the request is in no later step; its pages may stay until launched steps have ended."""
        self._promised -= self.promise(request, pages)
        self._given_up += 1

    def _attach(self, request: Request, match: PrefixMatch) -> RequestPages | None:
        cache = self._cache
        need = cache.pages_needed(match, request.worst_case_tokens)
        if need + self._promised > cache.available_pages:
            return None
        lease = cache.lock(match)
        if need + self._promised > cache.available_pages:  # what it leases itself is not evictable any more
            cache.unlock(lease)
            return None
        return cache.attach(lease)

    def _moment(self, request: Request) -> tuple[int, int, int]:
        return request.sequence, self._cache.version, self._given_up

    def _worst_case_pages(self, request: Request) -> int:
        return -(-request.worst_case_tokens // self._cache.page_size)
