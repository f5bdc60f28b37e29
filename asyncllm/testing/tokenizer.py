"""The scripted model's tokenizer, built of the vocabulary by the library that real ones use.

Runs where the model is opened; owns nothing. Imported when a model opens only, since `tokenizers` takes a while.
"""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from asyncllm.testing import vocabulary
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["make_tokenizer"]


def make_tokenizer() -> Tokenizer:
    """Make a byte-level tokenizer without merges: the id of a byte is the byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in alphabet if ord(character) < vocabulary.BYTES}
    stand_ins = iter(alphabet[len(printable) :])
    names = [chr(byte) if byte in printable else next(stand_ins) for byte in range(vocabulary.BYTES)]
    raw = RawTokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(names)}, merges=[]))
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in vocabulary.SPECIAL_TOKENS])
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    begin = vocabulary.SPECIAL_TOKENS[0]
    raw.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary.BOS_TOKEN_ID)]
    )
    return Tokenizer(
        raw,
        eos_token_ids=(vocabulary.EOS_TOKEN_ID,),
        bos_token_id=vocabulary.BOS_TOKEN_ID,
        chat_template=ChatTemplate({"default": vocabulary.CHAT_TEMPLATE}, special_tokens={"bos_token": begin}),
    )
