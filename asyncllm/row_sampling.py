"""From a call's `SamplingParams` to the resolved values by which the device chooses a row's tokens.

Runs on the caller's thread, for long texts on a worker thread; owns nothing. Invariant: a request that asks for
nothing beyond temperature and filters has no `LogitOptions`, and so takes the fast path.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.errors import InvalidRequestError
from asyncllm.request import LogitOptions, RowSampling
from asyncllm.sampling_params import GREEDY_BELOW_TEMPERATURE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from asyncllm.backend import GenerationDefaults
    from asyncllm.sampling_params import SamplingParams

__all__ = ["check_sampling", "least_tokens", "row_sampling"]


def check_sampling(
    params: SamplingParams, defaults: GenerationDefaults, vocab_size: int, eos_token_ids: frozenset[int]
) -> None:
    """Refuse what the model cannot do.

    Raises:
        InvalidRequestError: ids outside of the vocabulary, more logprobs than it has tokens, or no token is left.
    """
    banned = {*_banned(params, defaults), *(token_id for token_id, bias in params.biases if bias == -np.inf)}
    given: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_ids,
        "logit_bias": (token_id for token_id, _ in params.biases),
        "allowed_token_ids": params.allowed_ids or (),
        "banned_token_ids": params.banned_ids or (),
    }
    for name, ids in given.items():
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(f"{name} has {token_id}, outside of the vocabulary (0 to {vocab_size - 1})")
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and asked > vocab_size:
            raise InvalidRequestError(f"{name} must be from 0 to {vocab_size}, the vocabulary's size, not {asked}")
    if params.min_tokens:
        banned.update(params.stop_ids, frozenset() if params.ignore_eos else eos_token_ids)
    if not any(token_id not in banned for token_id in params.allowed_ids or range(vocab_size)):
        raise InvalidRequestError(
            "no token could be chosen: allowed_token_ids, banned_token_ids, logit_bias of -inf and min_tokens (which "
            "bans what ends a request) leave none"
        )


def _banned(params: SamplingParams, defaults: GenerationDefaults) -> tuple[int, ...]:
    return defaults.suppress_token_ids if params.banned_ids is None else params.banned_ids


def least_tokens(params: SamplingParams, defaults: GenerationDefaults, *, max_tokens: int) -> int:
    """Resolve `min_tokens`.

    Raises:
        InvalidRequestError: it is more than `max_tokens` as resolved.
    """
    if params.min_tokens is None:
        return 0 if params.structure is not None else min(defaults.min_new_tokens, max_tokens)
    if params.min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens must be from 0 to max_tokens ({max_tokens}), not {params.min_tokens}")
    return params.min_tokens


def row_sampling(
    params: SamplingParams,
    defaults: GenerationDefaults,
    *,
    seed: int,
    vocab_size: int,
    prompt_tokens: int,
    min_tokens: int,
    end_ids: Collection[int],
) -> RowSampling:
    """Resolve what a call leaves open.

    Args:
        params: the call's.
        defaults: the model's.
        seed: of the draws.
        vocab_size: ids are below it.
        prompt_tokens: tokens of the prompt.
        min_tokens: as `least_tokens` has it.
        end_ids: ids that end the request.
    """
    temperature = defaults.temperature if params.temperature is None else float(params.temperature)
    top_k = defaults.top_k if params.top_k is None else params.top_k
    options = _with_mask(
        _options(params, defaults, prompt_tokens, min_tokens, end_ids if min_tokens else ()), vocab_size
    )
    return RowSampling(
        temperature=0.0 if temperature < GREEDY_BELOW_TEMPERATURE else temperature,
        top_p=defaults.top_p if params.top_p is None else float(params.top_p),
        top_k=0 if top_k <= 0 or top_k >= vocab_size else top_k,
        min_p=defaults.min_p if params.min_p is None else float(params.min_p),
        seed=seed,
        options=options if options.asks and params.max_tokens != 0 else None,  # scoring chooses nothing
    )


def _options(
    params: SamplingParams,
    defaults: GenerationDefaults,
    prompt_tokens: int,
    min_tokens: int,
    late_ids: Collection[int],
) -> LogitOptions:
    biases = dict(params.biases)
    biases.update(dict.fromkeys(_banned(params, defaults), -np.inf))
    penalty = params.repetition_penalty
    return LogitOptions(
        prompt_tokens=prompt_tokens,
        repetition_penalty=float(defaults.repetition_penalty if penalty is None else penalty),
        presence_penalty=float(params.presence_penalty or 0.0),
        frequency_penalty=float(params.frequency_penalty or 0.0),
        bias_ids=np.asarray(list(biases), dtype=np.int32),
        biases=np.asarray(list(biases.values()), dtype=np.float32),
        allowed_ids=None if params.allowed_ids is None else np.unique(np.asarray(params.allowed_ids, dtype=np.int32)),
        late_ids=np.asarray(sorted(late_ids), dtype=np.int32),
        first_end=prompt_tokens + min_tokens,
        logprobs=params.logprobs,
        processed_logprobs=params.logprobs_mode == "processed",
        hook=params.logits_hook,
    )


def _with_mask(options: LogitOptions, vocab_size: int) -> LogitOptions:
    """Replace allowed and banned ids by a mask where they are so many that it is shorter."""
    ids, banned = options.allowed_ids, options.biases == -np.inf
    words = -(-vocab_size // 32)
    if (0 if ids is None else len(ids)) <= words and int(banned.sum()) <= words:
        return options
    allowed = np.full(32 * words, ids is None)
    if ids is not None:
        allowed[ids] = True
    allowed[options.bias_ids[banned]] = False
    return dataclasses.replace(
        options,
        bias_ids=options.bias_ids[~banned],
        biases=options.biases[~banned],
        allowed_ids=None,
        mask=np.packbits(allowed, bitorder="little").view(np.int32),
    )
