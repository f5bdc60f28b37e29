"""What a caller may ask of one request's tokens.

Runs anywhere; owns nothing. Invariant: a `SamplingParams` that exists is valid by itself; only what needs
the model (ids against its vocabulary, lengths against its context) is checked at the call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Final

from asyncllm.errors import InvalidRequestError
from asyncllm.structure import Structure, choice_texts, json_schema_text, plain_text

__all__ = ["GREEDY_BELOW_TEMPERATURE", "SamplingParams"]

GREEDY_BELOW_TEMPERATURE: Final = 1e-3
"""Temperatures below this are greedy: dividing logits by less can overflow, and the result is the argmax anyway."""

_MAX_SEED: Final = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Say how one request's tokens are chosen and when it ends.

    `None` means: as the model's generation config says, by transformers' rules (no `do_sample`: greedy).

    Args:
        max_tokens: most tokens to generate, >= 1. None: the generation config's `max_new_tokens`, else 1024,
            cut to the room left in the context and to a quarter of the KV pool.
        temperature: >= 0; 0 (or below `GREEDY_BELOW_TEMPERATURE`) is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this, 0 <= top_p <= 1; the best token
            is always kept, so 0 is greedy in effect; 1 is off.
        top_k: keep the k best tokens; 0 or -1 is off; more than the vocabulary is off.
        min_p: drop tokens less likely than this share of the best one's probability, 0 <= min_p <= 1; 0 is off.
        seed: 0 <= seed < 2**63; a token's draw depends on (seed, position) only. None: one is drawn and
            reported in the completion.
        stop: a text or several; generation ends where the first of them completes. None empty.
        stop_token_ids: ids that end the request as an end-of-sequence id does.
        include_stop: keep the stop text (or the stop token's text) in the completion's text.
        ignore_eos: go on past the model's end-of-sequence ids.
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
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: Mapping[str, object] | type | str | None = None
    regex: str | None = None
    choices: Iterable[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1)
        _check_float("temperature", self.temperature, low=0.0, high=math.inf)
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        _check_int("top_k", self.top_k, low=-1)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_int("seed", self.seed, low=0, high=_MAX_SEED)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "json_schema", json_schema_text(self.json_schema))
        object.__setattr__(self, "regex", plain_text("regex", self.regex))
        object.__setattr__(self, "choices", choice_texts(self.choices))
        object.__setattr__(self, "grammar", plain_text("grammar", self.grammar))
        if self.structure is not None and self.ignore_eos:
            raise InvalidRequestError(f"ignore_eos cannot be given with {self.structure.kind}, which ends by itself")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, in the order given."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The stop token ids, in the order given."""
        return self.stop_token_ids if isinstance(self.stop_token_ids, tuple) else ()

    @property
    def structure(self) -> Structure | None:
        """The form that the text must have; None for any."""
        return Structure.of(json_schema=self.json_schema, regex=self.regex, choices=self.choices, grammar=self.grammar)


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if value is None:
        return
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be {allowed}, not {value!r}")
    if value < low or (high is not None and value > high):
        raise InvalidRequestError(f"{name} must be {allowed}, not {value}")


def _check_float(name: str, value: object, *, low: float, high: float) -> None:
    if value is None:
        return
    allowed = f"a finite number >= {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be {allowed}, not {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be {allowed}, not {value}")


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a text or several texts, not {value!r}")
    texts: list[str] = []
    for item in value:
        if not isinstance(item, str) or not item:
            raise InvalidRequestError(f"{name} must hold non-empty texts, not {item!r}")
        texts.append(item)
    return tuple(texts)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be token ids, not {value!r}")
    ids: list[int] = []
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise InvalidRequestError(f"{name} must hold token ids (integers >= 0), not {item!r}")
        ids.append(item)
    return tuple(ids)
