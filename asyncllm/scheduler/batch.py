"""The frozen value in which the scheduler and the model meet, and what comes back.

Runs anywhere; owns nothing. Invariant: a `Batch` is never changed after it is made, so that a device may read
it as late as it likes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncllm.outputs import TokenLogprob
    from asyncllm.request import LogitOptions

__all__ = ["SAMPLED_LAST_STEP", "Batch", "PromptScores", "StepResult"]

SAMPLED_LAST_STEP: Final = -1
"""A token id that means: the token that this row's slot sampled last, which only the device knows yet."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """What is to be told of the prompt tokens that follow a row's query tokens.

    Args:
        targets: int32 [<= the row's query tokens]: the tokens after its first, second, ... query token.
        logprobs: how many of the likeliest tokens beside each.
    """

    targets: Ints
    logprobs: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One ragged step: rows of one or more query tokens each.

    Before anything else the device applies `table_writes`, then `page_copies`; both columns of each are distinct.

    Args:
        index: the step's number.
        slots: int32 [rows], each row's line in the page table; distinct.
        starts: int32 [rows], position of each row's first query token (= tokens of KV present before the step).
        query_lens: int32 [rows], >= 1.
        token_ids: int32 [sum of query_lens], row after row; `SAMPLED_LAST_STEP` where the device has the token.
        sample_rows: int32 [samples], the rows (ascending) whose last query token is sampled from.
        temperatures: float32 [samples]; 0 is greedy.
        top_ps: float32 [samples]; 1 is off.
        top_ks: int32 [samples]; 0 is off.
        min_ps: float32 [samples]; 0 is off.
        seeds: int64 [samples].
        table_writes: int32 [3, writes]: slots, columns, pages; no cell twice.
        page_copies: int32 [2, copies]: source and target pages, copied whole, in every layer.
        masks: for samples (places in `sample_rows`) that may be some tokens only: int32 [up to ceil(vocab / 32)],
            token i allowed where bit i % 32 of word i // 32 is set, none past its end. Applied to the logits before
            anything else.
        options: for samples that ask for more than temperature and filters: what.
        histories: for samples with options that look back: int32, all tokens of the row's sequence, where the device
            may not have them: at the request's first sample since it got its slot, or got it to itself again; and
            for samples whose token the host chooses (by a hook), always.
        prompt_scores: for rows (places in `slots`) whose prompt's logprobs are asked for.
        steady: steps with the same number have the same rows, each with one token that only the device knows, and
            differ in `index`, `table_writes`, `page_copies` and `starts` alone; each start is one more in every step
            that is built, with the number or without. None: nobody knows.
    """

    index: int
    slots: Ints
    starts: Ints
    query_lens: Ints
    token_ids: Ints
    sample_rows: Ints
    temperatures: Floats
    top_ps: Floats
    top_ks: Ints
    min_ps: Floats
    seeds: npt.NDArray[np.int64]
    table_writes: Ints
    page_copies: Ints
    masks: Mapping[int, Ints] = dataclasses.field(default_factory=dict)
    options: Mapping[int, LogitOptions] = dataclasses.field(default_factory=dict)
    histories: Mapping[int, Ints] = dataclasses.field(default_factory=dict)
    prompt_scores: Mapping[int, PromptScores] = dataclasses.field(default_factory=dict)
    steady: int | None = None

    @property
    def asking(self) -> list[int]:
        """The samples with a mask or options, ascending; few steps have any."""
        return sorted(self.masks.keys() | self.options.keys())

    @property
    def edited(self) -> list[int]:
        """Those of them whose tokens are not chosen from the model's logits as they are."""
        return sorted(self.masks.keys() | {sample for sample, asked in self.options.items() if asked.edits})

    @property
    def rows(self) -> int:
        """How many requests are in the step."""
        return len(self.slots)

    @property
    def query_tokens(self) -> int:
        """How many tokens the step computes."""
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step sampled, as plain integers.

    Args:
        index: the step's number.
        token_ids: one for each of `Batch.sample_rows`, in that order.
        finite: False where that row's logits were not finite, or its options left no token (its token means nothing
            then).
        logprobs: by sample, where asked for.
        prompt_logprobs: by row, one for each of `PromptScores.targets`.
        failures: by sample, what a hook raised; the token means nothing then.
    """

    index: int
    token_ids: tuple[int, ...]
    finite: tuple[bool, ...]
    logprobs: Mapping[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = dataclasses.field(default_factory=dict)
    failures: Mapping[int, BaseException] = dataclasses.field(default_factory=dict)
