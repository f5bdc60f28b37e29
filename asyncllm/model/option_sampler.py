"""How the tokens of rows are chosen that ask for more than temperature and filters.

Runs on the device. Invariant: a row's token depends on its own logits, options, history, seed and position only, and
rows that ask for nothing are not looked at.

The order, all in float32: masks, then what `asyncllm.model.sampler` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncllm.model.sampler import choose

if TYPE_CHECKING:
    from asyncllm.model.option_tensors import OptionInputs

__all__ = ["OptionSampler"]


class OptionSampler:
    """Choose the asking rows' tokens."""

    def sample(self, logits: torch.Tensor, inputs: OptionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token for each asking row.

        Args:
            logits: [rows of the step, vocab], not changed.
            inputs: the asking rows'.

        Returns:
            int64 [asking], a valid token id in any case, and bool [asking]: whether any token was left to choose.
        """
        edited = logits[inputs.places].to(torch.float32)  # [asking, vocab], a copy
        if inputs.mask_rows.numel():
            _apply_masks(edited, inputs.mask_rows, inputs.masks)
        return choose(edited, inputs), edited.amax(dim=-1).isfinite()


def _apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what a packed mask, int32 [masks, words], does not allow to -inf, in place."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks.unsqueeze(-1) >> bits) & 1).view(len(masks), -1)[:, : logits.shape[1]]  # [masks, vocab]
    logits[rows] = logits[rows].masked_fill_(allowed == 0, -torch.inf)
