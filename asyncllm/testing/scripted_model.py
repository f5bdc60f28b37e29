"""The scripted model: a `Backend` without weights, for tests of what is built on an engine.

`ScriptedModel` is made and told what to do by a test, on any thread; the engine thread opens it; its steps run
on a `CPUDevice`, as a real model's do: run inside `launch`, a held or slow step would stop the engine that is to be
tested. Invariant: everything but the choice of the next token is as with a real model: pages, page
table, overlap, and steps that end some time after their launch.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncllm.backend import GenerationDefaults, OpenBackend
from asyncllm.config import check_pool_tokens, check_step_budget
from asyncllm.model.cpu_device import CPUDevice
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.option_outcome import OptionStep
from asyncllm.testing import vocabulary
from asyncllm.testing.faults import PATIENCE_SECONDS, StepFaults
from asyncllm.testing.paged_tokens import PagedTokens
from asyncllm.testing.script import FunctionScript, HashedTokens, HashScript, ReplyScript
from asyncllm.testing.scripted_options import ScriptedOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.backend import LaunchedStep, Progress
    from asyncllm.config import EngineConfig
    from asyncllm.request import LogitOptions
    from asyncllm.scheduler.batch import Batch
    from asyncllm.testing.faults import HeldStep
    from asyncllm.testing.paged_tokens import Ints, Rows
    from asyncllm.testing.script import NextToken, Replies, Reply, Script

__all__ = ["ScriptedModel", "ScriptedRunner"]

_POOL_TOKENS: Final = 4096
_PAGE_SIZE: Final = 16
_MIN_PREFILL_CHUNK: Final = 64
_STEP_TOKENS: Final = 512


class ScriptedModel:
    """A model that says what a test wants: `Engine("scripted", backend=ScriptedModel({"ping": "pong"}))`.

    Its tokens are the bytes of UTF-8, so that a text of n bytes is n tokens; `bos` and `eos` are special ones. It
    checks all that an engine does with KV pages: a step that reads a page which holds anything else than the
    request's own sequence raises `IntegrityError`.

    Its tokens are as good as certain: temperature, filters, penalties and biases change nothing; where bans, allowed
    ids, `min_tokens` or a structure exclude its token, it takes another; logprobs are 0 and -inf.

    Where a request's text must keep to a structure, the model says the nearest token that does.

    Args:
        replies: a mapping from prompt to reply, or a function from the prompt's text to the reply. A reply is a
            text or exact token ids; end-of-sequence ids follow, as long as they are asked for. For `chat`, the
            key may be the last user message alone; a function gets the whole rendered chat.
        default: the reply to prompts that the mapping does not hold.
        next_token: instead of replies: a function from all tokens so far, the prompt's included, to the next.
            Without replies and function the sequence is hashed: printable, and the same for the same prompt.
        step_seconds: how long each step takes at least.

    Raises:
        ValueError: replies and a function at once, a default without a mapping, or a negative duration.

    Attributes:
        begin_token_id: stands before each prompt given as text.
        end_token_id: ends a completion.
    """

    begin_token_id: Final = vocabulary.BOS_TOKEN_ID
    end_token_id: Final = vocabulary.EOS_TOKEN_ID

    def __init__(
        self,
        replies: Replies | None = None,
        *,
        default: Reply | None = None,
        next_token: NextToken | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        if replies is not None and next_token is not None:
            raise ValueError("give replies or next_token, not both")
        if default is not None and (next_token is not None or callable(replies)):
            raise ValueError("default is for prompts that a mapping does not hold; a function answers every prompt")
        if not (math.isfinite(step_seconds) and step_seconds >= 0.0):
            raise ValueError(f"step_seconds must be a finite number >= 0, not {step_seconds!r}")
        self._replies = {} if replies is None and default is not None else replies
        self._default = default
        self._next_token = next_token
        self._step_seconds = step_seconds
        self._faults = StepFaults()

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """Make pages and tokenizer; see `Backend`. Each opening starts from empty pages, step 0 and no talk."""
        from asyncllm.testing.tokenizer import make_tokenizer  # noqa: PLC0415  # loads `tokenizers`

        page_size = config.page_size or _PAGE_SIZE
        pool_tokens = config.kv_pool_tokens or _POOL_TOKENS // page_size * page_size or page_size
        check_pool_tokens(pool_tokens, page_size)
        chunk = config.min_prefill_chunk or _MIN_PREFILL_CHUNK
        budget = config.step_token_budget or max(_STEP_TOKENS, config.max_running_requests + chunk)
        check_step_budget(budget, config.max_running_requests, chunk)
        max_tokens = config.max_model_tokens or pool_tokens + 1  # the pool alone decides: a last token is not written
        progress("scripted model", 0, 1)
        pages = PagedTokens(
            num_pages=pool_tokens // page_size,
            page_size=page_size,
            num_slots=config.max_running_requests,
            max_pages_per_request=-(-max_tokens // page_size),
        )
        opened = OpenBackend(
            runner=ScriptedRunner(pages, self._script(), self._faults, step_seconds=self._step_seconds),
            tokenizer=make_tokenizer(),
            model_config=_model_config(max_tokens),
            generation=GenerationDefaults(),
            eos_token_ids=frozenset({vocabulary.EOS_TOKEN_ID}),
            page_size=page_size,
            num_pages=pool_tokens // page_size,
            max_model_tokens=max_tokens,
            step_token_budget=budget,
            min_prefill_chunk=chunk,
            resolved={"device": "cpu", "dtype": "float32", "load_format": "dummy", "attention_backend": "scripted"},
        )
        progress("scripted model", 1, 1)
        return opened

    def hold_at_step(self, step: int | None = None, *, patience_seconds: float = PATIENCE_SECONDS) -> HeldStep:
        """Have a step stand before it reads anything, until it is released.

        Closing the engine waits for it, for `close_timeout_seconds`: release it first, best by
        `with model.hold_at_step() as held:`.

        Args:
            step: its number, from 0 at the engine's start; None: the next one that begins.
            patience_seconds: the step fails with TimeoutError if it is not released within them.
        """
        return self._faults.hold(step, patience_seconds=patience_seconds)

    def fail_at_step(self, step: int | None, error: BaseException) -> None:
        """Have a step raise `error`, once: the engine tries its requests again, and nobody notices.

        Args:
            step: its number, from 0 at the engine's start; None: the next one that begins.
            error: what it raises.
        """
        self._faults.fail(step, error)

    def fail_from_step(self, step: int, error: BaseException) -> None:
        """Have all steps from this one on raise `error`, as a broken device does, until the engine closes: it fails.

        Args:
            step: its number, from 0 at the engine's start.
            error: what they raise.
        """
        self._faults.fail_from(step, error)

    def fail_steps_above(self, tokens: int, error: BaseException) -> None:
        """Have all steps with more than so many tokens raise `error`, as a device does that is short of memory."""
        self._faults.fail_above(tokens, error)

    def fail_steps_with(self, prompt: str | Sequence[int], error: BaseException) -> None:
        """Have all steps raise `error` that hold a request with this prompt: it fails alone, and the others go on.

        Args:
            prompt: text or ids. A step raises after it has written all its KV.
            error: what they raise.
        """
        self._faults.fail_with(_prompt_ids(prompt), error)

    def not_finite_at(self, prompt: str | Sequence[int], token: int = 0) -> None:
        """Have the logits of one request's token not be finite, so that this request fails alone.

        Args:
            prompt: the request's prompt, text or ids; the next request with it is the one.
            token: which of its tokens, from 0.
        """
        self._faults.spoil(_prompt_ids(prompt), token)

    def release_all(self) -> None:
        """Let every held step go, and drop what was arranged to be held."""
        self._faults.release_all()

    def _script(self) -> Script:
        if self._replies is not None:
            return ReplyScript(replies=self._replies, default=self._default)
        if self._next_token is None:
            return HashScript(HashedTokens())
        if isinstance(self._next_token, HashedTokens):
            return HashScript(self._next_token)
        return FunctionScript(self._next_token)


class ScriptedRunner:
    """A `StepRunner` over pages of token ids.

    Args:
        pages: what it reads and writes; the device's thread owns it from here on.
        script: chooses the tokens.
        faults: what a test arranged.
        step_seconds: how long a step takes at least.
    """

    def __init__(self, pages: PagedTokens, script: Script, faults: StepFaults, *, step_seconds: float = 0.0) -> None:
        self._pages = pages
        self._script = script
        self._faults = faults
        self._step_seconds = step_seconds
        self._begun = 0
        self._hooked: dict[int, LogitOptions] = {}  # by slot, of its last step that asked for anything
        self._device = CPUDevice()

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step and return without waiting for it."""
        if not batch.asking and not batch.prompt_scores:
            return self._device.submit(batch.index, lambda: self._run(batch, None))
        options = ScriptedOptions(batch)
        return OptionStep(self._device.submit(batch.index, lambda: self._run(batch, options)), options)

    def close(self) -> None:
        """Wait for what is launched (held steps are let go), then end the thread. Idempotent."""
        self._faults.end()
        self._device.close()

    def _run(self, batch: Batch, options: ScriptedOptions | None) -> Ints:
        """Run a step: int64 [2, samples], token ids and whether they are to count as finite."""
        step, self._begun = self._begun, self._begun + 1
        self._faults.begin(step, batch.query_tokens)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        rows = self._pages.step(batch)
        if self._faults.accuses:
            for row in range(batch.rows):
                self._faults.check_row(rows.sequence(row).tolist())
        sampled = batch.sample_rows.astype(np.int64)
        slots = batch.slots[sampled].astype(np.int64)
        self._note_hooked(batch, rows, slots)
        tokens = np.asarray(self._script.next_tokens(rows, sampled, slots, batch.seeds), dtype=np.int64)
        if options is not None:
            tokens = options.choose(tokens)
        finite = (tokens >= 0).astype(np.int64)
        tokens = np.maximum(tokens, 0)
        self._pages.keep_sampled(slots, rows.lengths[sampled], tokens)
        if self._faults.spoils:
            spoilt = [self._faults.is_spoilt(rows.sequence(row).tolist()) for row in sampled.tolist()]
            finite[np.asarray(spoilt, dtype=np.bool_)] = 0
        return np.stack([tokens, finite])

    def _note_hooked(self, batch: Batch, rows: Rows, slots: Ints) -> None:
        """Tell rows that go on from new prompts where the host gives every token: by what they ask."""
        for sample, asked in batch.options.items():
            slot = int(slots[sample])
            if asked.hook is not None and self._hooked.get(slot) is asked:
                rows.given[batch.sample_rows[sample]] = False
            self._hooked[slot] = asked


def _prompt_ids(prompt: str | Sequence[int]) -> tuple[int, ...]:
    return (vocabulary.BOS_TOKEN_ID, *vocabulary.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)


def _model_config(max_model_tokens: int) -> ModelConfig:
    """Describe the smallest decoder with this vocabulary and context; nothing computes it."""
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocabulary.VOCAB_SIZE,
            "hidden_size": 2,
            "intermediate_size": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": max_model_tokens,
            "rms_norm_eps": 1e-6,
            "bos_token_id": vocabulary.BOS_TOKEN_ID,
            "eos_token_id": vocabulary.EOS_TOKEN_ID,
        }
    )
