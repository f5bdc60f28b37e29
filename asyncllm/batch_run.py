"""Many prompts of one call: a window of them at a time in the engine, their ends in one mailbox.

Runs in the caller's task or thread; owns what it has submitted and not seen end. Invariant: at most `window`
prompts are tokenized or in the engine, and leaving early cancels all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from asyncllm.errors import InvalidRequestError, RequestError
from asyncllm.inbox import Cancel, Submit
from asyncllm.mailbox import Mailbox
from asyncllm.sampling_params import SamplingParams
from asyncllm.submission import BatchSink, Ended, Submission

if TYPE_CHECKING:
    from asyncllm.front_desk import FrontDesk
    from asyncllm.inbox import Inbox
    from asyncllm.intake import Intake, Prompt, RequestOptions
    from asyncllm.outputs import Completion

__all__ = ["BatchRun", "with_fields"]


class BatchRun:
    """The state of one `generate_all`, `stream_all` or `LLM.generate`.

    Args:
        prompts: any iterable; consumed as there is room.
        params: for all prompts, or one for each.
        fields: single fields of them to replace.
        options: of each request.
        window: most prompts in the engine at once.
        intake, desk, inbox: the engine's.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        fields: Mapping[str, object],
        options: RequestOptions,
        *,
        window: int,
        intake: Intake,
        desk: FrontDesk,
        inbox: Inbox,
    ) -> None:
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise InvalidRequestError(f"prompts must be an iterable of prompts, not {type(prompts).__name__}")
        self.mailbox: Mailbox[tuple[int, Ended]] = Mailbox()
        self._prompts = enumerate(prompts)
        self._params = _each_params(params)
        self._fields = fields
        self._options = options
        self._window = window
        self._intake = intake
        self._desk = desk
        self._inbox = inbox
        self._live: dict[int, Submission] = {}
        self._refused: list[tuple[int, Ended]] = []
        self._exhausted = False

    def pull(self) -> list[tuple[int, Prompt, SamplingParams]]:
        """Take as many prompts from the caller's iterable as there is room for; on the caller's own thread."""
        room = self._window - len(self._live)
        if self._exhausted or room < max(1, self._window // 4):  # refilled by quarters: fewer, larger messages
            return []
        pulled = []
        for index, prompt in itertools.islice(self._prompts, room):
            try:
                params = next(self._params)
            except StopIteration:
                raise InvalidRequestError(f"there are more prompts than params: prompt {index} has none") from None
            pulled.append((index, prompt, params))
        self._exhausted = len(pulled) < room
        return pulled

    def prepare(self, pulled: list[tuple[int, Prompt, SamplingParams]]) -> list[tuple[int, Submission]]:
        """Check and tokenize prompts; may run on a worker thread. Refused ones get their end here."""
        prepared = []
        for index, prompt, params in pulled:
            try:
                submission = self._intake.submission(
                    prompt,
                    with_fields(params, self._fields),
                    self._options,
                    sink=BatchSink(self.mailbox, index),
                    request_id=self._desk.new_id(),
                )
            except RequestError as error:
                self._refused.append((index, Ended(None, error)))
            else:
                prepared.append((index, submission))
        return prepared

    def submit(self, prepared: list[tuple[int, Submission]]) -> None:
        """Hand prompts to the engine as one message."""
        if prepared:
            submissions = tuple(submission for _, submission in prepared)
            self._desk.register(submissions, bounded=False)
            self._live.update(prepared)
            self._inbox.post(Submit(submissions))

    @property
    def going_on(self) -> bool:
        """Whether an end is still to come."""
        return bool(self._live or self._refused)

    def refused(self) -> tuple[int, Ended] | None:
        """Take one prompt that was refused at the call."""
        return self._refused.pop(0) if self._refused else None

    def note(self, index: int, ended: Ended) -> Completion | Exception:
        """Note an end; errors carry their place in the call."""
        self._live.pop(index, None)
        if ended.error is not None:
            if isinstance(ended.error, RequestError):
                ended.error.index = index
            return ended.error
        if ended.completion is None:
            raise RuntimeError(f"prompt {index} ended without completion or error")
        return ended.completion

    def leave(self) -> None:
        """Cancel what is left. Never waits."""
        left = [s for s in self._live.values() if self._desk.leave(s, "aborted")]
        self._live.clear()
        self._exhausted = True
        if left:
            self._inbox.post(Cancel(tuple(left)))


def _each_params(params: SamplingParams | Iterable[SamplingParams] | None) -> Iterator[SamplingParams]:
    if params is None:
        return itertools.repeat(SamplingParams())
    if isinstance(params, SamplingParams):
        return itertools.repeat(params)
    if not isinstance(params, Iterable):
        raise InvalidRequestError(f"params must be SamplingParams, one or one for each prompt, not {params!r}")
    return iter(params)


def with_fields(params: SamplingParams, fields: Mapping[str, object]) -> SamplingParams:
    """Replace single fields of `params`. Raises TypeError for an unknown name, InvalidRequestError for a bad value."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, not {params!r}")
    return dataclasses.replace(params, **fields) if fields else params  # type: ignore[arg-type]  # checked by the call
