"""What each committed token means for its request's text: what to show, and whether it ends.

Runs on the engine thread; a `TextProgress` is owned by one request. Invariant: the texts of all steps, joined, are
the completion's text, up to the first thing that ended it; the last step leaves nothing held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.stop_strings import Released, StopMatcher

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from asyncllm.outputs import ToolCallDelta
    from asyncllm.text.tokenizer import Tokenizer
    from asyncllm.text.tool_calls import ToolCallParser

__all__ = ["TextProgress", "TextStep"]


class TextStep(NamedTuple):
    """What one token brought. A named tuple, since one is made per request and step.

    Args:
        text: text that became certain.
        finish_reason: "stop" or "length" if this token ends the request, else None.
        stop_reason: the stop text or stop id that ended it; None for an end-of-sequence id.
        content: where function calls are looked for, the text outside of them; else None.
        tool_calls: parts of function calls.
    """

    text: str
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()


_NOTHING: Final = TextStep("")


class TextProgress:
    """Follow one completion, token by token.

    Args:
        tokenizer: None where there is no text (ids only); then `stop_texts` must be empty.
        prompt_ids: the prompt's tokens, whose text the completion's continues.
        stop_texts: texts that end the request, none empty.
        stop_ids: ids that end it and are named as its `stop_reason`.
        eos_token_ids: ids that end it without one; empty to ignore them.
        include_stop: show the text of what ended it: a stop text, a stop id's, and, where special tokens are shown,
            an end-of-sequence id's.
        skip_special_tokens: leave out the text of special tokens.
        max_tokens: tokens after which it ends.
        min_tokens: stop texts that are complete with so many tokens or fewer do not count.
        tools: finds function calls in its text; None: they are not looked for.
    """

    __slots__ = ("_early", "_eos_token_ids", "_include_stop", "_left", "_show_eos", "_stop_ids", "_text", "tools")

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        *,
        stop_texts: Sequence[str],
        stop_ids: Collection[int],
        eos_token_ids: Collection[int],
        include_stop: bool,
        skip_special_tokens: bool,
        max_tokens: int,
        min_tokens: int = 0,
        tools: ToolCallParser | None = None,
    ) -> None:
        self.tools = tools
        self._text = (
            None
            if tokenizer is None
            else _StoppableText(
                Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens),
                StopMatcher(stop_texts, include=include_stop),
            )
        )
        self._stop_ids = frozenset(stop_ids)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._include_stop = include_stop
        self._show_eos = include_stop and not skip_special_tokens
        self._left = max_tokens
        self._early = min_tokens

    def advance(self, token_id: int) -> TextStep:
        """Take the next committed token. Not to be called again after a step with a `finish_reason`."""
        step = self._advance(token_id)
        if self.tools is None:
            return step
        told = self.tools.add(token_id, step.text)
        content, deltas = told.content, told.deltas
        if step.finish_reason is not None:
            told = self.tools.finish()
            content, deltas = content + told.content, deltas + told.deltas
        return TextStep(step.text, step.finish_reason, step.stop_reason, content, deltas)

    def _advance(self, token_id: int) -> TextStep:
        self._left -= 1
        self._early -= 1
        is_stop_id = token_id in self._stop_ids
        ends = is_stop_id or token_id in self._eos_token_ids
        text, stop = "", None
        if self._text is not None:
            if not ends or (self._include_stop if is_stop_id else self._show_eos):
                text, stop = self._text.add(token_id, stoppable=self._early < 0)
            if stop is None and self.tools is not None and token_id in self.tools.marks:
                text += self._text.break_off()  # it stands before the mark, which is no text
            if stop is None and (ends or self._left <= 0):
                rest, stop = self._text.finish(stoppable=self._early < 0)
                text += rest
        if stop is not None:
            return TextStep(text, "stop", stop)
        if ends:
            return TextStep(text, "stop", token_id if is_stop_id else None)
        if self._left <= 0:
            return TextStep(text, "length")
        return TextStep(text) if text else _NOTHING


class _StoppableText:
    """A completion's text, up to the first stop text; both methods return the text that is certain and that stop."""

    __slots__ = ("_detokenizer", "_early", "_matcher")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._early = ""  # text that was complete when stops did not count yet, and is still held back

    def add(self, token_id: int, *, stoppable: bool) -> tuple[str, str | None]:
        text = self._detokenizer.add(token_id)
        if not self._matcher.stops:
            return text, None
        if not stoppable:
            self._early = self._detokenizer.pending() or ("" if text else self._early)
            return self._matcher.pass_over(text), None
        released = self._feed(text)
        if released.stop is None:
            # A stop in text that a later token could still change counts: ending here makes that text certain.
            pending = self._detokenizer.pending()
            if pending and self._matcher.completes(pending, after=len(self._early)):
                rest, stop = self.finish(stoppable=True)
                return released.text + rest, stop
        return released.text, released.stop

    def _feed(self, text: str) -> Released:
        early, self._early = self._early, ""
        known = text[: len(early)]
        if not early.startswith(known):  # a later token changed it: as it is now, it was not complete
            known = ""
        else:
            self._early = early[len(known) :]
        before = self._matcher.pass_over(known) if known else ""
        released = self._matcher.feed(text[len(known) :])
        return Released(before + released.text, released.stop)

    def break_off(self) -> str:
        return self._matcher.break_off()

    def finish(self, *, stoppable: bool) -> tuple[str, str | None]:
        text = self._detokenizer.finish()
        released = self._feed(text) if stoppable else Released(self._matcher.pass_over(text), None)
        if released.stop is None:
            return released.text + self._matcher.finish(), None
        return released.text, released.stop
