"""The engine as callers hold it: open, close, stream, generate, chat.

Runs on callers' threads, on any event loop or none; owns one opening of the engine at a time and puts its parts
together. Touches the engine thread only through the front desk and the inbox. Invariant: nothing happens at
construction, and the engine thread holds no reference to this object, so that a dropped engine closes itself.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, TypeVar, Unpack

import anyio
import anyio.to_thread

from asyncllm.batch_run import BatchRun, with_fields
from asyncllm.config import EngineConfig
from asyncllm.engine_loop import EngineLoop
from asyncllm.errors import EngineError, InvalidRequestError
from asyncllm.front_desk import FrontDesk, engine_closed
from asyncllm.inbox import Call, Cancel, Close, Inbox, Resume, Submit
from asyncllm.intake import ChatTurn, Intake, RequestOptions, SamplingFields
from asyncllm.mailbox import Mailbox
from asyncllm.outputs import EngineState, EngineStats
from asyncllm.progress import progress_bar
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.submission import BatchSink, Ended, StreamSink
from asyncllm.wakeups import Doors, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from asyncllm.backend import Backend, OpenBackend
    from asyncllm.intake import Message, Prompt
    from asyncllm.model.model_config import ModelConfig
    from asyncllm.outputs import Completion, StepRecord, Token
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Engine"]

T = TypeVar("T")

_WARMUP = SamplingParams(max_tokens=2, ignore_eos=True)

_TEXT_PER_TURN = 16_384
"""Characters tokenized on the caller's loop before a worker thread takes over, in calls with many prompts."""


class _Opening:
    """One opening of an engine: its thread and the doors to it."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.desk = FrontDesk(max_waiting=config.max_waiting_requests)
        self.inbox = Inbox()
        self.loop = EngineLoop(config, backend, self.desk, self.inbox)
        self.thread = threading.Thread(target=self.loop.run, name="asyncllm-engine", daemon=True)
        self.intake: Intake | None = None
        self.model: OpenBackend | None = None


class Engine:
    """A single-process LLM engine: one engine thread, any number of callers on any event loop.

    Args:
        model: a folder, a .gguf file, "smollm2-135m-instruct", or a name on the Hugging Face hub.
        backend: what runs the model; None: torch. `asyncllm.testing` has one without weights.
        **fields: fields of `EngineConfig`; an unknown one is a TypeError.

    Raises:
        ConfigurationError: a setting, or a combination of settings, cannot work.
    """

    def __init__(self, model: str | os.PathLike[str], *, backend: Backend | None = None, **fields: object) -> None:
        self._given = EngineConfig(model=model, **fields)  # type: ignore[arg-type]  # EngineConfig checks them
        self._backend = backend
        self._doors = Doors()
        self._lock = threading.Lock()  # of starting and closing; never held while waiting
        self._opening: _Opening | None = None
        self._resting_state = EngineState.NEW  # while there is no opening
        self._process_id = os.getpid()
        self._finalizer: weakref.finalize[..., Engine] | None = None
        self._at_exit: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Engine {os.fspath(self._given.model)!r} {self.state.value}>"

    # -- life ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        opening = self._opening
        return self._resting_state if opening is None else opening.desk.state

    async def start(self) -> None:
        """Load the model and start the engine thread; a second call waits for the first.

        Raises:
            ModelLoadError, ConfigurationError: the model cannot be opened as asked.
            EngineClosedError: the engine was closed meanwhile.
        """
        opening, is_mine = self._begin()
        try:
            model = await opening.loop.opened.get(self._doors)
        except BaseException:
            if is_mine:  # cancelled, or failed: nothing may be left of it
                opening.inbox.post(Close())
                with anyio.CancelScope(shield=True):
                    await opening.loop.closed.get(self._doors)
                self._end_close(opening)
            raise
        self._note_open(opening, model)

    def start_blocking(self) -> None:
        """Same as `start`, for code without an event loop: blocks this thread."""
        opening, is_mine = self._begin()
        try:
            model = opening.loop.opened.get_blocking()
        except BaseException:
            if is_mine:
                opening.inbox.post(Close())
                opening.loop.closed.get_blocking()
                self._end_close(opening)
            raise
        self._note_open(opening, model)

    def _begin(self) -> tuple[_Opening, bool]:
        self._check_process()
        with self._lock:
            opening = self._opening
            if opening is not None:
                if opening.desk.state is not EngineState.STARTING:
                    opening.desk.check_open()
                return opening, False
            opening = self._opening = _Opening(self._given, self._backend or _torch_backend())
            self._finalizer = weakref.finalize(self, _close_dropped, opening, repr(self), os.getpid())
            self._finalizer.atexit = False
            self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
            atexit.register(self._at_exit)
            opening.thread.start()
            return opening, True

    def _note_open(self, opening: _Opening, model: OpenBackend) -> None:
        with self._lock:
            if opening.model is None and opening.desk.state is EngineState.RUNNING:
                opening.intake = Intake(model, seed=self._given.seed)
                opening.model = model

    async def aclose(self) -> None:
        """End all streams, stop after the step in flight, give all memory back. Idempotent, shielded."""
        opening = self._begin_close()
        if opening is not None:
            with anyio.CancelScope(shield=True):
                await opening.loop.closed.get(self._doors)
            self._end_close(opening)

    def close(self) -> None:
        """Same as `aclose`, from any thread, with or without a loop; blocks for at most a step and a margin.

        On the engine thread itself (in a step listener) it only asks, since it cannot wait for itself.
        """
        opening = self._begin_close()
        if opening is not None and threading.current_thread() is not opening.thread:
            opening.loop.closed.get_blocking()
            self._end_close(opening)

    def _begin_close(self) -> _Opening | None:
        opening = self._opening
        if opening is not None and not self.is_foreign:
            opening.inbox.post(Close())
            return opening
        return None

    def _end_close(self, opening: _Opening) -> None:
        """Drop what was opened, so that its memory can go. The thread has nothing left to do but to end."""
        opening.thread.join()
        with self._lock:
            if self._opening is not opening:
                return
            self._opening = None
            self._resting_state = EngineState.CLOSED
            if self._finalizer is not None:
                self._finalizer.detach()
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        self.start_blocking()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # -- requests --------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        buffer_tokens: int | None = None,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> TokenStream:
        """Start a request and return its tokens as they come.

        Args:
            prompt: a text, or token ids.
            params: how tokens are chosen; None: as the model's generation config says.
            request_id: unique among live requests; None: one is drawn.
            timeout: seconds for the whole request, waiting and pauses included.
            priority: higher first, among those that wait; running requests are never stopped for it.
            buffer_tokens: pause the request while that many tokens are unread or in flight. None: never pause;
                what is unread is bounded by `max_tokens`.
            cache_namespace: requests of different namespaces never share KV.
            **fields: single fields of `params` to replace.

        Raises:
            InvalidRequestError, PromptTooLongError: an argument cannot be served. (Long texts are tokenized
                after the call returns: what is wrong with them is raised by the stream.)
            QueueFullError: `max_waiting_requests` requests are waiting.
            EngineClosedError, EngineFailedError: the engine takes no requests.
        """
        options = RequestOptions(
            request_id=request_id,
            timeout=timeout,
            priority=priority,
            buffer_tokens=buffer_tokens,
            cache_namespace=cache_namespace,
        )
        return self._stream(prompt, with_fields(params or SamplingParams(), fields), options)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool = False,
        template_options: Mapping[str, object] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        buffer_tokens: int | None = None,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> TokenStream:
        """Start a request for the next message of a conversation, rendered by the model's own template.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first. Their contents are plain text: a special
                token spelled in one is not one.
            tools: JSON schemas of functions, for templates that take them.
            continue_final_message: go on with the last message instead of starting a new one.
            template_options: further variables of the template.
            params, request_id, timeout, priority, buffer_tokens, cache_namespace, **fields: as for `stream`.

        Raises:
            InvalidRequestError: also if the model has no template, or a content is not text.
        """
        options = RequestOptions(
            request_id=request_id,
            timeout=timeout,
            priority=priority,
            buffer_tokens=buffer_tokens,
            cache_namespace=cache_namespace,
        )
        turn = ChatTurn(
            messages=tuple(messages),
            tools=None if tools is None else tuple(tools),
            continue_final_message=continue_final_message,
            template_options=template_options,
        )
        return self._stream(turn, with_fields(params or SamplingParams(), fields), options)

    def _stream(self, prompt: Prompt | ChatTurn, params: SamplingParams, options: RequestOptions) -> TokenStream:
        opening, intake = self._open_intake()
        mailbox: Mailbox[Token | Ended] = Mailbox()
        submission = intake.submission(
            prompt,
            params,
            options,
            sink=StreamSink(mailbox),
            request_id=options.request_id or opening.desk.new_id(),
        )
        if options.buffer_tokens is not None:
            mailbox.on_room(lambda: opening.inbox.post(Resume(submission)))
        opening.desk.register((submission,), bounded=True)
        stream = TokenStream(
            engine=self,
            submission=submission,
            mailbox=mailbox,
            desk=opening.desk,
            inbox=opening.inbox,
            doors=self._doors,
        )
        opening.inbox.post(Submit((submission,)))
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Completion:
        """Return the whole completion of a prompt; arguments and errors as for `stream`.

        Raises:
            DeadlineExceededError: the timeout has passed; carries the partial completion.
            RequestFailedError: the request failed alone.
        """
        options = RequestOptions(
            request_id=request_id, timeout=timeout, priority=priority, cache_namespace=cache_namespace
        )
        opening, intake = self._open_intake()
        mailbox: Mailbox[tuple[int, Ended]] = Mailbox()
        submission = intake.submission(
            prompt,
            with_fields(params or SamplingParams(), fields),
            options,
            sink=BatchSink(mailbox, 0),
            request_id=request_id or opening.desk.new_id(),
        )
        opening.desk.register((submission,), bounded=True)
        opening.inbox.post(Submit((submission,)))
        try:
            _, ended = await mailbox.get(self._doors)
        except BaseException:
            if opening.desk.leave(submission, "aborted"):
                opening.inbox.post(Cancel((submission,)))
            raise
        if ended.completion is None:
            raise ended.error or EngineError(f"{submission.request_id!r} ended without a completion")
        return ended.completion

    async def generate_all(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> list[Completion | Exception]:
        """Return the completions of many prompts, in order.

        Args:
            prompts: any iterable; at most twice `max_running_requests` are taken ahead.
            params: for all, or one for each.
            progress: show a bar on standard error.
            return_exceptions: put a failure in its prompt's place; else the first one cancels the rest and is
                raised, its `index` saying which prompt.
            timeout, priority, cache_namespace, **fields: of each request, as for `stream`.
        """
        completions: dict[int, Completion | Exception] = {}
        options = RequestOptions(timeout=timeout, priority=priority, cache_namespace=cache_namespace)
        run = self.batch_run(prompts, params, fields, options)
        with progress_bar(prompts, shown=progress) as bar:
            async for index, outcome in self._outcomes(run):
                if isinstance(outcome, Exception) and not return_exceptions:
                    raise outcome
                completions[index] = outcome
                bar.update()
        return [completions[index] for index in range(len(completions))]

    async def stream_all(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Yield `(index, completion)` of many prompts as they end; arguments as for `generate_all`.

        The first failure cancels the rest and is raised, its `index` saying which prompt.
        """
        options = RequestOptions(timeout=timeout, priority=priority, cache_namespace=cache_namespace)
        run = self.batch_run(prompts, params, fields, options)
        async for index, outcome in self._outcomes(run):
            if isinstance(outcome, Exception):
                raise outcome
            yield index, outcome

    async def generate_samples(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int,
        timeout: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Return `n` completions of one prompt; sample i uses seed + i. Their common prompt is computed once.

        Cancelling the call ends all of them.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidRequestError(f"n must be an integer >= 1, not {n!r}")
        base = with_fields(params or SamplingParams(), fields)
        _, intake = self._open_intake()
        seed = intake.draw_seed() if base.seed is None else base.seed
        each = [dataclasses.replace(base, seed=(seed + i) % 2**63) for i in range(n)]
        samples = await self.generate_all(
            [prompt] * n, each, timeout=timeout, priority=priority, cache_namespace=cache_namespace
        )
        return [sample for sample in samples if not isinstance(sample, Exception)]

    async def _outcomes(self, run: BatchRun) -> AsyncIterator[tuple[int, Completion | Exception]]:
        try:
            while True:
                pulled = run.pull()
                if sum(len(prompt) for _, prompt, _ in pulled if isinstance(prompt, str)) > _TEXT_PER_TURN:
                    run.submit(await anyio.to_thread.run_sync(run.prepare, pulled))
                else:
                    run.submit(run.prepare(pulled))
                if not run.going_on:
                    return
                index, ended = run.refused() or await run.mailbox.get(self._doors)
                yield index, run.note(index, ended)
        finally:
            run.leave()

    def batch_run(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        fields: SamplingFields,
        options: RequestOptions,
    ) -> BatchRun:
        """Make the state of a call with many prompts; what `LLM` shares with `generate_all`."""
        opening, intake = self._open_intake()
        window = 2 * self._given.max_running_requests
        if self._given.max_waiting_requests is not None:
            window = max(1, min(window, self._given.max_waiting_requests))
        return BatchRun(
            prompts, params, fields, options, window=window, intake=intake, desk=opening.desk, inbox=opening.inbox
        )

    def abort(self, request_id: str) -> bool:
        """End a request; its stream yields what was delivered. Returns whether it was live and not ended."""
        opening = self._opening
        self._check_process()
        submission = None if opening is None else opening.desk.find(request_id)
        if opening is None or submission is None or not opening.desk.leave(submission, "aborted"):
            return False
        opening.inbox.post(Cancel((submission,)))
        return True

    def _open_intake(self) -> tuple[_Opening, Intake]:
        self._check_process()
        opening = self._opening
        if opening is None:
            raise engine_closed(self._resting_state)
        opening.desk.check_open()
        if opening.intake is None:
            raise engine_closed(EngineState.STARTING)
        return opening, opening.intake

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child's copy, whose thread stayed in the parent."""
        return os.getpid() != self._process_id

    def _check_process(self) -> None:
        if self.is_foreign:
            raise EngineError("this engine belongs to the parent process: open one here, after the fork")

    # -- looking and tending ---------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine as it was after its last step; never waits."""
        self._check_process()
        opening = self._opening
        if opening is None:
            return EngineStats(state=self._resting_state)
        snapshot, state = opening.desk.stats, opening.desk.state
        if snapshot.last_step_age_seconds is None and snapshot.state is state:
            return snapshot
        age = None if snapshot.last_step_age_seconds is None else time.monotonic() - snapshot.last_step_age_seconds
        return dataclasses.replace(snapshot, state=state, last_step_age_seconds=age)

    @property
    def config(self) -> EngineConfig:
        """The settings; while the engine is open, with what was chosen at its start filled in."""
        opening = self._opening
        if opening is None or opening.model is None:
            return self._given
        return dataclasses.replace(self._given, **opening.model.resolved)  # type: ignore[arg-type]  # names of fields

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape. Raises EngineClosedError unless the engine is open."""
        return self._open_model().model_config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None for a model without. Raises EngineClosedError unless the engine is open."""
        return self._open_model().tokenizer

    def _open_model(self) -> OpenBackend:
        opening, _ = self._open_intake()
        if opening.model is None:
            raise engine_closed(EngineState.STARTING)
        return opening.model

    def add_step_listener(self, listener: Callable[[StepRecord], object]) -> Callable[[], None]:
        """Have `listener` called on the engine thread with each step's record, after its commit.

        It may call `stats` and `abort` and must not block; if it raises it is removed and the error logged.

        Returns:
            A function that removes it.
        """
        loop = self._open_intake()[0].loop
        loop.add_listener(listener)
        return functools.partial(loop.remove_listener, listener)

    def check_integrity(self) -> None:
        """Check that every KV page is accounted for; blocks for at most one step.

        Raises:
            IntegrityError: it names the pages.
        """
        self._call(EngineLoop.check_integrity).get_blocking()

    async def check_integrity_async(self) -> None:
        """Same as `check_integrity`, without blocking the loop."""
        await self._call(EngineLoop.check_integrity).get(self._doors)

    def reset_prefix_cache(self) -> int:
        """Free the cached pages that no live request leases; returns how many. Blocks for at most one step."""
        return self._call(EngineLoop.reset_prefix_cache).get_blocking()

    async def reset_prefix_cache_async(self) -> int:
        """Same as `reset_prefix_cache`, without blocking the loop."""
        return await self._call(EngineLoop.reset_prefix_cache).get(self._doors)

    def _call(self, function: Callable[[EngineLoop], T]) -> Reply[T]:
        opening, _ = self._open_intake()
        reply: Reply[T] = Reply()
        if not opening.inbox.post(Call(functools.partial(function, opening.loop), reply)):
            reply.fail(opening.desk.closing_error())
        return reply

    def drain(self) -> None:
        """Take no new requests and block until those that were submitted have ended."""
        self._begin_drain().get_blocking()

    async def drain_async(self) -> None:
        """Same as `drain`, without blocking the loop."""
        await self._begin_drain().get(self._doors)

    def _begin_drain(self) -> Reply[None]:
        opening, _ = self._open_intake()
        opening.desk.move(EngineState.DRAINING)
        opening.inbox.post(Call(lambda: None, Reply()))  # a turn of the loop, in which it sees the state
        return opening.loop.drained

    def warmup(self) -> None:
        """Run a short request, so that the first real one finds everything loaded and compiled. Blocks."""
        stream = self.stream([0], _WARMUP)
        while stream.next_blocking() is not None:
            pass

    async def warmup_async(self) -> None:
        """Same as `warmup`, without blocking the loop."""
        await self.stream([0], _WARMUP).result()


def _torch_backend() -> Backend:
    """Imported at the first start: `import asyncllm` must not import torch."""
    from asyncllm.model.open import TorchBackend  # noqa: PLC0415  # see above

    return TorchBackend()


def _close_dropped(opening: _Opening, name: str, process_id: int) -> None:
    """Finalizer of an engine that nobody closed."""
    if os.getpid() == process_id:
        opening.inbox.post(Close())
        warnings.warn(f"{name} was dropped without close(); use `async with` or `with`", ResourceWarning, stacklevel=2)


def _close_at_exit(reference: weakref.ref[Engine]) -> None:
    """Stop the engine thread before the interpreter goes: a daemon thread inside torch would abort it."""
    engine = reference()
    if engine is not None and not engine.is_foreign and engine.state is not EngineState.CLOSED:
        warnings.warn(f"{engine!r} was open at exit; use `async with` or `with`", ResourceWarning, stacklevel=2)
        engine.close()
