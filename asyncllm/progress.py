"""Progress bars on standard error, where a person can see them.

Runs in the caller's task or thread; owns nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["progress_bar"]


def progress_bar(items: Iterable[object], *, shown: bool) -> tqdm[None]:
    """Make a bar that counts requests, only drawn on a terminal or in a notebook."""
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    total = len(items) if isinstance(items, Sized) else None
    return tqdm(total=total, unit="request", disable=not (shown and watched), leave=False)
