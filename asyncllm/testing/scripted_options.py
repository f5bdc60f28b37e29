"""What a scripted model makes of sampling options: its own token is as good as certain.

Made on the engine thread with a step; filled on the scripted device's thread, read on the engine thread. Invariant:
a token that may not be chosen is not chosen; penalties and biases (but those that ban) change nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncllm.outputs import TokenLogprob
from asyncllm.testing import vocabulary

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.request import LogitOptions
    from asyncllm.scheduler.batch import Batch, StepResult
    from asyncllm.testing.paged_tokens import Ints

__all__ = ["ScriptedOptions"]

_CLOSING: Final = b'"}]'
_UNLIKELY: Final = -100.0  # what a hook sees for tokens that may be chosen and are not the script's


class ScriptedOptions:
    """Choose the tokens of a step's asking rows, and tell what is asked about them.

    Of tokens and prompts it tells that they are certain: logprob 0, and -inf for all others.

    Args:
        batch: the step.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._script_tokens: list[int] = []

    def choose(self, tokens: Ints) -> Ints:
        """Return what the samples take instead of the script's tokens: int64 [samples]; -1 where nothing is left."""
        self._script_tokens = tokens.tolist()
        chosen = tokens.copy()
        for sample in self._batch.asking:
            chosen[sample] = _nearest(int(tokens[sample]), np.flatnonzero(self._allowed(sample)).tolist())
        return chosen

    def complete(self, result: StepResult) -> StepResult:
        """Return the result with logprobs, and with the tokens that hooks choose."""
        batch, token_ids, failures = self._batch, list(result.token_ids), dict(result.failures)
        for sample, options in batch.options.items():
            if options.hook is not None and result.finite[sample]:
                try:
                    token_ids[sample] = self._hooked(sample, options)
                except Exception as error:  # noqa: BLE001 - a caller's function: its own request fails
                    failures[sample] = error
        logprobs = {
            sample: _certain(
                token_ids[sample],
                token_ids[sample] if options.processed_logprobs else self._script_tokens[sample],
                options.logprobs,
            )
            for sample, options in batch.options.items()
            if options.logprobs is not None
        }
        prompt_logprobs = {
            row: tuple(_certain(target, target, scores.logprobs) for target in scores.targets.tolist())
            for row, scores in batch.prompt_scores.items()
        }
        return dataclasses.replace(
            result,
            token_ids=tuple(token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failures=failures,
        )

    def _allowed(self, sample: int) -> npt.NDArray[np.bool_]:
        batch, options = self._batch, self._batch.options.get(sample)
        allowed = np.ones(vocabulary.VOCAB_SIZE, dtype=np.bool_)
        for mask in (batch.masks.get(sample), None if options is None else options.mask):
            if mask is not None:
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(allowed)]
                allowed &= np.pad(bits, (0, len(allowed) - len(bits))).astype(np.bool_)
        if options is not None:
            if options.allowed_ids is not None:
                allowed &= np.isin(np.arange(len(allowed)), options.allowed_ids)
            allowed[options.bias_ids[options.biases == -np.inf]] = False
            row = batch.sample_rows[sample]
            if batch.starts[row] + batch.query_lens[row] < options.first_end:
                allowed[options.late_ids] = False
        return allowed

    def _hooked(self, sample: int, options: LogitOptions) -> int:
        from asyncllm.model.logits_hooks import Draw, HookedRow  # noqa: PLC0415 - loads torch

        allowed = self._allowed(sample)
        logits = np.where(allowed, np.float32(_UNLIKELY), np.float32(-np.inf))
        logits[_nearest(self._script_tokens[sample], np.flatnonzero(allowed).tolist())] = 0.0
        greedy = Draw(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, uniform=0.0)
        row = HookedRow(sample=sample, tokens=self._batch.histories[sample], options=options, draw=greedy)
        return row.choose_from(logits)


def _nearest(token: int, allowed: list[int]) -> int:
    """Return a token that is allowed: the wanted one, else one that brings an end, else the next one there is."""
    for wanted in (token, vocabulary.EOS_TOKEN_ID, *_CLOSING):
        if wanted in allowed:
            return int(wanted)
    after = [other for other in allowed if other > token] or [other for other in allowed if other > ord(" ")]
    return (after or allowed or [-1])[0]


def _certain(token_id: int, certain: int, count: int) -> TokenLogprob:
    """Tell of a token where one is certain."""
    others = (other for other in range(vocabulary.VOCAB_SIZE) if other != certain)
    likeliest = [(certain, 0.0), *((other, -math.inf) for other, _ in zip(others, range(count), strict=False))]
    same = token_id == certain
    return TokenLogprob(
        id=token_id, logprob=0.0 if same else -math.inf, rank=1 if same else 2, top=tuple(likeliest[:count])
    )
