"""The errors that callers see.

Runs anywhere; owns nothing. Every error of this package is an `AsyncLLMError`; errors that concern one
request carry its `request_id`. Messages name the value, what is allowed, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncllm.outputs import Completion

__all__ = [
    "AsyncLLMError",
    "ConfigurationError",
    "DeadlineExceededError",
    "EngineClosedError",
    "EngineError",
    "EngineFailedError",
    "IntegrityError",
    "InvalidRequestError",
    "ModelLoadError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "StreamInUseError",
    "WrongThreadError",
]


class AsyncLLMError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(AsyncLLMError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ModelLoadError(AsyncLLMError):
    """A model folder or file that cannot be loaded; names the file, tensor or setting."""


class RequestError(AsyncLLMError):
    """Base of the errors that concern one request.

    Attributes:
        request_id: the request's id, or None where it had none yet.
        index: its place in the call's prompts, for `generate_all` and its kin; else None.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.index: int | None = None


class InvalidRequestError(RequestError, ValueError):
    """An argument of a request that cannot be served; raised at the call."""


class PromptTooLongError(InvalidRequestError):
    """The prompt and its `max_tokens` can never fit the context or the KV pool.

    Attributes:
        prompt_tokens: tokens of the prompt.
        limit_tokens: the most tokens that prompt and output may have together.
        pool_tokens: tokens that the whole KV pool holds.
    """

    def __init__(
        self,
        message: str,
        *,
        prompt_tokens: int,
        limit_tokens: int,
        pool_tokens: int,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens
        self.pool_tokens = pool_tokens


class QueueFullError(RequestError):
    """`max_waiting_requests` requests are waiting already; raised at the call."""


class DeadlineExceededError(RequestError, TimeoutError):
    """The request's `timeout` passed.

    Attributes:
        completion: what was generated until then (`finish_reason` is "timeout").
    """

    def __init__(self, message: str, *, completion: Completion, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.completion = completion


class RequestFailedError(RequestError):
    """This request failed alone: its logits were not finite, or code run for it raised (the cause)."""


class StreamInUseError(AsyncLLMError, RuntimeError):
    """A second consumer iterates a stream that one is waiting in already."""


class EngineError(AsyncLLMError):
    """Base of the errors that concern the whole engine."""


class EngineClosedError(EngineError):
    """The engine is not open: not started yet, closing, or closed."""


class WrongThreadError(EngineError, RuntimeError):
    """A call that waits for the engine, made on the engine's own thread: in a step listener or a logits hook."""


class EngineFailedError(EngineError):
    """The engine cannot go on; the first cause is the exception's `__cause__`."""


class IntegrityError(AsyncLLMError):
    """KV pages are not accounted for; the message names them. Always a fault of this package."""
