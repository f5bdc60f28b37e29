"""How a row's token is chosen from its logits.

`uniforms` runs on the engine thread, `sample` on the device. Owns nothing. Invariant: a row's token depends on its
own logits, settings, seed and position only; never on the rows beside it, nor on a generator's state.

The rules, in transformers' and vLLM's order, all in float32 after subtracting the maximum:

- temperature first; below `MIN_TEMPERATURE` the row is greedy: its best token, of equal ones the lowest id;
- top-k keeps the k best tokens, and all that are equal to the k-th;
- top-p keeps the fewest best of what is left whose probabilities, renormalised over what is left, reach p, and all
  that are equal to the last of them; at least one token (so 0 keeps the best);
- min-p keeps what is at least this share of the best token's probability.

The token is where a uniform number, hashed from (seed, position), falls in the cumulative sum of what was kept, in the
vocabulary's order. (The kernel for GPUs draws by other numbers, likewise of seed and position alone.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional

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
    "rows_at_once",
    "sample",
    "score_tokens",
    "uniforms",
]

MIN_TEMPERATURE: Final = 1e-5
"""Temperatures below this are greedy; as in vLLM."""

# On the CPU:
_CANDIDATES: Final = 512  # best tokens looked at first; the rest is sorted only for rows that keep more
_BLOCK: Final = 128  # tokens summed up at once to find where a draw falls
_ROWS_AT_ONCE: Final = 8  # of 50,000 float32 are 1.6 MB, about what a core's second cache holds


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


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.integer], *, attempt: int = 0) -> Floats:
    """Hash (seed, position) to 24-bit uniform numbers: float32 [rows], 0 <= u < 1; other ones for each attempt.

    Rounds of SplitMix64's finalizer (Steele et al. 2014), over the seed, the position and attempts but the first.
    """
    state = _mix(seeds.astype(np.uint64) + _GOLDEN)
    state = _mix(state + _GOLDEN * positions.astype(np.uint64))
    if attempt:
        state = _mix(state + _GOLDEN * np.full_like(state, attempt))
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
    if len(draws.plain) + len(draws.filtered) == len(logits):
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    else:
        tokens = _best(logits)
    for rows in rows_at_once(draws.plain):
        tokens[rows] = _draw(_weights(_scaled(logits, draws, rows)), draws.uniforms[rows])
    for rows in rows_at_once(draws.filtered):
        scaled = _scaled(logits, draws, rows)
        weights = _weights(scaled.clone())
        tokens[rows] = _draw(_fill(weights, _dropped(scaled, weights, draws, rows), 0.0), draws.uniforms[rows])
    return tokens


def rows_at_once(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split rows, or what has one row each, into as many as the CPU's cache holds; a GPU takes all at once."""
    if not len(rows):
        return ()
    return rows.split(_ROWS_AT_ONCE) if rows.device.type == "cpu" else (rows,)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """Find each row's best token, of equal ones the lowest id: int64 [rows]."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1).indices
    # numpy's argmax takes a tenth of torch's time
    best = [part.to(torch.float32).numpy().argmax(axis=-1) for part in rows_at_once(logits)]
    return torch.from_numpy(np.concatenate(best, dtype=np.int64))


def _scaled(logits: torch.Tensor, draws: Draws, rows: torch.Tensor) -> torch.Tensor:
    """Return rows' logits less their maximum, over the temperature: float32 [rows, vocab], a new tensor."""
    scaled = logits.index_select(0, rows).to(torch.float32)
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= draws.temperatures[rows].unsqueeze(1)
    return scaled


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """Return probabilities relative to the best token's, in place of `scaled`; 0 where they are below 1e-37.

    On the CPU `exp` takes ten times as long where it gives 0 or numbers near it, and masked rows have many.
    """
    return torch.threshold_(scaled.clamp_(min=-87.0).exp_(), 1e-37, 0.0)


def _dropped(scaled: torch.Tensor, weights: torch.Tensor, draws: Draws, rows: torch.Tensor) -> torch.Tensor:
    """Tell which tokens top-k, top-p and min-p drop: bool [rows, vocab]."""
    limits = _Limits(
        draws.top_ks[rows, None], draws.top_ps[rows, None], draws.min_ps[rows, None], weights.sum(dim=-1, keepdim=True)
    )
    if scaled.device.type == "cpu":  # to compare takes numpy a tenth of torch's time
        return torch.from_numpy(scaled.numpy() < _least_on_cpu(scaled, limits).numpy())
    return scaled < _least_kept(scaled.sort(dim=-1, descending=True).values, limits, vocab_size=scaled.shape[1])[0]


def _fill(values: torch.Tensor, where: torch.Tensor, value: float) -> torch.Tensor:
    """Set values in place, and return them."""
    if values.device.type == "cpu":  # a third of masked_fill_'s time
        np.copyto(values.numpy(), value, where=where.numpy())
        return values
    return values.masked_fill_(where, value)


class _Limits(NamedTuple):
    """What rows are filtered by, [rows, 1] each, and the sum of all of a row's weights."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    total: torch.Tensor


def _least_on_cpu(scaled: torch.Tensor, limits: _Limits) -> torch.Tensor:
    """Find the least logit that is kept, [rows, 1]: few candidates do for most rows, and numpy finds them fastest."""
    vocab = scaled.shape[1]
    few = min(_CANDIDATES, vocab)
    best = np.sort(np.partition(scaled.numpy(), vocab - few)[:, vocab - few :])
    least, settled = _least_kept(torch.from_numpy(best).flip(-1), limits, vocab_size=vocab)
    (rest,) = (~settled).nonzero(as_tuple=True)
    if rest.numel() and few < vocab:
        every = torch.from_numpy(np.sort(scaled[rest].numpy())).flip(-1)
        least[rest] = _least_kept(every, _Limits(*(limit[rest] for limit in limits)), vocab_size=vocab)[0]
    return least


def _least_kept(values: torch.Tensor, limits: _Limits, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the least logit that stays under top-k, top-p and min-p.

    Args:
        values: [rows, width], the best of each row's logits, in order, the first at 0.
        limits: of the rows.
        vocab_size: how many logits a row has.

    Returns:
        float32 [rows, 1], and bool [rows]: whether it is certain, as no logit beyond `values` is to be kept.
    """
    top_k = torch.where((limits.top_k > 0) & (limits.top_k < vocab_size), limits.top_k, vocab_size)
    probabilities = values.exp()  # relative to the best token's
    kept = values >= values.gather(1, (top_k - 1).clamp(max=values.shape[1] - 1))
    complete = (top_k >= vocab_size) | ~kept[:, -1:]  # whether the mass under top-k is known
    weights = probabilities * kept
    total = torch.where(top_k >= vocab_size, limits.total, weights.sum(dim=-1, keepdim=True))
    better = weights.cumsum(dim=-1) - weights  # the mass of better tokens
    last = (better < limits.top_p * total).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    kept &= (values >= values.gather(1, last)) & (probabilities >= limits.min_p)
    least = values.gather(1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    return least, (complete & ~kept[:, -1:]).squeeze(1)


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return where each row's uniform number falls in its weights: int64 [rows], never where a weight is 0.

    Sums of blocks tell the block: only one is summed up token by token. In float64, since a GPU's running sums may go
    down by rounding, and a number could fall on a weight of 0 then; those of a uniform number of 24 bits cannot.
    """
    missing = -weights.shape[1] % _BLOCK
    blocks = (functional.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1)  # [rows, blocks]
    ends = sums.cumsum(dim=-1, dtype=torch.float64)
    target = uniform.unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)  # [rows, 1]
    chosen = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1)  # [rows, _BLOCK]
    inside = chosen.cumsum(dim=-1, dtype=torch.float64)
    rest = (target - (ends - sums).gather(1, block)).clamp_(min=0.0)
    # Sums in another order may differ by rounding: the place is inside of the block in any case.
    rest = torch.minimum(rest, inside[:, -1:].nextafter(torch.zeros_like(rest)))
    place = block * _BLOCK + torch.searchsorted(inside, rest, right=True)
    return place.squeeze(1).clamp_(max=weights.shape[1] - 1)  # not a number: anything that is a token


def drawn_from(logits: torch.Tensor, draws: Draws, rows: torch.Tensor) -> torch.Tensor:
    """Return the logits that rows are drawn from, up to a shift: float32 [rows, vocab], -inf where nothing is kept.

    Those of greedy rows are as they are.

    Args:
        logits: [all rows, vocab].
        draws: of all rows.
        rows: int64 [rows], the wanted ones.
    """
    found = logits.index_select(0, rows).to(torch.float32)
    for kind in (draws.plain, draws.filtered):
        if kind.numel():
            (drawn,) = torch.isin(rows, kind).nonzero(as_tuple=True)
            for part in rows_at_once(drawn):
                scaled = _scaled(logits, draws, rows[part])
                if kind is draws.filtered:
                    _fill(scaled, _dropped(scaled, _weights(scaled.clone()), draws, rows[part]), -torch.inf)
                found[part] = scaled
    return found


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Find tokens' logprobs and ranks, and the likeliest tokens' ids and logprobs: float64 [rows, 2 + 2 * most].

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows].
        most: how many of the likeliest.
    """
    scores = [_scores(*part, most) for part in zip(rows_at_once(logits), rows_at_once(tokens), strict=True)]
    return torch.cat(scores)


def _scores(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    chosen = tokens.unsqueeze(1)  # [rows, 1]
    logprobs = logits.log_softmax(dim=-1)
    ids = logits.topk(most, dim=-1).indices
    parts = (logprobs.gather(1, chosen), _ranks(logits, logits.gather(1, chosen)), ids, logprobs.gather(1, ids))
    return torch.cat([part.to(torch.float64) for part in parts], dim=1)


def _ranks(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # to compare takes numpy a tenth of torch's time
        return torch.from_numpy(1 + np.count_nonzero(logits.numpy() > chosen.numpy(), axis=-1, keepdims=True))
    return 1 + (logits > chosen).sum(dim=-1, keepdim=True)
