"""How long an engine thread waits for the interpreter's lock: the switch interval while any engine has steps to run.

Runs on engine threads. Every torch call lets the GIL go and must win it back: beside a caller that burns CPU, each
costs up to the switch interval (5 ms by default), so a step costs seconds instead of milliseconds. The interval is
the process's, hence the one object of this package that the whole process shares. Invariant: when the last engine
leaves, the interval is what it was, unless someone else changed it meanwhile.

A thread that wants the lock asks for it once its wait for the interval has ended. Linux lets such waits take 50 us
longer, to wake several threads at once: as long again as the interval. So an engine thread asks to be woken on time.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from typing import Final

__all__ = ["SWITCH_INTERVAL", "SwitchInterval", "wake_on_time"]

_PR_SET_TIMERSLACK: Final = 29
_NANOSECOND: Final = 1


def wake_on_time() -> None:
    """Have the calling thread's timed waits end when they should, on Linux; nothing elsewhere."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_NANOSECOND), 0, 0, 0)


class SwitchInterval:
    """Knows the engines that are at work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._original_seconds = 0.0
        self._set_seconds = 0.0

    def enter(self, holder: object, seconds: float) -> None:
        """Shorten the interval to `seconds` until `holder` leaves; never lengthen it."""
        with self._lock:
            if not self._holders:
                self._original_seconds = self._set_seconds = sys.getswitchinterval()
            self._holders.add(holder)
            if seconds < self._set_seconds:
                sys.setswitchinterval(seconds)
                self._set_seconds = sys.getswitchinterval()

    def leave(self, holder: object) -> None:
        """Undo `enter`; nothing if it was undone already."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.remove(holder)
            if not self._holders and sys.getswitchinterval() == self._set_seconds:
                sys.setswitchinterval(self._original_seconds)


SWITCH_INTERVAL: Final = SwitchInterval()
