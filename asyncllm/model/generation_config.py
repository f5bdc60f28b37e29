"""What a checkpoint's generation_config.json says: defaults of sampling, and what ends a sequence.

Runs on the engine thread while it opens; owns nothing. Invariant: where it says nothing, the answer is greedy.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Final

from asyncllm.backend import GenerationDefaults
from asyncllm.errors import ModelLoadError
from asyncllm.model.config_values import Config, flag, integer, number, read_json, short
from asyncllm.model.model_config import token_ids

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GenerationConfig", "read_generation_config"]

_FILE: Final = "generation_config.json"
_ABOVE_ONE: Final = math.nextafter(1.0, 2.0)
_LEAST_PENALTY: Final = math.nextafter(0.0, 1.0)
_SAMPLING_TOP_K: Final = 50  # what transformers takes where it samples and nobody says
# What would change the tokens and is not applied, with the value at which it would not.
_NOT_APPLIED: Final[dict[str, object]] = {
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "bad_words_ids": None,
}

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Hold what the file says.

    Args:
        defaults: of sampling and length.
        eos_token_ids: what ends a sequence; more may, by the tokenizer or the model's config.
    """

    defaults: GenerationDefaults = GenerationDefaults()  # noqa: RUF009 - frozen, so all may share it
    eos_token_ids: frozenset[int] = frozenset()


def read_generation_config(folder: Path, *, vocab_size: int) -> GenerationConfig:
    """Read a folder's generation_config.json by transformers' rules; it need not be there.

    Raises:
        ModelLoadError: it is broken, or a value makes no sense.
    """
    path = folder / _FILE
    if not path.is_file():
        return GenerationConfig()
    config = read_json(path)
    try:
        _warn(config)
        return GenerationConfig(
            defaults=_defaults(config, vocab_size),
            eos_token_ids=token_ids(config.get("eos_token_id"), "eos_token_id", vocab_size),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _defaults(config: Config, vocab_size: int) -> GenerationDefaults:
    samples = config.get("do_sample") is not None and flag(config, "do_sample")
    new_tokens = config.get("max_new_tokens")
    return GenerationDefaults(
        temperature=number(config, "temperature", low=0.0, below=1e6, default=1.0) if samples else 0.0,
        top_p=number(config, "top_p", low=0.0, below=_ABOVE_ONE, default=1.0),
        top_k=integer(config, "top_k", low=0, high=2**31 - 1, default=_SAMPLING_TOP_K if samples else 0),
        min_p=number(config, "min_p", low=0.0, below=_ABOVE_ONE, default=0.0),
        repetition_penalty=number(config, "repetition_penalty", low=_LEAST_PENALTY, below=1e6, default=1.0),
        suppress_token_ids=tuple(sorted(token_ids(config.get("suppress_tokens"), "suppress_tokens", vocab_size))),
        min_new_tokens=integer(config, "min_new_tokens", low=0, high=2**31 - 1, default=0),
        max_new_tokens=None if new_tokens is None else integer(config, "max_new_tokens", high=2**31 - 1),
    )


def _warn(config: Config) -> None:
    for key, neutral in _NOT_APPLIED.items():
        if (value := config.get(key)) is not None and value != neutral:
            logger.warning("%s: %s=%s is not applied", _FILE, key, short(value))
