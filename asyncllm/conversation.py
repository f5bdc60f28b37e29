"""A conversation that remembers itself.

Runs in the caller's task, on any loop; owns its history and nothing of the engine's. Invariant: the history holds
whole turns only: what was said, together with the answer, once the answer is complete.

Each turn sends the whole history. The engine's prefix cache has what was computed in the turns before, the answers'
tokens included, so that only what is new is computed; `usage.cached_tokens` says how much that saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from asyncllm.intake import mappings

if TYPE_CHECKING:
    from asyncllm.engine import Engine
    from asyncllm.intake import Message, SamplingFields
    from asyncllm.outputs import Completion
    from asyncllm.sampling_params import SamplingParams
    from asyncllm.stream import TokenStream

__all__ = ["Conversation"]


class Conversation:
    """Talk with a model, one turn after the other.

    Args:
        engine: whose model answers.
        messages: what was said before, oldest first; copied.
        system: the system message, put before them; None: none.
        tools: as for `Engine.chat`, in every turn.
        template_options: as for `Engine.chat`, in every turn.
        params: of every turn, unless a turn has its own.

    Attributes:
        messages: the history; may be changed between turns.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Message] = (),
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_options: Mapping[str, object] | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages += mappings("messages", messages)
        self._engine = engine
        self._tools = tools
        self._template_options = template_options
        self._params = params

    def send(
        self,
        message: str | Message | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        buffer_tokens: int | None = None,
        **fields: Unpack[SamplingFields],
    ) -> TokenStream:
        """Say something and return the answer's tokens as they come.

        Both join the history when the answer's end is read. A turn that is left early, aborted, or that fails leaves
        the history as it was.

        Args:
            message: a text that the user says, or messages, such as the results of functions (`ToolCall.message`).
            params, timeout, buffer_tokens, **fields: as for `Engine.chat`.

        Raises:
            InvalidRequestError, QueueFullError, EngineError: as `Engine.chat` does.
        """
        said: list[Message]
        if isinstance(message, str):
            said = [{"role": "user", "content": message}]
        else:
            said = [message] if isinstance(message, Mapping) else list(mappings("message", message))
        stream = self._engine.chat(
            [*self.messages, *said],
            self._params if params is None else params,
            tools=self._tools,
            template_options=self._template_options,
            timeout=timeout,
            buffer_tokens=buffer_tokens,
            **fields,
        )
        stream.add_done_callback(lambda completion: self._remember(said, completion))
        return stream

    async def ask(
        self,
        message: str | Message | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion:
        """Say something and return the whole answer; arguments and errors as for `send`.

        Raises:
            DeadlineExceededError: the timeout has passed; carries the partial completion.
            RequestFailedError: the request failed alone.
        """
        async with self.send(message, params, timeout=timeout, **fields) as stream:
            return await stream.result()

    def _remember(self, said: Sequence[Message], completion: Completion) -> None:
        if completion.finish_reason not in ("stop", "length"):
            return
        answer: dict[str, object] = {"role": "assistant", "content": completion.content}
        if completion.tool_calls:
            answer["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in completion.tool_calls
            ]
        self.messages += [*said, answer]
