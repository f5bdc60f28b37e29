"""The engine as callers hold it: open, close, stream, generate, chat.

Runs on callers' threads, on any event loop or none; owns its settings and its life. Touches the engine thread only
through the front desk and the inbox. Invariant: nothing happens at construction; what is wrong with a call is raised
by the call. Over 300 lines since every public method documents its arguments here, where users look them up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack, overload

import anyio
import anyio.to_thread

from asyncllm.batch_run import BatchRun, with_fields
from asyncllm.config import EngineConfig
from asyncllm.engine_loop import EngineLoop
from asyncllm.errors import EngineError, InvalidRequestError
from asyncllm.front_desk import engine_closed
from asyncllm.inbox import Call, Cancel, Resume, Submit
from asyncllm.intake import ChatTurn, RequestOptions, SamplingFields, mappings
from asyncllm.lifecycle import Lifecycle
from asyncllm.mailbox import Mailbox
from asyncllm.outputs import EngineState, EngineStats
from asyncllm.plain_values import as_integer
from asyncllm.progress import progress_bar
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.submission import BatchSink, Ended, StreamSink
from asyncllm.wakeups import Doors, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
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
        self._doors = Doors()
        self._life = Lifecycle(f"<Engine {os.fspath(model)!r}>", self._given, backend, self._doors)

    def __repr__(self) -> str:
        return f"<Engine {os.fspath(self._given.model)!r} {self.state.value}>"

    # -- life ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._life.state

    async def start(self) -> None:
        """Load the model and start the engine thread; a second call waits for the first.

        A cancelled start stops at the next file or graph and gives all memory back.

        Raises:
            ModelLoadError, ConfigurationError: the model cannot be opened as asked.
            EngineClosedError: the engine was closed meanwhile.
        """
        await self._life.start()

    def start_blocking(self) -> None:
        """Same as `start`, for code without an event loop: blocks this thread."""
        self._life.start_blocking()

    async def aclose(self) -> None:
        """End all streams, stop after the step in flight, give all memory back. Idempotent, not to be cancelled.

        If that step (or a step listener, a logits hook, or a model's file while it opens) does not end within the
        setting `close_timeout_seconds`, streams end all the same, and the call returns: the engine thread, a daemon,
        is left to itself, and so is its memory until that thread comes back. The log has an error that says so and
        where the thread stands. The engine can be opened again, beside it.
        """
        await self._life.aclose()

    def close(self) -> None:
        """Same as `aclose`, from any thread, with or without a loop; blocks for a step, or `close_timeout_seconds`.

        On the engine thread itself (in a step listener) it only asks, since it cannot wait for itself.
        """
        self._life.close()

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
            InvalidRequestError, PromptTooLongError: an argument cannot be served. (Long texts are tokenized, and
                long schemas checked, after the call returns: what is wrong with them is raised by the stream.)
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
            messages=mappings("messages", messages),
            tools=None if tools is None else mappings("tools", tools),
            continue_final_message=continue_final_message,
            template_options=template_options,
        )
        return self._stream(turn, with_fields(params or SamplingParams(), fields), options)

    def _stream(self, prompt: Prompt | ChatTurn, params: SamplingParams, options: RequestOptions) -> TokenStream:
        opening, intake = self._life.open_intake()
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
        self._doors.check_thread()
        opening, intake = self._life.open_intake()
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

    @overload
    async def generate_all(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = False,
        return_exceptions: Literal[False] = False,
        timeout: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    @overload
    async def generate_all(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool,
        timeout: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> list[Completion | Exception]: ...

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
    ) -> list[Completion] | list[Completion | Exception]:
        """Return the completions of many prompts, in order.

        Args:
            prompts: any iterable; at most twice `max_running_requests` are taken ahead.
            params: for all, or one for each.
            progress: show a bar on standard error.
            return_exceptions: put a failure in its prompt's place; else the first one cancels the rest and is
                raised, its `index` saying which prompt.
            timeout, priority, cache_namespace, **fields: of each request, as for `stream`.
        """
        options = RequestOptions(timeout=timeout, priority=priority, cache_namespace=cache_namespace)
        run = self.batch_run(prompts, params, fields, options)
        completions: dict[int, Completion | Exception] = {}
        with progress_bar(prompts, shown=progress) as bar:
            async with contextlib.aclosing(self._outcomes(run)) as outcomes:
                async for index, outcome in outcomes:
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
        async with contextlib.aclosing(self._outcomes(run)) as outcomes:
            async for index, outcome in outcomes:
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
        count = as_integer(n)
        if count is None or count < 1:
            raise InvalidRequestError(f"n must be an integer >= 1, not {n!r}")
        base = with_fields(params or SamplingParams(), fields)
        opening, intake = self._life.open_intake()
        seed = intake.draw_seed() if base.seed is None else base.seed
        each = [dataclasses.replace(base, seed=(seed + i) % 2**63) for i in range(count)]
        options = RequestOptions(
            timeout=timeout,
            priority=priority,
            cache_namespace=cache_namespace,
            # A cache that keeps nothing would not share the prompt either: the samples get a place of their own.
            sample_group=opening.desk.new_id() if self._given.prefix_cache == "none" else "",
        )
        run = self.batch_run([prompt] * count, each, {}, options)
        samples: dict[int, Completion] = {}
        async with contextlib.aclosing(self._outcomes(run)) as outcomes:
            async for index, outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
                samples[index] = outcome
        return [samples[index] for index in range(count)]

    async def _outcomes(self, run: BatchRun) -> AsyncGenerator[tuple[int, Completion | Exception], None]:
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
        self._doors.check_thread()
        opening, intake = self._life.open_intake()
        window = 2 * self._given.max_running_requests
        if self._given.max_waiting_requests is not None:
            window = max(1, min(window, self._given.max_waiting_requests))
        return BatchRun(
            prompts, params, fields, options, window=window, intake=intake, desk=opening.desk, inbox=opening.inbox
        )

    def abort(self, request_id: str) -> bool:
        """End a request; its stream yields what was delivered. Returns whether it was live and not ended."""
        self._life.check_process()
        opening = self._life.opening
        submission = None if opening is None else opening.desk.find(request_id)
        if opening is None or submission is None or not opening.desk.leave(submission, "aborted"):
            return False
        opening.inbox.post(Cancel((submission,)))
        return True

    # -- looking and tending ---------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine as it was after its last step; never waits."""
        self._life.check_process()
        opening = self._life.opening
        if opening is None:
            return EngineStats(state=self.state)
        snapshot, state = opening.desk.stats, opening.desk.state
        if snapshot.last_step_age_seconds is None and snapshot.state is state:
            return snapshot
        age = None if snapshot.last_step_age_seconds is None else time.monotonic() - snapshot.last_step_age_seconds
        return dataclasses.replace(snapshot, state=state, last_step_age_seconds=age)

    @property
    def config(self) -> EngineConfig:
        """The settings; while the engine is open, with what was chosen at its start filled in."""
        opening = self._life.opening
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
        model = self._life.serving().model
        if model is None:
            raise engine_closed(EngineState.STARTING)
        return model

    def add_step_listener(self, listener: Callable[[StepRecord], object]) -> Callable[[], None]:
        """Have `listener` called on the engine thread with each step's record, after its commit.

        It may call `stats`, `stream` and `abort`, and `close`, which only asks then. It must not block: calls that
        wait for the engine raise WrongThreadError. If it raises it is removed and the error logged.

        Returns:
            A function that removes it.
        """
        loop = self._life.serving().loop
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
        self._doors.check_thread()
        opening = self._life.serving()
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
        self._doors.check_thread()
        opening = self._life.serving()
        opening.desk.move(EngineState.DRAINING)
        opening.inbox.post(Call(lambda: None, Reply()))  # a turn of the loop, in which it sees the state
        return opening.loop.drained

    def warmup(self) -> None:
        """Run a short request, so that the first real one finds everything loaded and compiled. Blocks.

        The vocabulary is read for structured output too, which would hold up all threads for a moment later.
        """
        self._doors.check_thread()
        stream = self.stream([0], _WARMUP)
        while stream.next_blocking() is not None:
            pass
        self._life.open_intake()[1].read_vocabulary()

    async def warmup_async(self) -> None:
        """Same as `warmup`, without blocking the loop."""
        self._doors.check_thread()
        await self.stream([0], _WARMUP).result()
        await anyio.to_thread.run_sync(self._life.open_intake()[1].read_vocabulary)
