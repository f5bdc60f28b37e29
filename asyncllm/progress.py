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


class _Bar(tqdm):  # type: ignore[misc]  # published without types
    monitor_interval = 0  # else tqdm starts a thread that stays in the caller's process


def progress_bar(items: Iterable[object], *, shown: bool) -> _Bar:
    """Make a bar that counts requests, only drawn on a terminal or in a notebook."""
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    total = len(items) if isinstance(items, Sized) else None
    return _Bar(total=total, unit="request", disable=not (shown and watched), leave=False)
