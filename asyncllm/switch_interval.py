"""The interpreter's thread switch interval while any engine has steps to run.

Runs on engine threads. Every torch call lets the GIL go and must win it back: beside a caller that burns CPU, each
costs up to the switch interval (5 ms by default), so a step costs seconds instead of milliseconds. The interval is
the process's, hence the one object of this package that the whole process shares. Invariant: when the last engine
leaves, the interval is what it was, unless someone else changed it meanwhile.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

__all__ = ["SWITCH_INTERVAL", "SwitchInterval"]


class SwitchInterval:
    """Counts the engines that are at work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._original_seconds = 0.0
        self._set_seconds = 0.0

    def enter(self, seconds: float) -> None:
        """Shorten the interval to `seconds`; never lengthen it."""
        with self._lock:
            if self._holders == 0:
                self._original_seconds = self._set_seconds = sys.getswitchinterval()
            self._holders += 1
            if seconds < self._set_seconds:
                sys.setswitchinterval(seconds)
                self._set_seconds = sys.getswitchinterval()

    def leave(self) -> None:
        """Undo one `enter`."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and sys.getswitchinterval() == self._set_seconds:
                sys.setswitchinterval(self._original_seconds)


SWITCH_INTERVAL: Final = SwitchInterval()
