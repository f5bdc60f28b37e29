"""What temperature and filters keep, by sorting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from helpers.fused_steps import Sampling

__all__ = ["kept_tokens"]


def kept_tokens(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """Sort, to say what the rules keep: tokens that may be drawn from float32 [vocab]."""
    if sampling.temperature == 0.0:
        return {int(logits.argmax())}
    weights = ((logits - logits.max()) / sampling.temperature).exp()
    order = logits.argsort(descending=True, stable=True)
    if sampling.top_k:
        order = order[logits[order] >= logits[order[sampling.top_k - 1]]]
    if sampling.top_p < 1.0:
        share = weights[order] / weights[order].sum()
        last = int((share.cumsum(0) - share < sampling.top_p).sum().clamp(min=1)) - 1
        order = order[logits[order] >= logits[order[last]]]
    return set(order[(weights[order] >= sampling.min_p) & (weights[order] > 0.0)].tolist())
