"""The prefix cache that keeps nothing.

Runs on the engine thread; owns no page. Invariant: its trees are roots without children.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncllm.kv.radix_cache import Extension, Node, RadixCache, RadixMatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.kv.page_pool import Pages

__all__ = ["NaiveCache"]


class NaiveCache(RadixCache):
    """A radix cache that matches nothing and takes nothing: all pages of a request return at its end."""

    def match(self, tokens: npt.NDArray[np.int32], namespace: str) -> RadixMatch:  # noqa: ARG002
        """Match nothing."""
        return RadixMatch(node=None, whole_pages=0, source=None, source_tokens=0)

    def extend(self, held: Node, tokens: npt.NDArray[np.int32], pages: Pages) -> Extension:  # noqa: ARG002
        """Take nothing."""
        none = np.empty(0, dtype=np.int32)
        return Extension(end=held, present=none, taken_pages=0, kept_tail=False, superseded=none)
