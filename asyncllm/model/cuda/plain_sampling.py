"""The kernels that look through logits, in plain torch: the reference that the Triton ones are tested against.

Runs anywhere; owns nothing. Invariant: written for the reader, row by row.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import torch

from asyncllm.model.cuda.step_layout import Counts
from asyncllm.model.sampler import uniforms

if TYPE_CHECKING:
    from asyncllm.model.cuda.step_kernels import OptionTables
    from asyncllm.model.cuda.step_layout import AskedSections, StepSections, ToldSections

__all__ = ["PlainSampling"]

_MOST_COUNTED: Final = 0x7FFF


class PlainSampling:
    """Compute what `StepKernels` says of logits."""

    def sample(
        self,
        logits: torch.Tensor,
        inputs: StepSections[torch.Tensor],
        token_pool: torch.Tensor,
        results: torch.Tensor,
    ) -> None:
        """Choose row by row."""
        for row in range(int(inputs.counts[Counts.ROWS])):
            token = self._choose(logits[row].float(), inputs, row)
            token_pool[inputs.slots[row].long()] = token
            results[0, row] = token
            results[1, row] = int(logits[row].isfinite().all())

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
        """Edit, choose and count row by row."""
        for row in range(int(asked.counts[Counts.ROWS])):
            edited[row] = self._edited(logits, asked, tables, row)
            token, place, counted = self._choose(edited[row], asked, row), int(asked.places[row]), asked.counts_at[row]
            token_pool[asked.slots[row].long()] = token
            results[0, place] = token
            if edited[row].max() == -torch.inf:
                results[1, place] = 0
            if counted >= 0 and int(tables.counts[counted.long(), token]) & _MOST_COUNTED < _MOST_COUNTED:
                tables.counts[counted.long(), token] += 1

    def _edited(
        self, logits: torch.Tensor, asked: AskedSections[torch.Tensor], tables: OptionTables, row: int
    ) -> torch.Tensor:
        """Return a row's logits after all that it asks, float32 [vocab]."""
        value = logits[asked.places[row].long()].float()
        mask, addition, counted = (int(at[row]) for at in (asked.masks_at, asked.additions_at, asked.counts_at))
        if mask >= 0:
            bits = torch.arange(32, device=logits.device)
            allowed = (tables.masks[mask].unsqueeze(1) >> bits & 1).flatten()[: len(value)]
            value = value.masked_fill(allowed == 0, -torch.inf)
        if addition >= 0:
            value = value + tables.additions[addition]
        if counted >= 0:
            seen = tables.counts[counted].int()
            generated = seen & _MOST_COUNTED
            repetition = asked.repetitions[row]
            value = torch.where(seen != 0, torch.where(value > 0, value / repetition, value * repetition), value)
            value = value - asked.frequencies[row] * generated - asked.presences[row] * (generated > 0)
        return value

    def tell(
        self, logits: torch.Tensor, told: ToldSections[torch.Tensor], results: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Tell row by row."""
        most = scores.shape[1] // 2 - 1
        for row in range(int(told.counts[Counts.ROWS])):
            place, top = int(told.places[row]), int(told.tops[row])
            value = logits[place].float()
            logprobs, chosen = value.log_softmax(dim=-1), int(results[0, place])
            best = logprobs.topk(top)
            scores[row, 0] = logprobs[chosen]
            scores[row, 1] = 1 + int((value > value[chosen]).sum())
            scores[row, 2 : 2 + top] = best.indices.float()
            scores[row, 2 + most : 2 + most + top] = best.values

    def _choose(
        self, logits: torch.Tensor, inputs: StepSections[torch.Tensor] | AskedSections[torch.Tensor], row: int
    ) -> int:
        """Choose as `asyncllm.model.sampler` says, by the attempts of `kernels.sample`, in the vocabulary's order."""
        best, token = logits.max(dim=-1)
        temperature, top_k, top_p = float(inputs.temperatures[row]), int(inputs.top_ks[row]), float(inputs.top_ps[row])
        if temperature <= 0.0 or not best.isfinite():
            return int(token)
        weights = ((logits - best) / temperature).exp()
        kept = torch.ones_like(weights, dtype=torch.bool)
        if 0 < top_k < len(logits):
            kept &= logits >= logits.topk(top_k).values[-1]
        wanted = max(top_p * float((weights * kept).sum()), 1e-30)
        kept &= weights >= inputs.min_ps[row]
        seeds, positions = (each[row : row + 1].cpu().numpy() for each in (inputs.seeds, inputs.kv_lens))
        for attempt in itertools.count():
            cumulative = (weights * kept).cumsum(0)
            target = float(uniforms(seeds, positions, attempt=attempt)[0]) * cumulative[-1]
            place = int((cumulative <= target).sum().clamp(max=int(kept.nonzero()[-1])))
            kept = logits > logits[place]
            if top_p >= 1.0 or float(weights[kept].sum()) < wanted:
                break
        return place
