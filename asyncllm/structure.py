"""What a completion's text must be: one of the ways to say it in `SamplingParams`, in one form.

Runs anywhere; owns nothing. Invariant: equal structures have equal texts, so that what is compiled for one serves all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Final, Literal

from asyncllm.errors import InvalidRequestError
from asyncllm.plain_values import as_items

__all__ = ["Structure", "choice_texts", "json_schema_text", "plain_text"]

_WAYS: Final = ("json_schema", "regex", "choices", "grammar")


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A form that a text must have.

    Args:
        kind: the name of the `SamplingParams` field that gave it.
        source: a schema or a list of choices as JSON, a regular expression, a grammar.
    """

    kind: Literal["json_schema", "regex", "choices", "grammar"]
    source: str

    @classmethod
    def of(cls, *, json_schema: object, regex: object, choices: object, grammar: object) -> Structure | None:
        """Return what the fields of a `SamplingParams` ask for; None if all are None.

        Raises:
            InvalidRequestError: more than one is given.
        """
        given = {
            kind: source
            for kind, source in zip(_WAYS, (json_schema, regex, choices, grammar), strict=True)
            if source is not None
        }
        if len(given) > 1:
            raise InvalidRequestError(f"only one of {', '.join(_WAYS)} can be given, not {' and '.join(given)}")
        for kind, source in given.items():
            text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
            return cls(kind, text)  # type: ignore[arg-type]  # one of _WAYS
        return None


def json_schema_text(value: object) -> str | None:
    """Return a JSON schema as JSON; None for None.

    Args:
        value: a mapping, a class with pydantic's `model_json_schema`, or JSON.

    Raises:
        InvalidRequestError: it is none of them.
    """
    if value is None:
        return None
    make = getattr(value, "model_json_schema", None)
    if make is not None:
        try:
            value = make()
        except Exception as error:  # the caller's code: whatever it raises
            raise InvalidRequestError(f"json_schema: {value!r:.80} gives no schema: {error!r}") from error
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if isinstance(schema, Mapping):
            return json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is not JSON: {error}") from error
    raise InvalidRequestError(
        f"json_schema must be a mapping, a pydantic model class or a JSON object, not {value!r:.80}"
    )


def choice_texts(value: object) -> tuple[str, ...] | None:
    """Return the texts of which one is wanted; None for None.

    Raises:
        InvalidRequestError: they are not one or more non-empty texts.
    """
    if value is None:
        return None
    items = as_items(value)
    if items is None:
        raise InvalidRequestError(f"choices must be several texts, not {value!r:.80}")
    choices: list[str] = []
    for item in items:
        if not isinstance(item, str) or not item:
            raise InvalidRequestError(f"choices must hold non-empty texts, not {item!r:.80}")
        choices.append(item)
    if not choices:
        raise InvalidRequestError("choices must hold at least one text")
    return tuple(choices)


def plain_text(name: str, value: object) -> str | None:
    """Return a regular expression or grammar as it is.

    Raises:
        InvalidRequestError: it is no text, or an empty one.
    """
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(f"{name} must be a non-empty text, not {value!r:.80}")
    return value if isinstance(value, str) else None
