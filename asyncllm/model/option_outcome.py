"""What a step found out for rows that ask for more than a token, on its way back: logprobs, logits for hooks.

Made on the engine thread with the step, filled on the device, read on the engine thread once the step is done.
Invariant: but for rows with a hook, nothing of the vocabulary comes to the host but the tokens that were asked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from asyncllm.outputs import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from asyncllm.backend import LaunchedStep
    from asyncllm.model.logits_hooks import HookedRow
    from asyncllm.scheduler.batch import PromptScores, StepResult

__all__ = ["OptionOutcome", "OptionStep", "Outcome", "read_logprob"]


class Outcome(Protocol):
    """What rows ask for beside tokens."""

    def complete(self, result: StepResult) -> StepResult:
        """Return the result with it; called once, on the engine thread."""


class OptionOutcome:
    """Take what the device finds out, and tell it with the step's result.

    Args:
        samples: the samples whose logprobs are asked for, each with the number of likeliest tokens, in the order in
            which the device puts them.
        prompts: what is asked of prompts, by row; they follow the samples.
        hooked: the rows with a hook, in the order in which the device puts them.

    Attributes:
        scores: float64 [asked for, 2 + 2 * most]: logprob, rank, then ids and then logprobs of the likeliest tokens.
            Set by the step; on the host, right once the step is done. (float64 holds ids and ranks exactly.)
        hook_logits: float32 [2, hooked, vocab]: the model's, and those for the hook. Set likewise.
    """

    __slots__ = ("_hooked", "_prompts", "_samples", "hook_logits", "scores")

    def __init__(
        self,
        *,
        samples: Sequence[tuple[int, int]],
        prompts: Mapping[int, PromptScores],
        hooked: Sequence[HookedRow] = (),
    ) -> None:
        self._samples = samples
        self._prompts = prompts
        self._hooked = hooked
        self.scores: torch.Tensor | None = None
        self.hook_logits: torch.Tensor | None = None

    @property
    def scores_prompts(self) -> bool:
        """Whether anything of prompts is asked for."""
        return bool(self._prompts)

    @property
    def most(self) -> int:
        """How many of the likeliest tokens the device finds for each."""
        return max((*(top for _, top in self._samples), *(each.logprobs for each in self._prompts.values())), default=0)

    def complete(self, result: StepResult) -> StepResult:
        """Return the result with what was asked for; calls the hooks, so once."""
        if self.scores is not None:
            result = self._with_logprobs(result, iter(self.scores.tolist()))
        if self.hook_logits is not None:
            result = self._with_hooks(result, *self.hook_logits.clone())  # outside of inference mode: may be changed
        return result

    def _with_logprobs(self, result: StepResult, rows: Iterator[list[float]]) -> StepResult:
        most = self.most
        logprobs = {sample: read_logprob(result.token_ids[sample], next(rows), most, k) for sample, k in self._samples}
        prompt_logprobs = {
            row: tuple(read_logprob(target, next(rows), most, scores.logprobs) for target in scores.targets.tolist())
            for row, scores in self._prompts.items()
        }
        return dataclasses.replace(result, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _with_hooks(self, result: StepResult, raw: torch.Tensor, edited: torch.Tensor) -> StepResult:
        token_ids, logprobs, failures = list(result.token_ids), dict(result.logprobs), dict(result.failures)
        for row, (raw_row, edited_row) in zip(self._hooked, zip(raw, edited, strict=True), strict=True):
            if not result.finite[row.sample]:
                continue
            try:
                token_id, scores = row.choose(raw_row, edited_row)
            except BaseException as error:  # noqa: BLE001 - a caller's function: its own request fails
                failures[row.sample] = error
                continue
            token_ids[row.sample] = token_id
            if scores is not None:
                count = row.options.logprobs or 0
                logprobs[row.sample] = read_logprob(token_id, scores, count, count)
        return dataclasses.replace(result, token_ids=tuple(token_ids), logprobs=logprobs, failures=failures)


def read_logprob(token_id: int, scores: Sequence[float], most: int, count: int) -> TokenLogprob:
    """Read one row of scores that has `most` likeliest tokens, of which `count` are wanted."""
    ids, logprobs = scores[2 : 2 + count], scores[2 + most : 2 + most + count]
    return TokenLogprob(
        id=token_id,
        logprob=scores[0],
        rank=int(scores[1]),
        top=tuple(zip(map(int, ids), logprobs, strict=True)),
    )


class OptionStep:
    """A `LaunchedStep` in which rows ask for more than a token.

    Args:
        step: as the device runs it.
        outcome: what it finds out beside tokens.
    """

    __slots__ = ("_outcome", "_result", "_step")

    def __init__(self, step: LaunchedStep, outcome: Outcome) -> None:
        self._result: StepResult | None = None
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
        """Return what was sampled, with what was asked for; the first call calls hooks. Blocks until done."""
        if self._result is None:
            self._result = self._outcome.complete(self._step.result())
        return self._result
