"""Numbers and sequences of any kind as Python's own: numpy's come out of arrays, and callers pass them on.

Runs anywhere; owns nothing. Invariant: a boolean is no number, a text is no sequence.
"""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import SupportsIndex, cast

__all__ = ["as_integer", "as_items", "as_real"]


def as_integer(value: object) -> int | None:
    """Return an integer as an int, whatever its type; None for what is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def as_real(value: object) -> float | None:
    """Return a real number as a float, the largest one for what is beyond it; None for what is no real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return sys.float_info.max if cast("int", value) > 0 else -sys.float_info.max


def as_items(value: object) -> tuple[object, ...] | None:
    """Return the items of an iterable, which is used up; None for what is none, for texts and for mappings."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        return None
    try:
        items = iter(value)
    except TypeError:  # an array of no dimensions says that it is iterable
        return None
    return tuple(items)
