"""What a scripted model says next: a function of the sequence so far, or replies to prompts.

Runs on the scripted device's thread, which owns the state of replies. Invariant: a row's next token depends on
its own sequence (and, for replies, on the reply that this sequence began) only, never on its neighbours.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from asyncllm.testing import vocabulary
from asyncllm.testing.paged_tokens import digest_weights

if TYPE_CHECKING:
    from asyncllm.testing.paged_tokens import Ints, Rows

__all__ = ["FunctionScript", "HashScript", "HashedTokens", "NextToken", "Replies", "Reply", "ReplyScript", "Script"]

Reply = str | Sequence[int]
"""A text, or exact token ids; the end-of-sequence id follows either."""

Replies = Mapping[str, Reply] | Callable[[str], Reply]
"""A reply by prompt, or a function from prompt to reply."""

NextToken = Callable[[Sequence[int]], int]
"""A function from all tokens of a sequence, the prompt's included, to the next one."""

_PRINTABLE: Final = range(32, 127)
_REMEMBERED: Final = 4096  # by digest, for requests that begin again; more than any test parks
_STEPS_RUN_AGAIN: Final = 2  # where a step failed, it and the one behind it


class Script(Protocol):
    """Chooses tokens."""

    def next_tokens(self, rows: Rows, sampled: Ints, slots: Ints, seeds: Ints) -> list[int]:
        """Choose the next token of the rows named by `sampled`; slots and seeds are theirs, int64 [samples]."""


class HashedTokens:
    """A `NextToken` that hashes the whole sequence: printable, deterministic, different after any difference.

    Args:
        eos_one_in: about one token in so many is the end-of-sequence id; 0: none is.

    Raises:
        ValueError: `eos_one_in` is negative.
    """

    def __init__(self, *, eos_one_in: int = 0) -> None:
        if eos_one_in < 0:
            raise ValueError(f"eos_one_in must be >= 0, not {eos_one_in}")
        self._eos_one_in = eos_one_in

    def __call__(self, tokens: Sequence[int]) -> int:
        """Choose the token after `tokens`."""
        weights = digest_weights(len(tokens))
        parts = (np.asarray(tokens, dtype=np.int64) + 1).astype(np.uint64) * weights
        return self.of_digest(int(parts.sum(dtype=np.uint64)))

    def of_digest(self, digest: int) -> int:
        """Choose the token after a sequence with this digest."""
        mixed = (digest ^ (digest >> 29)) * 0xBF58476D1CE4E5B9 % 2**64 >> 16
        if self._eos_one_in and mixed % self._eos_one_in == 0:
            return vocabulary.EOS_TOKEN_ID
        return _PRINTABLE[(mixed >> 20) % len(_PRINTABLE)]


@dataclasses.dataclass(frozen=True, slots=True)
class HashScript:
    """Hash each row, from the digest that its cells hold anyway."""

    hashed: HashedTokens

    def next_tokens(self, rows: Rows, sampled: Ints, slots: Ints, seeds: Ints) -> list[int]:  # noqa: ARG002
        """See `Script`."""
        return [self.hashed.of_digest(digest) for digest in rows.digests[sampled].tolist()]


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionScript:
    """Call a function for each row."""

    function: NextToken

    def next_tokens(self, rows: Rows, sampled: Ints, slots: Ints, seeds: Ints) -> list[int]:  # noqa: ARG002
        """See `Script`."""
        return list(vocabulary.plain_ids(self.function(rows.sequence(row).tolist()) for row in sampled.tolist()))


_Key = tuple[int, int]  # the seed, and the digest of the sequence


@dataclasses.dataclass(slots=True)
class _Talk:
    """One reply that is being given: how much of it was, and by which names it was known since."""

    reply: tuple[int, ...]
    place: int = 0
    keys: collections.deque[_Key] = dataclasses.field(default_factory=collections.deque)


class ReplyScript:
    """Give each prompt its reply, then end-of-sequence ids.

    A row whose last token the host gave is a new prompt, unless it is what a reply that was cut short had come to
    under the same seed: then it goes on, as a request does that was parked or whose step failed. Any other row goes on.

    Args:
        replies: by prompt, or a function.
        default: for prompts that a mapping does not hold.
    """

    def __init__(self, *, replies: Replies, default: Reply | None) -> None:
        self._replies = replies
        self._default = default
        self._by_slot: dict[int, _Talk] = {}
        self._by_key: dict[_Key, tuple[_Talk, int]] = {}
        self._weights = digest_weights(0)

    def next_tokens(self, rows: Rows, sampled: Ints, slots: Ints, seeds: Ints) -> list[int]:
        """See `Script`.

        Raises:
            LookupError: no reply and no default for a prompt.
        """
        longest = int(rows.lengths.max())
        if longest >= len(self._weights):
            self._weights = digest_weights(2 * longest)
        said = []
        for row, slot, seed in zip(sampled.tolist(), slots.tolist(), seeds.tolist(), strict=True):
            digest = int(rows.digests[row])
            if rows.given[row]:
                self._by_slot[slot] = self._begin(rows.sequence(row).tolist(), (seed, digest))
            talk = self._by_slot[slot]
            token = talk.reply[talk.place] if talk.place < len(talk.reply) else vocabulary.EOS_TOKEN_ID
            talk.place += 1
            self._remember(talk, (seed, (digest + (token + 1) * int(self._weights[rows.lengths[row]])) % 2**64))
            said.append(token)
        return said

    def _remember(self, talk: _Talk, key: _Key) -> None:
        self._by_key[key] = (talk, talk.place)
        talk.keys.append(key)
        if len(talk.keys) > _STEPS_RUN_AGAIN + 1:
            self._by_key.pop(talk.keys.popleft(), None)
        if len(self._by_key) > _REMEMBERED:
            del self._by_key[next(iter(self._by_key))]

    def _begin(self, prompt: list[int], key: _Key) -> _Talk:
        talk, place = self._by_key.get(key, (None, 0))
        if talk is not None and place < len(talk.reply):
            talk.place = place
            return talk
        reply = self._reply(prompt)
        return _Talk(vocabulary.encode(reply) if isinstance(reply, str) else vocabulary.plain_ids(reply))

    def _reply(self, prompt: list[int]) -> Reply:
        text = vocabulary.prompt_text(prompt)
        if not isinstance(self._replies, Mapping):
            return self._replies(text)
        for key in (text, vocabulary.last_message(prompt)):
            if key is not None and key in self._replies:
                return self._replies[key]
        if self._default is None:
            known = ", ".join(repr(key) for key in list(self._replies)[:5])
            raise LookupError(f"no reply for the prompt {text!r}, and no default; there are replies for {known}")
        return self._default
