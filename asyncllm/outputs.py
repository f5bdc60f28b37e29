"""The values that callers get: tokens, completions, statistics, step records.

Runs anywhere; owns nothing. Invariant: all of these are frozen and hold plain Python values only, so that
they can be kept, compared, pickled and sent between threads.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Literal, NamedTuple

__all__ = [
    "Completion",
    "EngineState",
    "EngineStats",
    "FinishReason",
    "StepKind",
    "StepRecord",
    "Timing",
    "Token",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]

FinishReason = Literal["stop", "length", "aborted", "timeout"]
StepKind = Literal["prefill", "decode", "mixed"]


class EngineState(enum.Enum):
    """Where an engine is in its life."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Count a request's tokens.

    Args:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        completion_tokens: tokens generated, the one that ended the request included.
        max_tokens: the limit that applied, resolved.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Say where a request's time went, in seconds; None where it did not come that far."""

    queued_seconds: float | None
    ttft_seconds: float | None
    itl_mean_seconds: float | None
    itl_max_seconds: float | None
    total_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely one token was, and which were likeliest in its place.

    Args:
        id: the token's id.
        logprob: natural logarithm of its probability.
        rank: 1 + how many tokens were likelier.
        top: `(id, logprob)` of the likeliest tokens, best first; as many as were asked for. -inf for tokens that
            could not be chosen ("processed" mode).
    """

    id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model wants to be called.

    Args:
        id: of this call, different from those of other requests; some templates want it with the result.
        name: the function's.
        arguments: by name, as the model wrote them; not checked against the function's schema.
    """

    id: str
    name: str
    arguments: dict[str, object]

    def message(self, result: object) -> dict[str, object]:
        """Return the message that tells the model the function's result: a text, or a value that becomes JSON."""
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": content}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A part of a function call, as a stream yields it.

    A call that never becomes complete, or is no JSON in the end, is none of the completion's `tool_calls`.

    Args:
        index: which call of the answer, from 0.
        name: the function's, in the first part of each call.
        arguments: the next part of the arguments' JSON.
    """

    index: int
    name: str | None
    arguments: str


class Token(NamedTuple):
    """One generated token, as a stream yields it. A named tuple, since the engine makes one per request and step.

    Args:
        text: the text that became certain with this token; may be empty, may be more than its own.
        id: the token's id.
        index: its place in the completion, from 0.
        logprob: natural logarithm of its probability, where `logprobs` was asked for.
        top_logprobs: `(id, logprob)` of the likeliest tokens in its place, best first, as many as were asked for.
        finish_reason: None, but on the last token "stop" or "length".
        usage: None, but on the last token the request's counts.
        content: in a chat with tools, the text that is not part of a function call; else `text`.
        tool_calls: in a chat with tools, the parts of function calls that came with this token.
    """

    text: str
    id: int
    index: int  # type: ignore[assignment]  # not the method of tuples: nobody looks for a token's place in itself
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer.

    Args:
        request_id: the request's id.
        text: the text, cut before a stop text unless `include_stop`.
        token_ids: all generated ids, those of a stop text included.
        finish_reason: "stop", "length", "aborted" or "timeout".
        stop_reason: the stop text, or the id from `stop_token_ids`, that ended it; None for an end-of-sequence id.
        usage: token counts.
        timing: seconds.
        content: in a chat with tools, the text that is not part of a function call; else `text`.
        tool_calls: in a chat with tools, the function calls in the text.
        seed: the seed of its draws, given or drawn: asked for with it, the same tokens are drawn again.
        logprobs: one for each of `token_ids`, where `logprobs` was asked for.
        prompt_logprobs: one for each token of the prompt (of those computed, if it ended earlier), None for the
            first, where `prompt_logprobs` was asked for.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    seed: int
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine looks like after its last step; free + owned + cached = total pages.

    Args:
        state: where the engine is in its life.
        waiting: requests submitted and not admitted.
        running: requests that hold a slot, paused ones included.
        paused: running requests whose reader stopped.
        parked: requests whose reader stopped for so long that others got their pages; neither running nor waiting.
        total_pages, free_pages, owned_pages, cached_pages: KV pages; cached ones include the leased.
        leased_pages: cached pages that a live request leases.
        prefix_hit_tokens: prompt tokens answered by the prefix cache, since the start.
        prompt_tokens: prompt tokens computed, since the start.
        generated_tokens: tokens committed, since the start.
        steps: steps committed, since the start.
        preemptions: requests preempted or parked, since the start.
        last_step_age_seconds: since the last step was committed; None before the first.
    """

    state: EngineState
    waiting: int = 0
    running: int = 0
    paused: int = 0
    parked: int = 0
    total_pages: int = 0
    free_pages: int = 0
    owned_pages: int = 0
    cached_pages: int = 0
    leased_pages: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    last_step_age_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, as a listener gets it.

    Args:
        index: the step's number, from 0.
        kind: "prefill" (prompts only), "decode" (one token of each request only) or "mixed".
        request_ids: the requests in it, in row order.
        query_tokens: tokens computed.
        waiting: requests waiting while it runs.
        running: requests running while it runs.
        free_pages: free KV pages while it runs.
        reserved_tokens: positions that running requests may still need after it.
    """

    index: int
    kind: StepKind
    request_ids: tuple[str, ...]
    query_tokens: int
    waiting: int
    running: int
    free_pages: int
    reserved_tokens: int
