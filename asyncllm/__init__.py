"""LLM inference as async generators, in one process and on any event loop.

Importing starts nothing and loads no torch: a model's code is imported when an engine opens.
"""

from asyncllm.config import EngineConfig
from asyncllm.conversation import Conversation
from asyncllm.engine import Engine
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
    WrongThreadError,
)
from asyncllm.llm import LLM
from asyncllm.outputs import (
    Completion,
    EngineState,
    EngineStats,
    StepRecord,
    Timing,
    Token,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream

__all__ = [
    "LLM",
    "AsyncLLMError",
    "Completion",
    "ConfigurationError",
    "Conversation",
    "DeadlineExceededError",
    "Engine",
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
    "TokenLogprob",
    "TokenStream",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WrongThreadError",
    "__version__",
]

__version__ = "0.1.0"
