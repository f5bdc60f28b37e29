"""What a caller may ask of one request's tokens.

Runs anywhere; owns nothing. Invariant: a `SamplingParams` that exists is valid by itself; only what needs
the model (ids against its vocabulary, lengths against its context) is checked at the call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from asyncllm.errors import InvalidRequestError
from asyncllm.plain_values import as_integer, as_items, as_real
from asyncllm.structure import Structure, choice_texts, json_schema_text, plain_text

if TYPE_CHECKING:
    import torch

__all__ = ["GREEDY_BELOW_TEMPERATURE", "MOST_LOGPROBS", "LogitsHook", "LogprobsMode", "SamplingParams"]

LogitsHook = Callable[[Sequence[int], "torch.Tensor"], "torch.Tensor | None"]
"""What `SamplingParams.logits_hook` may be."""

LogprobsMode = Literal["raw", "processed"]

GREEDY_BELOW_TEMPERATURE: Final = 1e-3
"""Temperatures below this are greedy: dividing logits by less can overflow, and the result is the argmax anyway."""

MOST_LOGPROBS: Final = 1024
"""Most alternatives that can be asked for: they come to the host with every token."""

_MAX_SEED: Final = 2**63 - 1
_LARGEST: Final = (2 - 2**-23) * 2.0**127  # of float32, in which logits are computed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Say how one request's tokens are chosen and when it ends.

    `None` means: as the model's generation config says, by transformers' rules (no `do_sample`: greedy).

    Args:
        max_tokens: most tokens to generate, >= 1. None: the generation config's `max_new_tokens`, else 1024,
            cut to the room left in the context and to a quarter of the KV pool. 0 with `prompt_logprobs` alone: the
            prompt is scored, nothing is generated.
        min_tokens: 0 <= min_tokens <= max_tokens; before so many tokens nothing ends the request: ids that would
            (those that `ignore_eos` ignores do not) are banned, and stop texts that are complete by then do not count.
        temperature: >= 0; 0 (or below `GREEDY_BELOW_TEMPERATURE`) is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this, 0 <= top_p <= 1; the best token
            is always kept, so 0 is greedy in effect; 1 is off.
        top_k: keep the k best tokens; 0 or -1 is off; more than the vocabulary is off.
        min_p: drop tokens less likely than this share of the best one's probability, 0 <= min_p <= 1; 0 is off.
        repetition_penalty: > 0; the logit of every token that is in the prompt or was generated is divided by it if
            positive, else multiplied by it, once however often the token is there; 1 is off.
        presence_penalty: subtracted from the logit of every token that was generated; 0 is off.
        frequency_penalty: subtracted as often as the token was generated; 0 is off. Both look at generated tokens
            alone, as OpenAI and vLLM have it; the prompt's do not count.
        logit_bias: id to bias, added to the logit before penalties; -inf bans, +inf is refused. Kept as pairs.
        allowed_token_ids: the only ids that may be generated, at least one; None: all. A request whose options leave
            no token fails with the first such token.
        banned_token_ids: ids that are never generated.
        logits_hook: called with all token ids so far (the prompt's too) and the logits, a float32 tensor [vocab] on
            the CPU, once for every token, on the engine's thread: after penalties and biases, before temperature and
            filters. It changes the logits in place and returns None, or returns new ones. It must not block. Its
            request cannot be in the step that overlaps; if it raises, its request fails.
        seed: 0 <= seed < 2**63; a token's draw depends on (seed, position) only. None: one is drawn and
            reported in the completion.
        stop: a text or several; generation ends where the first of them completes. None empty.
        stop_token_ids: ids that end the request as an end-of-sequence id does.
        include_stop: keep the stop text (or the stop token's text) in the completion's text.
        ignore_eos: go on past the model's end-of-sequence ids.
        logprobs: tell each token's logprob, and those of this many likeliest tokens, 0 <= logprobs <= `MOST_LOGPROBS`;
            None: tell nothing.
        logprobs_mode: "raw": the model's own, before all options; "processed": of what is drawn from, after options,
            temperature and filters (-inf for what these dropped; of a greedy request, after all but temperature).
        prompt_logprobs: the same for each token of the prompt but the first, always the model's own. The prompt is
            then computed whole, whatever is cached.
        skip_special_tokens: leave special tokens out of the text.
        json_schema: the text is JSON that fits this schema: a mapping, a pydantic model class, or JSON. Its keywords
            are kept to, or refused by name; properties come in the schema's order.
        regex: the whole text matches this regular expression (of Rust's syntax: no look-around).
        choices: the text is one of these.
        grammar: the text follows this context-free grammar, in Lark's syntax or GBNF. At most one of these four can be
            given. The text ends where it is complete, by an end-of-sequence id; `max_tokens` may cut it before.

    Raises:
        InvalidRequestError: a value is out of range; the message names it, its value and the range.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    allowed_token_ids: Iterable[int] | None = None
    banned_token_ids: Iterable[int] | None = None
    logits_hook: LogitsHook | None = None
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    json_schema: Mapping[str, object] | type | str | None = None
    regex: str | None = None
    choices: Iterable[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._keep("temperature", _float("temperature", self.temperature, low=0.0, high=math.inf))
        self._keep("top_p", _float("top_p", self.top_p, low=0.0, high=1.0))
        self._keep("top_k", _int("top_k", self.top_k, low=-1))
        self._keep("min_p", _float("min_p", self.min_p, low=0.0, high=1.0))
        self._keep("repetition_penalty", _float("repetition_penalty", self.repetition_penalty, above=0.0))
        self._keep("presence_penalty", _float("presence_penalty", self.presence_penalty))
        self._keep("frequency_penalty", _float("frequency_penalty", self.frequency_penalty))
        self._keep("seed", _int("seed", self.seed, low=0, high=_MAX_SEED))
        self._keep("logprobs", _int("logprobs", self.logprobs, low=0, high=MOST_LOGPROBS))
        if not isinstance(self.logprobs_mode, str) or self.logprobs_mode not in ("raw", "processed"):
            raise InvalidRequestError(f"logprobs_mode must be 'raw' or 'processed', not {self.logprobs_mode!r}")
        if self.logits_hook is not None and not callable(self.logits_hook):
            raise InvalidRequestError(f"logits_hook must be a function of ids and logits, not {self.logits_hook!r}")
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._keep("stop", _texts("stop", self.stop))
        self._keep("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._keep("logit_bias", _biases(self.logit_bias))
        for name in ("allowed_token_ids", "banned_token_ids"):
            if (ids := getattr(self, name)) is not None:
                self._keep(name, _ids(name, ids))
        if self.allowed_token_ids == ():
            raise InvalidRequestError("allowed_token_ids must hold at least one id: leave it out to allow all")
        self._keep("json_schema", json_schema_text(self.json_schema))
        self._keep("regex", plain_text("regex", self.regex))
        self._keep("choices", choice_texts(self.choices))
        self._keep("grammar", plain_text("grammar", self.grammar))
        if self.structure is not None and self.ignore_eos:
            raise InvalidRequestError(f"ignore_eos cannot be given with {self.structure.kind}, which ends by itself")
        if self.structure is not None and self.min_tokens:
            raise InvalidRequestError(f"min_tokens cannot be given with {self.structure.kind}, which ends by itself")

    def _check_lengths(self) -> None:
        self._keep("prompt_logprobs", _int("prompt_logprobs", self.prompt_logprobs, low=0, high=MOST_LOGPROBS))
        if as_integer(self.max_tokens) == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError("max_tokens must be an integer >= 1, not 0 (which needs prompt_logprobs)")
        least = 0 if self.prompt_logprobs is not None else 1
        self._keep("max_tokens", _int("max_tokens", self.max_tokens, low=least))
        self._keep("min_tokens", _int("min_tokens", self.min_tokens, low=0, high=self.max_tokens))

    def _keep(self, name: str, value: object) -> None:
        """Set a field as it is being made."""
        object.__setattr__(self, name, value)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, in the order given."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The stop token ids, in the order given."""
        return self.stop_token_ids if isinstance(self.stop_token_ids, tuple) else ()

    @property
    def allowed_ids(self) -> tuple[int, ...] | None:
        """The allowed token ids; None for all."""
        return self.allowed_token_ids if isinstance(self.allowed_token_ids, tuple) else None

    @property
    def banned_ids(self) -> tuple[int, ...] | None:
        """The banned token ids; None as the model's generation config says."""
        return self.banned_token_ids if isinstance(self.banned_token_ids, tuple) else None

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The biases, by distinct ids."""
        return self.logit_bias if isinstance(self.logit_bias, tuple) else ()

    @property
    def structure(self) -> Structure | None:
        """The form that the text must have; None for any."""
        return Structure.of(json_schema=self.json_schema, regex=self.regex, choices=self.choices, grammar=self.grammar)


def _int(name: str, value: object, *, low: int, high: int | None = None) -> int | None:
    if value is None:
        return None
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    number = as_integer(value)
    if number is None:
        raise InvalidRequestError(f"{name} must be {allowed}, not {value!r}")
    if number < low or (high is not None and number > high):
        raise InvalidRequestError(f"{name} must be {allowed}, not {number}")
    return number


def _float(
    name: str, value: object, *, low: float = -math.inf, high: float = math.inf, above: float | None = None
) -> float | None:
    if value is None:
        return None
    if above is not None:
        allowed = f"a finite number > {above:g}"
    elif high < math.inf:
        allowed = f"a number from {low:g} to {high:g}"
    else:
        allowed = "a finite number" if low == -math.inf else f"a finite number >= {low:g}"
    number = as_real(value)
    if number is None:
        raise InvalidRequestError(f"{name} must be {allowed}, not {value!r}")
    if math.inf > abs(number) > _LARGEST:
        raise InvalidRequestError(f"{name} must be {allowed} and of at most {_LARGEST:g} in size, not {value!r:.80}")
    if not math.isfinite(number) or not low <= number <= high or (above is not None and number <= above):
        raise InvalidRequestError(f"{name} must be {allowed}, not {number}")
    return number


def _biases(value: object) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        biases = dict(pairs)  # type: ignore[call-overload]  # whatever it is, it is looked at below
    except (TypeError, ValueError):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, not {value!r}") from None
    kept: list[tuple[int, float]] = []
    for token_id, bias in zip(_ids("logit_bias", biases.keys()), biases.values(), strict=True):
        given = as_real(bias)
        if given is None or not given < math.inf:
            raise InvalidRequestError(f"logit_bias must hold finite numbers or -inf, not {bias!r} (of id {token_id})")
        if math.inf > abs(given) > _LARGEST:
            raise InvalidRequestError(
                f"logit_bias must hold numbers of at most {_LARGEST:g} in size, not {bias!r:.80} (of id {token_id})"
            )
        kept.append((token_id, given))
    return tuple(kept)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else as_items(value)
    if items is None:
        raise InvalidRequestError(f"{name} must be a text or several texts, not {value!r}")
    texts: list[str] = []
    for item in items:
        if not isinstance(item, str) or not item:
            raise InvalidRequestError(f"{name} must hold non-empty texts, not {item!r}")
        texts.append(item)
    return tuple(texts)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    items = as_items(value)
    if items is None:
        raise InvalidRequestError(f"{name} must be token ids, not {value!r}")
    ids: list[int] = []
    for item in items:
        number = as_integer(item)
        if number is None or number < 0:
            raise InvalidRequestError(f"{name} must hold token ids (integers >= 0), not {item!r}")
        ids.append(number)
    return tuple(ids)
