"""Text to token ids and back, for one model.

Runs anywhere, in any number of threads at once. Owns a `tokenizers.Tokenizer` without truncation and padding that
nothing changes after construction. Invariant: nothing of a prompt is cut or added silently, and encoding a long text
lets other threads run.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

from asyncllm.errors import InvalidRequestError
from asyncllm.text.clean_up import CleanUpStream
from asyncllm.text.control_tokens import ControlTokens, Marks
from asyncllm.text.decoding import DecodeStream, Decoding
from asyncllm.text.encoding import encode_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import tokenizers

    from asyncllm.text.chat_template import ChatTemplate

__all__ = ["Tokenizer"]


class Tokenizer:
    """A model's tokenizer.

    Args:
        raw: the tokenizer itself, its post-processor adding what the model wants around a plain prompt; taken over.
        eos_token_ids: ids that the tokenizer calls end of sequence.
        bos_token_id: the id that begins a text, None where there is none.
        clean_up_spaces: whether decoding ends with the clean-up of spaces.
        chat_template: renders conversations; None where the model has none.

    Raises:
        ModelLoadError: the tokenizer's decoder is of a kind that is not supported.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        clean_up_spaces: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        raw.no_truncation()
        raw.no_padding()
        self._raw = raw
        self._decoding = Decoding(raw)
        self._clean_up_spaces = clean_up_spaces
        self._chat_template = chat_template
        self._control_tokens = ControlTokens(raw)
        self.eos_token_ids: Final = frozenset(eos_token_ids)
        self.bos_token_id: Final = bos_token_id
        self.vocab_size: Final = raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn a text into token ids; special tokens written in it are recognised.

        Args:
            text: any text.
            add_special_tokens: add what the model wants around a prompt, such as a beginning-of-text id.

        Raises:
            InvalidRequestError: the text holds half a surrogate pair.

        Warns:
            UserWarning: the text begins with the beginning-of-text token that is added as well.
        """
        ids = encode_text(self._raw, text, add_special_tokens=add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            warnings.warn(
                f"the prompt begins with {self._raw.id_to_token(bos)!r}, which is added to every prompt: "
                "it stands there twice; leave it out of the prompt",
                stacklevel=2,
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; ids outside the vocabulary have none."""
        text = self._raw.decode(ids, skip_special_tokens=skip_special_tokens)
        return CleanUpStream().settle(text) if self._clean_up_spaces else text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool = False,
        template_options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Turn a conversation into the ids of a prompt for its next message.

        Args:
            messages: the conversation, each a mapping with "role" and "content".
            tools: descriptions of functions that the model may call, as JSON schemas.
            continue_final_message: leave the last message open, so that the model goes on with it.
            template_options: further variables for the template.

        Raises:
            InvalidRequestError: the model has no chat template, or the template does not take this conversation.
        """
        if self._chat_template is None:
            raise InvalidRequestError("this model has no chat template: give a prompt instead of messages")
        marks = Marks(self._control_tokens)
        text = self._chat_template.render(
            messages,
            tools=tools,
            continue_final_message=continue_final_message,
            options=template_options or {},
            protect=marks.protect,
        )
        return marks.encode(text) if marks.used else self.encode(text, add_special_tokens=False)

    def load_chat_renderer(self) -> None:
        """Import now what the first conversation would have to wait for, if the model has a chat template."""
        if self._chat_template is not None:
            self._chat_template.load_renderer()

    def token_bytes(self) -> list[bytes]:
        """Return what each token adds to a text that has begun, by id; nothing for ids that stand for no token."""
        return self._decoding.token_bytes(self.vocab_size)

    def control_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        """Return those of the texts that are special tokens, by id."""
        ids = self._control_tokens.ids
        return {ids[text]: text for text in texts if text in ids}

    @property
    def control_token_ids(self) -> Collection[int]:
        """The ids of special tokens, which no caller's text can spell."""
        return self._control_tokens.ids.values()

    def decode_stream(self, *, skip_special_tokens: bool) -> DecodeStream:
        """Return what follows a completion token by token, for a `Detokenizer`."""
        return self._decoding.stream(skip_special_tokens=skip_special_tokens)

    def clean_up_stream(self) -> CleanUpStream | None:
        """Return what cleans up a completion's spaces, for a `Detokenizer`; None if the tokenizer does not."""
        return CleanUpStream() if self._clean_up_spaces else None
