"""The values that the scheduler and the engine loop exchange.

Runs anywhere; owns nothing. Invariant: a value that exists is consistent and is never changed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from asyncllm.config import check_step_budget

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncllm.kv.cache_manager import RequestPages
    from asyncllm.outputs import StepRecord
    from asyncllm.request import Request
    from asyncllm.scheduler.batch import Batch

__all__ = ["PromptChunk", "ScheduledStep", "SchedulingPolicy", "Verdict"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """Bounds within which the scheduler fills steps.

    Args:
        max_running_requests: most requests that hold a slot.
        step_token_budget: most tokens of a step.
        min_prefill_chunk: tokens that the oldest prompt gets in each step, unless less of it is left.
        share_inflight_prefixes: let a request wait for another that computes the prefix both have, where the cache
            shares prefixes at all.

    Raises:
        ConfigurationError: decoding requests could leave no room for prompts.
    """

    max_running_requests: int
    step_token_budget: int
    min_prefill_chunk: int
    share_inflight_prefixes: bool

    def __post_init__(self) -> None:
        check_step_budget(self.step_token_budget, self.max_running_requests, self.min_prefill_chunk)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Part of a prompt that a step computes.

    Args:
        request: whose prompt.
        pages: its KV.
        start: position of the first token.
        token_ids: int32 [tokens], >= 1 of them.
        last: the prompt ends here: the request samples its next token.
    """

    request: Request
    pages: RequestPages
    start: int
    token_ids: npt.NDArray[np.int32]
    last: bool

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """A step to launch.

    Args:
        batch: what the device runs.
        rows: the requests in it, in row order.
        sampled: those that sample a token, in the order of `batch.sample_rows`.
        chunks: the prompts' parts in it, whose rows follow those of the decoding requests.
        record: what a step listener gets.
    """

    batch: Batch
    rows: tuple[Request, ...]
    sampled: tuple[Request, ...]
    chunks: tuple[PromptChunk, ...]
    record: StepRecord


class Verdict(NamedTuple):
    """What became of a row's sampled token. A named tuple: one is made per row and step.

    Args:
        token_id: the token.
        ends: the request ends with it (by whatever rule: the scheduler sees no text).
    """

    token_id: int
    ends: bool
