"""The launches of kernels that look through logits: to choose tokens, to edit before, to tell of them.

Runs on the engine's CUDA stream; owns nothing. Invariant: see `asyncllm.model.cuda.launching`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from asyncllm.model.cuda.kernels.edit import edit_logits
from asyncllm.model.cuda.kernels.groups import find_best
from asyncllm.model.cuda.kernels.sample import choose_tokens
from asyncllm.model.cuda.kernels.tell import score_parts, tell_tokens
from asyncllm.model.cuda.launching import Launcher, power_above
from asyncllm.model.cuda.step_layout import Counts

if TYPE_CHECKING:
    from asyncllm.model.cuda.step_kernels import OptionTables
    from asyncllm.model.cuda.step_layout import AskedSections, StepSections, ToldSections

__all__ = ["TritonSampling"]

_FEW_ROWS: Final = 16
_SOME_ROWS: Final = 128
_MOST_PARTS: Final = 32
_LANES: Final = 8192
_BLOCK: Final = 2048


class _SampleScratch:
    """What the kernels that look through logits leave to those after them; see `kernels.groups`."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.parts = _sampling_parts(rows)
        self.stretches = power_above(-(-vocab // _LANES))
        found = torch.empty((3, rows, self.parts), dtype=torch.int32, device=device)
        self.best_values, self.best_tokens, self.finite = found[0].view(torch.float32), found[1], found[2]
        self.maxima = torch.empty((rows, self.parts * _BLOCK), dtype=dtype, device=device)
        self.listed = torch.empty((rows, _LANES // self.stretches), dtype=torch.int32, device=device)


class TritonSampling(Launcher):
    """Launch what `StepKernels` says of logits."""

    def sample(
        self,
        logits: torch.Tensor,
        inputs: StepSections[torch.Tensor],
        token_pool: torch.Tensor,
        results: torch.Tensor,
    ) -> None:
        """Find the best tokens in parts, then choose."""
        rows, vocab = logits.shape
        scratch = _SampleScratch(rows, vocab, logits.dtype, logits.device)
        self._launch(
            find_best,
            (scratch.parts, rows),
            logits,
            inputs.top_ks,
            scratch.best_values,
            scratch.best_tokens,
            scratch.finite,
            scratch.maxima,
            inputs.counts[Counts.ROWS :],
            vocab,
            scratch.parts,
            warps=4,
            BLOCK=_BLOCK,
            PDL=self._dependent,
        )
        self._choose(logits, inputs, scratch, token_pool, results)

    def choose_asked(
        self,
        logits: torch.Tensor,
        asked: AskedSections[torch.Tensor],
        tables: OptionTables,
        *,
        edited: torch.Tensor,
        token_pool: torch.Tensor,
        results: torch.Tensor,
    ) -> None:
        """Apply all options, and find the best tokens in parts, in one pass; then choose, in float32."""
        rows, vocab = edited.shape
        scratch = _SampleScratch(rows, vocab, edited.dtype, edited.device)
        self._launch(
            edit_logits,
            (scratch.parts, rows),
            logits,
            edited,
            asked.places,
            asked.masks_at,
            tables.masks,
            asked.additions_at,
            tables.additions,
            asked.counts_at,
            tables.counts,
            asked.repetitions,
            asked.presences,
            asked.frequencies,
            asked.kept,
            asked.temperatures,
            asked.top_ks,
            scratch.best_values,
            scratch.best_tokens,
            scratch.maxima,
            asked.counts[Counts.ROWS :],
            vocab,
            tables.masks.shape[1],
            scratch.parts,
            warps=4,
            BLOCK=_BLOCK,
            PDL=self._dependent,
        )
        self._choose(edited, asked, scratch, token_pool, results, asked=asked, tables=tables)

    def tell(
        self, logits: torch.Tensor, told: ToldSections[torch.Tensor], results: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Look through the logits in parts, then put them together."""
        rows, vocab = len(scores), logits.shape[1]
        scratch = _SampleScratch(rows, vocab, logits.dtype, logits.device)
        totals, better, row_count = (
            torch.empty_like(scratch.best_values),
            scratch.best_tokens,
            told.counts[Counts.ROWS :],
        )
        self._launch(
            score_parts,
            (scratch.parts, rows),
            logits,
            told.places,
            results,
            scratch.best_values,
            totals,
            better,
            scratch.maxima,
            row_count,
            vocab,
            scratch.parts,
            warps=4,
            BLOCK=_BLOCK,
        )
        self._launch(
            tell_tokens,
            (rows,),
            logits,
            told.places,
            told.tops,
            results,
            scratch.best_values,
            totals,
            better,
            scratch.maxima,
            scratch.listed,
            scores,
            row_count,
            vocab,
            scores.shape[1] // 2 - 1,
            scratch.parts,
            warps=32,
            MOST_PARTS=_MOST_PARTS,
            BLOCK=_BLOCK,
            LANES=_LANES,
            STRETCHES=scratch.stretches,
        )

    def _choose(
        self,
        logits: torch.Tensor,
        inputs: StepSections[torch.Tensor] | AskedSections[torch.Tensor],
        scratch: _SampleScratch,
        token_pool: torch.Tensor,
        results: torch.Tensor,
        *,
        asked: AskedSections[torch.Tensor] | None = None,
        tables: OptionTables | None = None,
    ) -> None:
        """Choose tokens, the best of each part being known."""
        rows, vocab = logits.shape
        self._launch(
            choose_tokens,
            (rows,),
            logits,
            scratch.best_values,
            scratch.best_tokens,
            scratch.finite,
            scratch.maxima,
            scratch.listed,
            inputs.temperatures,
            inputs.top_ps,
            inputs.top_ks,
            inputs.min_ps,
            inputs.seeds,
            inputs.kv_lens,
            inputs.slots,
            token_pool,
            results,
            inputs.counts[Counts.ROWS :],
            results.stride(0),
            vocab,
            scratch.listed if asked is None else asked.places,
            scratch.listed if asked is None else asked.counts_at,
            scratch.listed if tables is None else tables.counts,
            scratch.parts,
            warps=32,
            MOST_PARTS=_MOST_PARTS,
            BLOCK=_BLOCK,
            LANES=_LANES,
            STRETCHES=scratch.stretches,
            ASKED=asked is not None,
            PDL=self._dependent,
        )


def _sampling_parts(rows: int) -> int:
    """Return in how many parts the rows' logits are looked through, so that there are enough programs for a GPU."""
    return _MOST_PARTS if rows <= _FEW_ROWS else 16 if rows <= _SOME_ROWS else 4
