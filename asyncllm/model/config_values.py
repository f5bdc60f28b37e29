"""Typed reading of values from JSON files, which may come from anyone.

Runs anywhere; owns nothing. Invariant: anything gives a value of the type asked for or a `ModelLoadError`
that names the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from asyncllm.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Config", "flag", "integer", "number", "read_json", "short"]

Config = Mapping[str, object]

_MESSAGE_CHARACTERS: Final = 80
_MAX_JSON_BYTES: Final = 2**28


def integer(config: Config, key: str, *, low: int = 1, high: int, default: int | None = None) -> int:
    """Return `config[key]`; `default` stands for a missing key and for null."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"the model's config has no {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelLoadError(f"{key} must be an integer from {low} to {high}, not {short(value)}")
    return value


def number(config: Config, key: str, *, low: float, below: float, default: float | None = None) -> float:
    """Return `config[key]` as a float in [low, below); `default` stands for a missing key and for null."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"the model's config has no {key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < below:
        raise ModelLoadError(f"{key} must be a number >= {low:g} and < {below:g}, not {short(value)}")
    return float(value)


def flag(config: Config, key: str, *, default: bool = False) -> bool:
    """Return `config[key]`; `default` stands for a missing key."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{key} must be true or false, not {short(value)}")
    return value


def short(value: object) -> str:
    """Show a value in a message, cut to a readable length; it may come from a hostile file."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a nest of thousands of lists
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."


def read_json(path: Path) -> dict[str, object]:
    """Read a file that holds one JSON object.

    Raises:
        ModelLoadError: it is not there, absurdly large, or no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{path} has more than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {short(value)}")
    return value
