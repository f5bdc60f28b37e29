"""The padded sizes that an engine's steps take, and which one a batch takes.

Made on the engine thread; owns nothing. Invariant: every batch within the engine's bounds fits the largest layout
of its kind.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final

from asyncllm.model.cuda.step_layout import StepLayout
from asyncllm.model.cuda.tuning import row_sizes, token_sizes

if TYPE_CHECKING:
    from asyncllm.scheduler.batch import Batch

__all__ = ["StepLayouts"]

_PROMPT_ROWS: Final = 64  # rows of several tokens that all but the largest layout have room for
_MANY_TOKENS: Final = 1024
_FEW_WRITES: Final = 256
_MANY_WRITES: Final = 1024


class StepLayouts:
    """Hold the layouts.

    Args:
        max_rows: most rows of a step.
        max_tokens: most tokens of a step.
        tile_tokens: tokens of a tile of prompt attention.
        all_in_tiles: all rows are tiles of prompt attention, so all steps take the mixed layouts.
    """

    def __init__(self, *, max_rows: int, max_tokens: int, tile_tokens: int, all_in_tiles: bool) -> None:
        self._all_in_tiles = all_in_tiles
        self.mixed = [
            StepLayout(
                tokens=tokens,
                rows=min(tokens, max_rows),
                tiles=-(-tokens // tile_tokens)
                + (min(tokens, max_rows) if all_in_tiles or tokens == max_tokens else _PROMPT_ROWS),
                writes=_FEW_WRITES if tokens < _MANY_TOKENS else _MANY_WRITES,
            )
            for tokens in token_sizes(max_tokens)
        ]
        self.decode = [
            StepLayout(tokens=rows, rows=rows, tiles=0, writes=_FEW_WRITES)
            for rows in ([] if all_in_tiles else row_sizes(max_rows))
        ]

    def all(self) -> list[StepLayout]:
        """Return all of them."""
        return [*self.decode, *self.mixed]

    def choose(self, batch: Batch, tiles: int) -> StepLayout:
        """Return the smallest layout that a batch with this many tiles fits.

        Raises:
            ValueError: the batch is larger than the engine's bounds.
        """
        decodes = batch.query_tokens == batch.rows and not self._all_in_tiles
        layouts = self.decode if decodes else self.mixed
        for layout in layouts[bisect.bisect_left(layouts, batch.query_tokens, key=lambda each: each.tokens) :]:
            if batch.rows <= layout.rows and (decodes or tiles <= layout.tiles):
                return layout
        raise ValueError(f"a step of {batch.rows} rows and {batch.query_tokens} tokens exceeds the engine's bounds")
