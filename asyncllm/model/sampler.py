"""How a row's token is chosen from its logits.

`uniforms` runs on the engine thread, `sample` on the device. Owns nothing. Invariant: a row's token depends on its
own logits, settings, seed and position only; never on the rows beside it, nor on a generator's state.

The rules, in the order in which transformers and vLLM apply them, all in float32 after subtracting the maximum:

- temperature first; below `MIN_TEMPERATURE` the row is greedy: its best token, of equal ones the lowest id;
- top-k keeps the k best tokens, and all that are equal to the k-th;
- top-p keeps the fewest best of what is left whose probabilities, renormalised over what is left, reach p, and all
  that are equal to the last of them; at least one token (so 0 keeps the best);
- min-p keeps what is at least this share of the best token's probability.

The token is where a uniform number, hashed from (seed, position), falls in the cumulative sum of what was kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.scheduler.batch import Floats, Ints

__all__ = [
    "MIN_TEMPERATURE",
    "Draws",
    "choose",
    "drawn_from",
    "is_filtered",
    "is_greedy",
    "sample",
    "score_tokens",
    "uniforms",
]

MIN_TEMPERATURE: Final = 1e-5
"""Temperatures below this are greedy; as in vLLM."""

_CANDIDATES: Final = 256  # best tokens looked at first; the rest is sorted only for rows that keep more


class Draws(Protocol):
    """How the tokens of some rows are chosen, on the device; see `StepInputs` for shapes."""

    @property
    def plain(self) -> torch.Tensor:
        """The rows that are drawn from all tokens."""

    @property
    def filtered(self) -> torch.Tensor:
        """The rows that are drawn under top-k, top-p or min-p; those in neither are greedy."""

    @property
    def temperatures(self) -> torch.Tensor:
        """Of all rows."""

    @property
    def top_ps(self) -> torch.Tensor:
        """Of all rows."""

    @property
    def top_ks(self) -> torch.Tensor:
        """Of all rows."""

    @property
    def min_ps(self) -> torch.Tensor:
        """Of all rows."""

    @property
    def uniforms(self) -> torch.Tensor:
        """Of all rows."""


def is_greedy(temperatures: Floats) -> npt.NDArray[np.bool_]:
    """Tell which rows take their best token: bool [rows]."""
    return temperatures < MIN_TEMPERATURE


def is_filtered(top_ps: Floats, top_ks: Ints, min_ps: Floats, *, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Tell in which rows top-k, top-p or min-p may drop a token: bool [rows]."""
    return (top_ps < 1.0) | ((top_ks > 0) & (top_ks < vocab_size)) | (min_ps > 0.0)


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.integer]) -> Floats:
    """Hash (seed, position) to 24-bit uniform numbers: float32 [rows], 0 <= u < 1.

    Two rounds of SplitMix64's finalizer (Steele et al. 2014), over the seed and then the position.
    """
    state = _mix(seeds.astype(np.uint64) + _GOLDEN)
    state = _mix(state + _GOLDEN * positions.astype(np.uint64))
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row; rows that only want their best token cost no more than that.

    Args:
        logits: [samples, vocab], floating point, not changed.
        draws: the step's inputs; of them what concerns samples.

    Returns:
        int64 [samples], a valid token id in any case, and bool [samples]: whether all of the row's logits were finite.
    """
    # A sum is finite if and only if all is; float16 could overflow in it, the others would have to reach 1e33.
    wide = torch.float32 if logits.dtype == torch.float16 else None
    return choose(logits, draws), logits.sum(dim=-1, dtype=wide).isfinite()


def choose(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Choose a token for each row, int64 [rows], never one whose logit is -inf while others are finite."""
    tokens = logits.max(dim=-1).indices  # a quarter of argmax's time on the CPU
    if draws.plain.numel():
        tokens[draws.plain] = _draw_plain(logits, draws)
    if draws.filtered.numel():
        tokens[draws.filtered] = _draw_filtered(logits, draws)
    return tokens


def _draw_plain(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw from all tokens: int64 [rows]."""
    rows = draws.plain
    weights = _scaled(logits[rows], draws.temperatures[rows]).exp_()  # [rows, vocab]
    return _invert(weights, draws.uniforms[rows])


def _draw_filtered(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw under top-k, top-p and min-p: int64 [rows]."""
    rows = draws.filtered
    scaled = _scaled(logits[rows], draws.temperatures[rows])  # [rows, vocab]
    limits = (draws.top_ks[rows], draws.top_ps[rows], draws.min_ps[rows])
    drawn, uniform = torch.empty_like(rows), draws.uniforms[rows]
    left = torch.arange(len(rows), device=rows.device)
    # On the CPU most rows are settled by few candidates; on a GPU to ask which would cost more than to sort.
    vocab = scaled.shape[1]
    widths = (min(_CANDIDATES, vocab), vocab) if rows.device.type == "cpu" else (vocab,)
    for width in widths:
        drawn[left], settled = _draw_among(scaled[left], [limit[left] for limit in limits], uniform[left], width)
        if width == vocab or not (left := left[~settled]).numel():
            break
    return drawn


def _draw_among(
    scaled: torch.Tensor, limits: list[torch.Tensor], uniform: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `width` best tokens: int64 [rows], and bool [rows], whether no token beyond was to be kept."""
    if width < scaled.shape[1]:
        values, ids = scaled.topk(width, dim=-1)  # [rows, width], best first
    else:
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    kept, settled = _kept(scaled, values, limits)
    place = _invert(values.exp() * kept, uniform)
    return ids.gather(1, place.unsqueeze(1)).squeeze(1), settled


def _kept(scaled: torch.Tensor, values: torch.Tensor, limits: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell which of the best tokens stay under top-k, top-p and min-p.

    Args:
        scaled: [rows, vocab], the best at 0.
        values: [rows, width], the best of them, in order.
        limits: top-k, top-p, min-p, [rows] each.

    Returns:
        bool [rows, width], the first ones of each row, and bool [rows]: whether no token beyond is to be kept.
    """
    vocab, width = scaled.shape[1], values.shape[1]
    top_k, top_p, min_p = (limit.unsqueeze(1) for limit in limits)  # [rows, 1]
    top_k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    probabilities = values.exp()  # relative to the best token's
    kept = values >= values.gather(1, (top_k - 1).clamp(max=width - 1))
    complete = (top_k >= vocab) | ~kept[:, -1:]  # whether the mass under top-k is known
    weights = probabilities * kept
    total = torch.where(top_k >= vocab, scaled.exp().sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
    better = weights.cumsum(dim=-1) - weights  # the mass of better tokens
    last = (better < top_p * total).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    kept &= (values >= values.gather(1, last)) & (probabilities >= min_p)
    return kept, (complete & ~kept[:, -1:]).squeeze(1)


def drawn_from(logits: torch.Tensor, draws: Draws, rows: torch.Tensor) -> torch.Tensor:
    """Return the logits that rows are drawn from, up to a shift: float32 [rows, vocab], -inf where nothing is kept.

    Those of greedy rows are as they are.

    Args:
        logits: [all rows, vocab].
        draws: of all rows.
        rows: int64 [rows], the wanted ones.
    """
    found = logits[rows].to(torch.float32)
    drawn = torch.isin(rows, torch.cat([draws.plain, draws.filtered])).unsqueeze(1)
    found = torch.where(drawn, _scaled(found, draws.temperatures[rows]), found)
    (filtered,) = torch.isin(rows, draws.filtered).nonzero(as_tuple=True)
    if filtered.numel():
        scaled = found[filtered]
        values = scaled.sort(dim=-1, descending=True).values
        of = rows[filtered]
        kept, _ = _kept(scaled, values, [draws.top_ks[of], draws.top_ps[of], draws.min_ps[of]])
        least = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
        found[filtered] = scaled.masked_fill_(scaled < least, -torch.inf)
    return found


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Find tokens' logprobs and ranks, and the likeliest tokens' ids and logprobs: float64 [rows, 2 + 2 * most].

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows].
        most: how many of the likeliest.
    """
    chosen = logits.gather(1, tokens.unsqueeze(1))  # [rows, 1]
    total = logits.logsumexp(dim=-1, keepdim=True)
    values, ids = logits.topk(most, dim=-1)
    parts = (chosen - total, 1 + (logits > chosen).sum(dim=-1, keepdim=True), ids, values - total)
    return torch.cat([part.to(torch.float64) for part in parts], dim=1)


def _scaled(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return logits less their maximum, over the temperature: float32 [rows, vocab], a new tensor."""
    scaled = logits.to(torch.float32)
    return (scaled - scaled.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return where each row's uniform number falls in its weights: int64 [rows], never where a weight is 0."""
    cumulative = weights.cumsum(dim=-1)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return place.clamp_(max=weights.shape[1] - 1)  # not a number: anything that is a token
