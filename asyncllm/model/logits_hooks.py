"""Callers' functions that change the logits of their row, and what follows them: the draw, on the host.

Runs on the engine thread; owns nothing. Invariant: a hook that raises, or returns what is no row of logits, fails its
own row alone; from its logits on, a row's token is chosen by the rules and the uniform number of all others.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncllm.model.sampler import choose, drawn_from, is_filtered, is_greedy, score_tokens

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.request import LogitOptions
    from asyncllm.scheduler.batch import Ints

__all__ = ["Draw", "HookedRow"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row is drawn; as `RowSampling`, with its uniform number."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    uniform: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OneRow:
    """The `Draws` of one row."""

    plain: torch.Tensor
    filtered: torch.Tensor
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    uniforms: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HookedRow:
    """A row whose token the host chooses.

    Args:
        sample: its place among the step's samples.
        tokens: int32, all of its tokens so far.
        options: with its hook.
        draw: how its token is drawn.
    """

    sample: int
    tokens: Ints
    options: LogitOptions
    draw: Draw

    def choose(self, raw: torch.Tensor, edited: torch.Tensor) -> tuple[int, list[float] | None]:
        """Call the hook, then choose the token.

        Args:
            raw: float32 [vocab], the model's logits.
            edited: float32 [vocab], after all options before the hook; may be changed.

        Returns:
            The token, and its row of `score_tokens`, if it is asked for.

        Raises:
            Exception: what the hook raises, or what is wrong with its logits.
        """
        if self.options.hook is None:
            raise ValueError("the row has no hook")
        changed = self.options.hook(self.tokens.tolist(), edited)
        logits = _checked(edited if changed is None else changed, len(edited)).unsqueeze(0)  # [1, vocab]
        draws = self._draws(len(edited))
        token = choose(logits, draws)
        if self.options.logprobs is None:
            return int(token), None
        told = drawn_from(logits, draws, torch.zeros_like(token)) if self.options.processed_logprobs else raw[None]
        scores: list[float] = score_tokens(told, token, self.options.logprobs)[0].tolist()
        return int(token), scores

    def choose_from(self, logits: npt.NDArray[np.float32]) -> int:
        """Do the same with logits [vocab] that nobody else needs, without their scores."""
        edited = torch.from_numpy(logits)
        return self.choose(edited, edited)[0]

    def _draws(self, vocab_size: int) -> _OneRow:
        draw = self.draw
        temperature, top_p, min_p = (
            np.array([x], dtype=np.float32) for x in (draw.temperature, draw.top_p, draw.min_p)
        )
        top_k = np.array([draw.top_k], dtype=np.int32)
        greedy = is_greedy(temperature)
        filtered = is_filtered(top_p, top_k, min_p, vocab_size=vocab_size)
        return _OneRow(
            plain=torch.from_numpy(np.flatnonzero(~greedy & ~filtered)),
            filtered=torch.from_numpy(np.flatnonzero(~greedy & filtered)),
            temperatures=torch.from_numpy(temperature),
            top_ps=torch.from_numpy(top_p),
            top_ks=torch.from_numpy(top_k.astype(np.int64)),
            min_ps=torch.from_numpy(min_p),
            uniforms=torch.tensor([draw.uniform], dtype=torch.float32, device="cpu"),
        )


def _checked(logits: object, vocab_size: int) -> torch.Tensor:
    """Return a hook's logits as float32 [vocab] on the CPU.

    Raises:
        TypeError, ValueError: they are none.
    """
    if not isinstance(logits, torch.Tensor | np.ndarray):
        raise TypeError(f"a logits hook returns a tensor or None, not {type(logits).__name__}")
    tensor = torch.as_tensor(logits).detach().to(device="cpu", dtype=torch.float32)
    if tensor.shape != (vocab_size,):
        raise ValueError(f"a logits hook returns {vocab_size} logits, not a tensor of shape {tuple(tensor.shape)}")
    if not tensor.amax().isfinite():  # not a number anywhere, +inf anywhere, or -inf everywhere
        raise ValueError("a logits hook left no token to choose, or logits that are +inf or not numbers")
    return tensor
