"""A step's inputs as one block of memory, those of its asking rows as others: what is where, by padded size.

Made anywhere; owns nothing. Invariant: every section starts at a multiple of `_ALIGNMENT` elements, so that a
kernel compiled for one layout serves all of them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = [
    "AskedLayout",
    "AskedSections",
    "Counts",
    "StepLayout",
    "StepSections",
    "ToldLayout",
    "ToldSections",
]

_ALIGNMENT: Final = 16  # elements of 4 bytes
_DTYPES: Final = {  # else int32
    **dict.fromkeys(("temperatures", "top_ps", "min_ps", "repetitions", "presences", "frequencies"), "float32"),
    "seeds": "int64",
}

Section = TypeVar("Section")
Places = dict[str, tuple[int, int]]


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
        return _step_places(self)[1]

    def host(self, block: npt.NDArray[np.int32]) -> StepSections[npt.NDArray[np.generic]]:
        """Give the sections of a host block, int32 [>= size]."""
        return StepSections(**_host_sections(block, _step_places(self)[0]))

    def device(self, block: torch.Tensor) -> StepSections[torch.Tensor]:
        """Give the sections of a device block, int32 [>= size]."""
        return StepSections(**_device_sections(block, _step_places(self)[0]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskedSections(Generic[Section]):
    """What a step's asking rows ask, on the host or on the device; int32 [rows] unless said otherwise.

    Args:
        counts: [4], see `Counts`; of rows alone.
        places: the row of the step's logits and results.
        slots: of the token pool.
        kv_lens: the position of the token that is drawn.
        temperatures: float32 [rows]; 0 is greedy.
        top_ps: float32 [rows].
        top_ks: [rows].
        min_ps: float32 [rows].
        seeds: int64 [rows].
        masks_at: the row of the masks that it takes; negative: none.
        additions_at: the row of the additions, likewise.
        counts_at: the row of the counts, if it has penalties, likewise.
        repetitions, presences, frequencies: float32 [rows], the penalties.
        kept: not 0 where the edited logits are read afterwards.
    """

    counts: Section
    places: Section
    slots: Section
    kv_lens: Section
    temperatures: Section
    top_ps: Section
    top_ks: Section
    min_ps: Section
    seeds: Section
    masks_at: Section
    additions_at: Section
    counts_at: Section
    repetitions: Section
    presences: Section
    frequencies: Section
    kept: Section


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskedLayout:
    """The padded size of a step's asking rows.

    Args:
        rows: most of them.
    """

    rows: int

    @property
    def size(self) -> int:
        """Elements of 4 bytes of all sections."""
        return _asked_places(self)[1]

    def host(self, block: npt.NDArray[np.int32]) -> AskedSections[npt.NDArray[np.generic]]:
        """Give the sections of a host block, int32 [>= size]."""
        return AskedSections(**_host_sections(block, _asked_places(self)[0]))

    def device(self, block: torch.Tensor) -> AskedSections[torch.Tensor]:
        """Give the sections of a device block, int32 [>= size]."""
        return AskedSections(**_device_sections(block, _asked_places(self)[0]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToldSections(Generic[Section]):
    """What of a step's rows is to be told, on the host or on the device; int32 [rows] unless said otherwise.

    Args:
        counts: [4], see `Counts`; of rows alone.
        places: the row of the step's logits and results.
        tops: how many of the likeliest tokens.
    """

    counts: Section
    places: Section
    tops: Section


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToldLayout:
    """The padded size of the rows of which a step tells.

    Args:
        rows: most of them.
    """

    rows: int

    @property
    def size(self) -> int:
        """Elements of 4 bytes of all sections."""
        return _told_places(self)[1]

    def host(self, block: npt.NDArray[np.int32]) -> ToldSections[npt.NDArray[np.generic]]:
        """Give the sections of a host block, int32 [>= size]."""
        return ToldSections(**_host_sections(block, _told_places(self)[0]))

    def device(self, block: torch.Tensor) -> ToldSections[torch.Tensor]:
        """Give the sections of a device block, int32 [>= size]."""
        return ToldSections(**_device_sections(block, _told_places(self)[0]))


def _host_sections(block: npt.NDArray[np.int32], places: Places) -> dict[str, npt.NDArray[np.generic]]:
    return {
        name: block[start : start + size].view(_DTYPES.get(name, "int32")) for name, (start, size) in places.items()
    }


def _device_sections(block: torch.Tensor, places: Places) -> dict[str, torch.Tensor]:
    import torch  # noqa: PLC0415 - the layout itself needs none

    return {
        name: block[start : start + size].view(getattr(torch, _DTYPES.get(name, "int32")))
        for name, (start, size) in places.items()
    }


@functools.lru_cache(maxsize=1024)
def _step_places(layout: StepLayout) -> tuple[Places, int]:
    """Return the first element and the size of each section, and the size of all."""
    tokens, rows = layout.tokens, layout.rows
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(StepSections)), rows)
    sizes |= {
        "counts": len(Counts),
        "token_ids": tokens,
        "token_slots": tokens,
        "positions": tokens,
        "query_starts": rows + 1,
        "seeds": 2 * rows,
    }
    sizes |= {"tile_rows": layout.tiles, "tile_firsts": layout.tiles, "table_writes": 3 * layout.writes}
    return _placed(sizes)


@functools.lru_cache(maxsize=64)
def _asked_places(layout: AskedLayout) -> tuple[Places, int]:
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(AskedSections)), layout.rows)
    return _placed(sizes | {"counts": len(Counts), "seeds": 2 * layout.rows})


@functools.lru_cache(maxsize=64)
def _told_places(layout: ToldLayout) -> tuple[Places, int]:
    return _placed({"counts": len(Counts), "places": layout.rows, "tops": layout.rows})


def _placed(sizes: Mapping[str, int]) -> tuple[Places, int]:
    """Put sections one after the other."""
    places: Places = {}
    start = 0
    for name, size in sizes.items():
        places[name] = (start, size)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, start
