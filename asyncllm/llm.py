"""The blocking face of the engine, for scripts, notebooks' plain cells and threads.

Runs on the caller's thread, which it blocks, with or without a running event loop; owns its `Engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from asyncllm.engine import Engine
from asyncllm.intake import RequestOptions
from asyncllm.progress import progress_bar

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from asyncllm.backend import Backend
    from asyncllm.intake import Message, Prompt, SamplingFields
    from asyncllm.outputs import Completion, Token
    from asyncllm.sampling_params import SamplingParams
    from asyncllm.stream import TokenStream

__all__ = ["LLM"]


class LLM:
    """An engine that is opened at once and whose calls block.

    Args:
        model, backend, **fields: as for `Engine`.

    Attributes:
        engine: the engine; its async methods work beside the blocking ones.
    """

    def __init__(self, model: str | os.PathLike[str], *, backend: Backend | None = None, **fields: object) -> None:
        self.engine = Engine(model, backend=backend, **fields)
        self.engine.start_blocking()

    def __repr__(self) -> str:
        return f"<LLM {self.engine!r}>"

    def generate(
        self,
        prompts: Iterable[Prompt] | str,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = True,
        timeout: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Return the completions of many prompts (or of one text), in order.

        Ctrl-C aborts them and is raised; so does the first failure, whose `index` says which prompt.

        Args:
            prompts: texts or sequences of token ids.
            progress: show a bar on a terminal or in a notebook.
            params, timeout, priority, cache_namespace, **fields: as for `Engine.generate_all`.
        """
        each: Iterable[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        options = RequestOptions(timeout=timeout, priority=priority, cache_namespace=cache_namespace)
        run = self.engine.batch_run(each, params, fields, options)
        completions: dict[int, Completion] = {}
        try:
            with progress_bar(each, shown=progress) as bar:
                while True:
                    run.submit(run.prepare(run.pull()))
                    if not run.going_on:
                        break
                    index, ended = run.refused() or run.mailbox.get_blocking()
                    outcome = run.note(index, ended)
                    if isinstance(outcome, Exception):
                        raise outcome
                    completions[index] = outcome
                    bar.update()
        finally:
            run.leave()
        return [completions[index] for index in range(len(completions))]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Iterator[Token]:
        """Yield one request's tokens as they come; leaving the loop ends the request."""
        return _tokens(self.engine.stream(prompt, params, timeout=timeout, **fields))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool = False,
        template_options: Mapping[str, object] | None = None,
        timeout: float | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Iterator[Token]:
        """Yield the tokens of the next message of a conversation; as `Engine.chat` otherwise."""
        stream = self.engine.chat(
            messages,
            params,
            tools=tools,
            continue_final_message=continue_final_message,
            template_options=template_options,
            timeout=timeout,
            **fields,
        )
        return _tokens(stream)

    def close(self) -> None:
        """Close the engine. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _tokens(stream: TokenStream) -> Iterator[Token]:
    try:
        while (token := stream.next_blocking()) is not None:
            yield token
    finally:
        stream.close()
