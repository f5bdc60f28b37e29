"""What a step found out for rows that ask for more than a token: logprobs, on their way back to the host.

Made on the engine thread with the step, filled on the device, read on the engine thread once the step is done.
Invariant: of the vocabulary nothing comes to the host but the tokens that were asked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from asyncllm.outputs import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from asyncllm.backend import LaunchedStep
    from asyncllm.scheduler.batch import PromptScores, StepResult

__all__ = ["OptionOutcome", "OptionStep"]


class OptionOutcome:
    """Take what the device finds out, and tell it with the step's result.

    Args:
        samples: the samples whose logprobs are asked for, each with the number of likeliest tokens, in the order in
            which the device puts them.
        prompts: what is asked of prompts, by row; they follow the samples.

    Attributes:
        scores: float64 [asked for, 2 + 2 * most]: logprob, rank, then ids and then logprobs of the likeliest tokens.
            Set by the step; on the host, right once the step is done. (float64 holds ids and ranks exactly.)
    """

    __slots__ = ("_prompts", "_samples", "scores")

    def __init__(self, *, samples: Sequence[tuple[int, int]], prompts: Mapping[int, PromptScores]) -> None:
        self._samples = samples
        self._prompts = prompts
        self.scores: torch.Tensor | None = None

    @property
    def most(self) -> int:
        """How many of the likeliest tokens the device finds for each."""
        return max((*(top for _, top in self._samples), *(each.logprobs for each in self._prompts.values())), default=0)

    def complete(self, result: StepResult) -> StepResult:
        """Return the result with what was asked for."""
        if self.scores is None:
            return result
        rows = iter(self.scores.tolist())
        logprobs = {sample: self._logprob(result.token_ids[sample], next(rows), top) for sample, top in self._samples}
        prompt_logprobs = {
            row: tuple(self._logprob(target, next(rows), scores.logprobs) for target in scores.targets.tolist())
            for row, scores in self._prompts.items()
        }
        return dataclasses.replace(result, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _logprob(self, token_id: int, scores: list[float], top: int) -> TokenLogprob:
        ids, logprobs = scores[2 : 2 + top], scores[2 + self.most :]
        return TokenLogprob(
            id=token_id,
            logprob=scores[0],
            rank=int(scores[1]),
            top=tuple(zip(map(int, ids), logprobs, strict=False)),
        )


class OptionStep:
    """A `LaunchedStep` in which rows ask for more than a token.

    Args:
        step: as the device runs it.
        outcome: what it finds out beside tokens.
    """

    __slots__ = ("_outcome", "_step")

    def __init__(self, step: LaunchedStep, outcome: OptionOutcome) -> None:
        self._step = step
        self._outcome = outcome

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._step.done()

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        """See `LaunchedStep`."""
        return self._step.call_when_done(callback)

    def wait(self) -> None:
        """Block until the step is done."""
        self._step.wait()

    def result(self) -> StepResult:
        """Return what was sampled, with what was asked for. Blocks until done."""
        return self._outcome.complete(self._step.result())
