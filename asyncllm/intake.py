"""From a call's arguments to a request, or a refusal with the numbers.

Runs on the caller's thread, for long texts on a worker thread; owns nothing. Invariant: what passes here fits: the
scheduler never meets a request that could not finish.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from array import array as packed
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypedDict, cast

import numpy as np

from asyncllm.errors import InvalidRequestError, PromptTooLongError
from asyncllm.kv.naive_cache import GROUP_PREFIX
from asyncllm.plain_values import as_integer, as_items, as_real
from asyncllm.request import Request
from asyncllm.row_sampling import check_sampling, least_tokens, row_sampling
from asyncllm.structure import Structure
from asyncllm.structured.compiler import StructureCompiler
from asyncllm.submission import ReadyRequest, Sink, Submission
from asyncllm.text.advance import TextProgress
from asyncllm.text.tool_calls import ToolCallParser

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.backend import OpenBackend
    from asyncllm.request import TokenConstraint
    from asyncllm.sampling_params import LogitsHook, LogprobsMode, SamplingParams
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["ChatTurn", "Intake", "Message", "Prompt", "RequestOptions", "SamplingFields", "mappings"]

DEFAULT_MAX_TOKENS: Final = 1024
LEAST_DEFAULT_MAX_TOKENS: Final = 16
SHORT_TEXT_CHARACTERS: Final = 2048
"""Longer texts are tokenized, and longer structures checked, on a worker thread: a millisecond of the caller's loop is
the most we take."""

Prompt = str | Sequence[int]
Message = Mapping[str, object]


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams`, as keywords of a call."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None
    allowed_token_ids: Iterable[int] | None
    banned_token_ids: Iterable[int] | None
    logits_hook: LogitsHook | None
    seed: int | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    include_stop: bool
    ignore_eos: bool
    logprobs: int | None
    logprobs_mode: LogprobsMode
    prompt_logprobs: int | None
    skip_special_tokens: bool
    json_schema: Mapping[str, object] | type | str | None
    regex: str | None
    choices: Iterable[str] | None
    grammar: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a call says about a request beside its sampling; checked on construction."""

    request_id: str | None = None
    timeout: float | None = None
    priority: int = 0
    buffer_tokens: int | None = None
    cache_namespace: str = ""
    sample_group: str = ""  # not the caller's: requests that share what they compute though nothing is cached

    def __post_init__(self) -> None:
        if self.request_id is not None and (not isinstance(self.request_id, str) or not self.request_id):
            raise InvalidRequestError(f"request_id must be a non-empty text, not {self.request_id!r}")
        if self.timeout is not None:
            object.__setattr__(self, "timeout", _seconds(self.timeout))
        priority, buffer = as_integer(self.priority), as_integer(self.buffer_tokens)
        if priority is None:
            raise InvalidRequestError(f"priority must be an integer (higher first), not {self.priority!r}")
        if self.buffer_tokens is not None and (buffer is None or buffer < 1):
            raise InvalidRequestError(f"buffer_tokens must be an integer >= 1, not {self.buffer_tokens!r}")
        object.__setattr__(self, "priority", priority)
        object.__setattr__(self, "buffer_tokens", buffer)
        if not isinstance(self.cache_namespace, str):
            raise InvalidRequestError(f"cache_namespace must be a text, not {self.cache_namespace!r}")
        if self.cache_namespace.startswith(GROUP_PREFIX):
            raise InvalidRequestError(f"cache_namespace must not begin with {GROUP_PREFIX!r}: {self.cache_namespace!r}")

    @property
    def namespace(self) -> str:
        """Where the request's KV is shared."""
        return GROUP_PREFIX + self.sample_group if self.sample_group else self.cache_namespace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A conversation to be rendered by the model's template."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] | None
    continue_final_message: bool
    template_options: Mapping[str, object] | None

    def __post_init__(self) -> None:
        if not isinstance(self.continue_final_message, bool):
            raise InvalidRequestError(
                f"continue_final_message must be True or False, not {self.continue_final_message!r:.80}"
            )
        options = self.template_options
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
            raise InvalidRequestError(f"template_options must be a mapping from names to values, not {options!r:.80}")

    def characters(self) -> int:
        """About how long the rendered text will be."""
        given = (*self.messages, *(self.tools or ()), self.template_options or {})
        return sum(len(str(value)) for mapping in given for value in mapping.values())


def mappings(name: str, values: object) -> tuple[Mapping[str, object], ...]:
    """Return the messages or tools of a call.

    Raises:
        InvalidRequestError: they are something else.
    """
    found = as_items(values)
    if found is not None and all(isinstance(each, Mapping) for each in found):
        return cast("tuple[Mapping[str, object], ...]", found)
    raise InvalidRequestError(f"{name} must be an iterable of mappings, not {type(values).__name__} {values!r:.80}")


class Intake:
    """Builds submissions for one opened model.

    Args:
        opened: the model.
        seed: of the seeds drawn for requests without one; None: random.
    """

    def __init__(self, opened: OpenBackend, *, seed: int | None) -> None:
        self._opened = opened
        self._seeds = random.Random(seed)  # noqa: S311  # seeds of samples, nothing secret
        self._pool_tokens = opened.num_pages * opened.page_size
        self._structures = (
            None
            if opened.tokenizer is None
            else StructureCompiler(
                opened.tokenizer, eos_token_ids=opened.eos_token_ids, vocab_size=opened.model_config.vocab_size
            )
        )

    def draw_seed(self) -> int:
        """Draw a seed for a request without one."""
        return self._seeds.getrandbits(63)

    def read_vocabulary(self) -> None:
        """Do now what the first structured output of this model would have to wait for."""
        if self._structures is not None and self._opened.eos_token_ids:
            self._structures.compile(Structure("choices", '["a"]'))

    def submission(
        self,
        prompt: Prompt | ChatTurn,
        params: SamplingParams,
        options: RequestOptions,
        *,
        sink: Sink,
        request_id: str,
    ) -> Submission:
        """Check a call's arguments and build its submission.

        Token ids and short texts are made ready here; longer ones, and structures that were not compiled before, by
        `Submission.prepare`, later.

        Raises:
            InvalidRequestError: an argument cannot be served.
            PromptTooLongError: it can never fit.
        """
        self._check_params(params)
        seed = self.draw_seed() if params.seed is None else params.seed
        kept = _own(prompt)
        ids = self._prompt_ids(kept) if _characters(kept) <= SHORT_TEXT_CHARACTERS else None
        if ids is None:
            self._need_tokenizer("a text prompt")
        else:
            self._max_tokens(len(ids), params, request_id)
        tools = prompt.tools if isinstance(prompt, ChatTurn) else None
        structure = params.structure
        constraint = None if structure is None else self._compiled(structure)

        def prepare(sequence: int) -> ReadyRequest:
            own = constraint
            if structure is not None and own is None:
                own = self._structures_for(structure).compile(structure)
            prompt_ids = self._prompt_ids(kept) if ids is None else ids
            return self._ready(prompt_ids, params, options, seed, request_id, sequence, own, tools)

        compiles = structure is not None and constraint is None
        deferred = ids is None or compiles
        return Submission(
            request_id=request_id,
            sink=sink,
            params=params,
            seed=seed,
            prepare=prepare if deferred else None,
            ready=None if deferred else prepare(-1),
            timeout_seconds=options.timeout,
            buffer_tokens=options.buffer_tokens,
            compiles=compiles,
        )

    def _check_params(self, params: SamplingParams) -> None:
        opened = self._opened
        check_sampling(params, opened.generation, opened.model_config.vocab_size, opened.eos_token_ids)
        if params.stop_texts:
            self._need_tokenizer("stop")

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._opened.tokenizer is None:
            raise InvalidRequestError(f"this model has no tokenizer, so {what} cannot be used: give token ids")
        return self._opened.tokenizer

    def _compiled(self, structure: Structure) -> TokenConstraint | None:
        """Return what keeps a text to its structure, if that is there; else check the structure, if it is short."""
        structures = self._structures_for(structure)
        constraint = structures.compiled(structure)
        if constraint is None and len(structure.source) <= SHORT_TEXT_CHARACTERS:
            structures.check(structure)
        return constraint

    def _structures_for(self, structure: Structure) -> StructureCompiler:
        self._need_tokenizer(structure.kind)
        if self._structures is None or not self._opened.eos_token_ids:
            raise InvalidRequestError(f"this model names no end-of-sequence token, so {structure.kind} cannot end")
        return self._structures

    def _prompt_ids(self, prompt: str | ChatTurn | npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        if isinstance(prompt, ChatTurn):
            ids: Sequence[int] | npt.NDArray[np.int64] = self._need_tokenizer("chat").render_chat(
                prompt.messages,
                tools=prompt.tools,
                continue_final_message=prompt.continue_final_message,
                template_options=prompt.template_options,
            )
        elif isinstance(prompt, str):
            ids = self._need_tokenizer("a text prompt").encode(prompt)
        else:
            ids = prompt
        array = ids if isinstance(ids, np.ndarray) else _id_array(ids)
        vocab_size = self._opened.model_config.vocab_size
        if array.size == 0:
            raise InvalidRequestError("the prompt has no tokens: give at least one")
        if int(array.min()) < 0 or int(array.max()) >= vocab_size:
            bad = int(array[(array < 0) | (array >= vocab_size)][0])
            raise InvalidRequestError(f"the prompt has id {bad}, outside of the vocabulary (0 to {vocab_size - 1})")
        return array.astype(np.int32)

    def _ready(  # noqa: PLR0917  # one call, in `prepare`
        self,
        ids: npt.NDArray[np.int32],
        params: SamplingParams,
        options: RequestOptions,
        seed: int,
        request_id: str,
        sequence: int,
        constraint: TokenConstraint | None,
        tools: Sequence[Mapping[str, object]] | None,
    ) -> ReadyRequest:
        max_tokens = self._max_tokens(len(ids), params, request_id)
        min_tokens = least_tokens(params, self._opened.generation, max_tokens=max_tokens)
        eos_token_ids = frozenset() if params.ignore_eos else self._opened.eos_token_ids
        request = Request(
            request_id=request_id,
            sequence=sequence,
            prompt=ids,
            max_tokens=max_tokens,
            sampling=row_sampling(
                params,
                self._opened.generation,
                seed=seed,
                vocab_size=self._opened.model_config.vocab_size,
                prompt_tokens=len(ids),
                min_tokens=min_tokens,
                end_ids=eos_token_ids.union(params.stop_ids),
            ),
            priority=options.priority,
            namespace=options.namespace,
            constraint=constraint,
            prompt_logprobs=params.prompt_logprobs,
        )
        tokenizer = self._opened.tokenizer
        text = TextProgress(
            tokenizer,
            () if tokenizer is None else ids.tolist(),
            stop_texts=params.stop_texts,
            stop_ids=frozenset(params.stop_ids),
            eos_token_ids=eos_token_ids,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            tools=None
            if not tools or tokenizer is None
            else ToolCallParser(
                tokenizer, tools, skip_special_tokens=params.skip_special_tokens, request_id=request_id
            ),
        )
        return ReadyRequest(request, text)

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams, request_id: str) -> int:
        """Resolve `max_tokens`; refuse what cannot fit. The last token's KV is never written, so it needs no room.

        A prompt that is only scored is one that samples a token, which is dropped; without a place of its own.
        """
        asked, pool = params.max_tokens, self._pool_tokens
        limit = min(self._opened.max_model_tokens, pool if asked == 0 else pool + 1)
        room = limit - prompt_tokens
        if asked is not None and asked <= room:
            return max(asked, 1)
        if asked is None and room >= 1:
            base = max(self._opened.generation.max_new_tokens or DEFAULT_MAX_TOKENS, params.min_tokens or 0)
            return min(base, room, max(self._pool_tokens // 4, LEAST_DEFAULT_MAX_TOKENS))
        wanted = 1 if asked is None else asked
        raise PromptTooLongError(
            f"{prompt_tokens} prompt tokens and max_tokens={wanted} make {prompt_tokens + wanted}, but prompt and "
            f"output may have {limit} together (context {self._opened.max_model_tokens}, KV pool {self._pool_tokens}): "
            "shorten the prompt, lower max_tokens, or open the engine with a larger kv_pool_tokens or max_model_tokens",
            prompt_tokens=prompt_tokens,
            limit_tokens=limit,
            pool_tokens=self._pool_tokens,
            request_id=request_id,
        )


def _seconds(timeout: object) -> float:
    given = as_real(timeout)
    if given is None or not 0 < given < sys.float_info.max:
        raise InvalidRequestError(f"timeout must be a number of seconds > 0, not {timeout!r:.80}")
    return given


def _own(prompt: Prompt | ChatTurn) -> str | ChatTurn | npt.NDArray[np.int64]:
    """Keep a copy of what a caller may change after the call; token ids as an array."""
    if isinstance(prompt, str | ChatTurn):
        return prompt
    return _id_array(prompt)


def _characters(prompt: str | ChatTurn | npt.NDArray[np.int64]) -> int:
    if isinstance(prompt, ChatTurn):
        return prompt.characters()
    return len(prompt) if isinstance(prompt, str) else 0


def _id_array(ids: object) -> npt.NDArray[np.int64]:
    """Copy ids: through `array`, the fastest way from a list, where it takes them; it refuses all but integers."""
    if hasattr(ids, "__array__"):  # numpy's arrays, and others' on the CPU, such as torch's
        try:
            ids = np.asarray(ids)
        except (TypeError, RuntimeError) as error:
            raise InvalidRequestError(f"a prompt of token ids cannot be read: {error}") from error
        if ids.ndim == 1 and ids.dtype.kind in "iu":
            return ids.astype(np.int64)
    items = as_items(ids)
    if items is None:
        raise InvalidRequestError(f"a prompt is a text or a sequence of token ids, not {type(ids).__name__}")
    with contextlib.suppress(TypeError, OverflowError):
        taken = np.frombuffer(packed("Q", cast("tuple[int, ...]", items)), dtype=np.int64)
        doubtful = np.flatnonzero(taken <= int(True)).tolist()  # booleans look so
        if all(as_integer(items[place]) is not None for place in doubtful):
            return taken
    numbers: list[int] = []
    for item in items:
        number = as_integer(item)
        if number is None:
            raise InvalidRequestError(f"a prompt of token ids holds integers, not {type(item).__name__}")
        numbers.append(number)
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        raise InvalidRequestError("the prompt has an id far outside of the vocabulary") from None
