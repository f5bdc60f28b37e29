"""A step's inputs as one block of memory: what is where, for a step of a given padded size.

Made anywhere; owns nothing. Invariant: every section starts at a multiple of `_ALIGNMENT` elements, so that a
kernel compiled for one layout serves all of them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = ["Counts", "StepLayout", "StepSections"]

_ALIGNMENT: Final = 16  # elements of 4 bytes
_DTYPES: Final = {"temperatures": "float32", "top_ps": "float32", "min_ps": "float32", "seeds": "int64"}  # else int32

Section = TypeVar("Section")


class Counts(enum.IntEnum):
    """Places in `StepSections.counts`: how much of a section is the step's own."""

    WRITES = 0
    DECODE_ROWS = 1
    TILES = 2
    ROWS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSections(Generic[Section]):
    """A step's inputs, on the host (numpy) or on the device (torch); int32 unless said otherwise.

    Rows of one token come first, then the others; their tokens lie in the same order. What is past the step's own
    tokens and rows is padding: token 0 at position 0 of the padding slot.

    Args:
        counts: [4], see `Counts`.
        token_ids: [tokens]; negative where the token pool has the token.
        token_slots: [tokens].
        positions: [tokens].
        slots: [rows].
        kv_lens: [rows]: positions of each row after the step, at least 1.
        query_starts: [rows + 1]: where each row's tokens start, and where the last ones end.
        last_tokens: [rows]: the place of each row's last token.
        temperatures: float32 [rows]; 0 is greedy.
        top_ps: float32 [rows].
        top_ks: [rows].
        min_ps: float32 [rows].
        seeds: int64 [rows].
        tile_rows: [tiles], of `prompt_attention`.
        tile_firsts: [tiles].
        table_writes: [3 * writes]: slots, columns, pages.
    """

    counts: Section
    token_ids: Section
    token_slots: Section
    positions: Section
    slots: Section
    kv_lens: Section
    query_starts: Section
    last_tokens: Section
    temperatures: Section
    top_ps: Section
    top_ks: Section
    min_ps: Section
    seeds: Section
    tile_rows: Section
    tile_firsts: Section
    table_writes: Section


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The padded size of a step.

    Args:
        tokens: most tokens.
        rows: most rows.
        tiles: most tiles of prompt attention; 0: every row has one token, and tokens == rows.
        writes: most page-table writes.
    """

    tokens: int
    rows: int
    tiles: int
    writes: int

    @property
    def decodes(self) -> bool:
        """Whether every row has one token."""
        return self.tiles == 0

    @property
    def size(self) -> int:
        """Elements of 4 bytes of a whole step."""
        return _places(self)[1]

    def host(self, block: npt.NDArray[np.int32]) -> StepSections[npt.NDArray[np.generic]]:
        """Give the sections of a host block, int32 [>= size]."""
        return StepSections(
            **{
                name: block[start : start + size].view(_DTYPES.get(name, "int32"))
                for name, (start, size) in _places(self)[0].items()
            }
        )

    def device(self, block: torch.Tensor) -> StepSections[torch.Tensor]:
        """Give the sections of a device block, int32 [>= size]."""
        import torch  # noqa: PLC0415 - the layout itself needs none

        return StepSections(
            **{
                name: block[start : start + size].view(getattr(torch, _DTYPES.get(name, "int32")))
                for name, (start, size) in _places(self)[0].items()
            }
        )


@functools.lru_cache(maxsize=1024)
def _places(layout: StepLayout) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the first element and the size of each section, and the size of all."""
    tokens, rows = layout.tokens, layout.rows
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(StepSections)), rows)
    sizes |= {
        "counts": 4,
        "token_ids": tokens,
        "token_slots": tokens,
        "positions": tokens,
        "query_starts": rows + 1,
        "seeds": 2 * rows,
    }
    sizes |= {"tile_rows": layout.tiles, "tile_firsts": layout.tiles, "table_writes": 3 * layout.writes}
    places: dict[str, tuple[int, int]] = {}
    start = 0
    for name, size in sizes.items():
        places[name] = (start, size)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, start
