"""Which tokens may come next in one request's text.

Runs on the engine thread; a `GrammarConstraint` is owned by one request. Invariant: it has taken in a beginning of the
request's committed tokens, in order, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from llguidance import LLMatcher

__all__ = ["GrammarConstraint"]


class GrammarConstraint:
    """Follow one completion; see `asyncllm.request.TokenConstraint`.

    Args:
        matcher: at the beginning of a text; taken over.
        mask_words: int32 words of a mask: a bit for each token of the model's vocabulary.
    """

    __slots__ = ("_mask_words", "_matcher", "_taken", "failure")

    def __init__(self, matcher: LLMatcher, *, mask_words: int) -> None:
        self.failure: str | None = None
        self._matcher = matcher
        self._mask_words = mask_words
        self._taken = 0

    def mask(self, generated: Sequence[int]) -> npt.NDArray[np.int32]:
        """See `TokenConstraint`."""
        mask = np.full(self._mask_words, -1, dtype=np.int32)
        if self.failure is None:
            self._matcher.consume_tokens(list(generated[self._taken :]))
            self._taken = len(generated)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self.failure = f"its structure cannot be followed: {self._matcher.get_error()}"
        return mask
