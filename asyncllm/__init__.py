"""LLM inference as async generators, in one process and on any event loop.

Importing starts nothing and loads no torch: a model's code is imported when an engine opens.
"""

from asyncllm.config import EngineConfig
from asyncllm.errors import (
    AsyncLLMError,
    ConfigurationError,
    DeadlineExceededError,
    EngineClosedError,
    EngineError,
    EngineFailedError,
    IntegrityError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    StreamInUseError,
)
from asyncllm.outputs import Completion, EngineState, EngineStats, StepRecord, Timing, Token, Usage
from asyncllm.sampling_params import SamplingParams

__all__ = [
    "AsyncLLMError",
    "Completion",
    "ConfigurationError",
    "DeadlineExceededError",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EngineFailedError",
    "EngineState",
    "EngineStats",
    "IntegrityError",
    "InvalidRequestError",
    "ModelLoadError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "SamplingParams",
    "StepRecord",
    "StreamInUseError",
    "Timing",
    "Token",
    "Usage",
    "__version__",
]

__version__ = "0.1.0"
