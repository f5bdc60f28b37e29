"""The seam between the engine and what runs its steps: protocols and frozen values only, no torch.

A backend is a real model (`asyncllm.model`) or a scripted one (`asyncllm.testing`). Opened by the engine thread
and used by it alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig
    from asyncllm.model.model_config import ModelConfig
    from asyncllm.scheduler.batch import Batch, StepResult
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Backend", "GenerationDefaults", "LaunchedStep", "OpenBackend", "Progress", "StepRunner"]

JSON = Mapping[str, object]


class Progress(Protocol):
    """Told by a backend while it opens."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """Note that `done` of `total` parts of `stage` are there. Raises if the opening was cancelled: let it pass."""


class LaunchedStep(Protocol):
    """A step that is running or has run."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called once, from any thread, when the step is done (at once if it is).

        Returns:
            False if the device cannot call back; then poll `done` or block in `wait`.
        """

    def wait(self) -> None:
        """Block until the step is done, with the GIL released."""

    def result(self) -> StepResult:
        """Return what was sampled; raise what the step raised. Blocks until done."""


class StepRunner(Protocol):
    """Runs steps in the order in which they are launched, on one CUDA stream or one thread."""

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step and return without waiting for it; at most two are launched and not read.

        What this raises is as if the step had been launched and failed. A step that was launched behind one that
        failed, before that was read, must fail too, or at least write to no page that one of its rows did not have.
        """

    def close(self) -> None:
        """Wait for what is launched, then give all memory back. Idempotent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a model's generation config says where a caller said nothing; greedy unless it says `do_sample`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    suppress_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenBackend:
    """A model that is ready to run.

    Args:
        runner: runs its steps.
        tokenizer: None for a folder without one (ids only).
        model_config: the model's shape.
        generation: the generation config's defaults.
        eos_token_ids: union of what tokenizer, generation config and model config call end of sequence.
        page_size: tokens of a KV page.
        num_pages: pages of the KV pool.
        max_model_tokens: most tokens of prompt and output together.
        step_token_budget: most tokens of a step.
        min_prefill_chunk: tokens that the oldest prompt gets in each step.
        resolved: settings that were chosen at the opening, by the names of `EngineConfig`.
    """

    runner: StepRunner
    tokenizer: Tokenizer | None
    model_config: ModelConfig
    generation: GenerationDefaults
    eos_token_ids: frozenset[int]
    page_size: int
    num_pages: int
    max_model_tokens: int
    step_token_budget: int
    min_prefill_chunk: int
    resolved: JSON


class Backend(Protocol):
    """Opens a model, on the engine thread."""

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """Load everything; on any exception, `progress`'s included, give all memory back and let it pass."""
