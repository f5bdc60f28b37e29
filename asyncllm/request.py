"""One request's life inside the engine.

Runs on the engine thread only; the scheduler owns every field that changes. Invariant: a request moves only
along `LEGAL_MOVES`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.kv.cache_manager import RequestPages
    from asyncllm.sampling_params import LogitsHook

__all__ = ["LEGAL_MOVES", "LogitOptions", "Request", "RequestState", "RowSampling", "TokenConstraint"]


class RequestState(enum.Enum):
    """Where a request is in its life."""

    PREPARING = "preparing"  # its prompt is being tokenized
    WAITING = "waiting"  # complete, not admitted
    PREFILLING = "prefilling"  # admitted; its prompt (and what it generated, if it begins again) is computed in chunks
    DECODING = "decoding"  # its prompt is computed; one token a step
    PAUSED = "paused"  # its reader stopped; in no step, keeps its pages
    ENDING = "ending"  # its cause of end is known, a launched step still names it
    PREEMPTED = "preempted"  # its pages went to the cache, it will wait again
    FINISHED = "finished"  # nothing of it is left in the scheduler


_S = RequestState
LEGAL_MOVES: Final[dict[RequestState, frozenset[RequestState]]] = {
    _S.PREPARING: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING: frozenset({_S.PREFILLING, _S.FINISHED}),
    _S.PREFILLING: frozenset({_S.DECODING, _S.ENDING, _S.FINISHED}),
    _S.DECODING: frozenset({_S.PREFILLING, _S.PAUSED, _S.ENDING, _S.FINISHED}),  # PREFILLING: its step failed
    _S.PAUSED: frozenset({_S.DECODING, _S.PREEMPTED, _S.FINISHED}),
    _S.ENDING: frozenset({_S.FINISHED, _S.PREEMPTED}),
    _S.PREEMPTED: frozenset({_S.WAITING}),
    _S.FINISHED: frozenset(),
}


def _no_ids() -> npt.NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


def _no_biases() -> npt.NDArray[np.float32]:
    return np.zeros(0, dtype=np.float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class LogitOptions:
    """What a request asks of its logits beyond temperature and filters: every value resolved, arrays never changed.

    Args:
        prompt_tokens: of the request; what it generates begins at this position.
        repetition_penalty: > 0; 1.0 is off.
        presence_penalty: 0.0 is off.
        frequency_penalty: 0.0 is off.
        bias_ids: int32 [n], distinct.
        biases: float32 [n], added to the logits of `bias_ids`; -inf bans.
        allowed_ids: int32 [n], the only ids that may be chosen; None: all.
        mask: the same for many ids, packed as in `Batch.masks`; None: all.
        late_ids: int32 [n], the ids that end the request, where it has a least number of tokens.
        first_end: the first position at which one of `late_ids` may stand.
        logprobs: how many of the likeliest tokens are told beside the chosen one; None: nothing is.
        processed_logprobs: whether logprobs are those after all options, temperature and filters.
        hook: changes the logits of a row, float32 [vocab], given all tokens so far; on the engine thread.

    Attributes:
        edits: whether tokens are not chosen from the model's logits, or are told of by others than those.
        tells: whether more than a token comes back: logprobs, or logits for a hook.
    """

    prompt_tokens: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: npt.NDArray[np.int32] = dataclasses.field(default_factory=_no_ids)
    biases: npt.NDArray[np.float32] = dataclasses.field(default_factory=_no_biases)
    allowed_ids: npt.NDArray[np.int32] | None = None
    mask: npt.NDArray[np.int32] | None = None
    late_ids: npt.NDArray[np.int32] = dataclasses.field(default_factory=_no_ids)
    first_end: int = 0
    logprobs: int | None = None
    processed_logprobs: bool = False
    hook: LogitsHook | None = None
    edits: bool = dataclasses.field(init=False)
    tells: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        edits = (
            self.penalizes
            or len(self.bias_ids) > 0
            or self.allowed_ids is not None
            or self.mask is not None
            or len(self.late_ids) > 0
            or self.hook is not None
            or (self.logprobs is not None and self.processed_logprobs)
        )
        object.__setattr__(self, "edits", edits)
        object.__setattr__(self, "tells", self.logprobs is not None or self.hook is not None)

    @property
    def asks(self) -> bool:
        """Whether any of it changes or tells anything."""
        return self.edits or self.tells

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How the device chooses one row's token: every value resolved, nothing left to a default.

    Args:
        temperature: 0.0 is greedy.
        top_p: 1.0 is off.
        top_k: 0 is off.
        min_p: 0.0 is off.
        seed: 0 <= seed < 2**63.
        options: what else is asked of its logits; None: nothing, the fast path.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    options: LogitOptions | None = None

    @property
    def hook(self) -> LogitsHook | None:
        """The caller's function that changes logits, if there is one."""
        return None if self.options is None else self.options.hook


class TokenConstraint(Protocol):
    """Says which tokens may come next; owned by one request, used by one thread at a time.

    Attributes:
        failure: why it can say no more; the request fails with its next token.
    """

    failure: str | None

    def mask(self, generated: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return which tokens may follow, as a row of `Batch.masks`: a new array.

        Args:
            generated: all committed tokens: those of the last call and maybe more.
        """


class Request:
    """A request as the scheduler sees it: token ids and counts, no text and no stream.

    Args:
        request_id: unique among live requests.
        sequence: its place in the waiting order, drawn at the call.
        prompt: int32 [prompt tokens], never changed.
        max_tokens: most tokens to generate, >= 1.
        sampling: how its tokens are chosen.
        priority: higher first.
        namespace: requests of different namespaces never share KV.
        constraint: which tokens it may generate; None: any.
        prompt_logprobs: how many of the likeliest tokens are told beside each of the prompt's; None: nothing is. Its
            prompt is computed whole, whatever is cached.

    Attributes:
        needs_committed_token: whether a step can only be built once the token before is committed; the request is
            left out of the step that overlaps.
        state: where it is; changes through `move`.
        generated: committed token ids, the one that ended it included.
        computed: positions whose KV launched steps write or have written.
        committed: positions whose KV committed steps have written; stays as it is once the request is ENDING.
        sampled: tokens sampled by launched steps, committed or not.
        cached_tokens: prompt tokens that the prefix cache answered, set at admission.
        pages: its KV, while it holds any.
        last_step: index of the last launched step that names it; -1 before the first.
    """

    __slots__ = (
        "cached_tokens",
        "committed",
        "computed",
        "constraint",
        "generated",
        "last_step",
        "max_tokens",
        "namespace",
        "needs_committed_token",
        "pages",
        "priority",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "sampled",
        "sampling",
        "sequence",
        "state",
    )

    def __init__(
        self,
        *,
        request_id: str,
        sequence: int,
        prompt: npt.NDArray[np.int32],
        max_tokens: int,
        sampling: RowSampling,
        priority: int = 0,
        namespace: str = "",
        constraint: TokenConstraint | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.priority = priority
        self.namespace = namespace
        self.prompt_logprobs = prompt_logprobs
        self.constraint = constraint
        self.needs_committed_token = constraint is not None or sampling.hook is not None
        self.state = RequestState.PREPARING
        self.generated: list[int] = []
        self.computed = 0
        self.committed = 0
        self.sampled = 0
        self.cached_tokens = 0
        self.pages: RequestPages | None = None
        self.last_step = -1

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} {self.state.value}>"

    @property
    def worst_case_tokens(self) -> int:
        """Positions it may write in its life; the last sampled token's KV is never written."""
        return len(self.prompt) + self.max_tokens - 1

    def move(self, state: RequestState) -> None:
        """Move to `state`, which must be legal from the present one."""
        if state not in LEGAL_MOVES[self.state]:
            raise RuntimeError(f"request {self.request_id!r} cannot move from {self.state.value} to {state.value}")
        self.state = state

    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt and what was generated: int32 [tokens]; the prompt itself while nothing was generated."""
        if not self.generated:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.generated, dtype=np.int32)])
