"""Token ids for tests of what never looks at text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

__all__ = ["ids"]


def ids(tokens: str | Iterable[int]) -> npt.NDArray[np.int32]:
    """Make token ids of a text's characters, or of integers: int32 [n]."""
    return np.array([ord(token) if isinstance(token, str) else token for token in tokens], dtype=np.int32)
