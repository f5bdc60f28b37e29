"""Small random checkpoints with a small trained tokenizer, as transformers writes them.

Runs in the tests. Owns nothing: each call fills a folder of its own. Same arguments, same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ARCHITECTURES", "CHAT_TEMPLATE", "write_tiny_model", "write_tiny_tokenizer"]

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCAB_SIZE: Final = 384
_CORPUS: Final = (
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "A request waits until its pages are there; then it runs, and its pages come back.",
    "def add(a, b):\n    return a + b\n",
    "Streams end: by a stop text, by length, by leaving them. 0 1 2 3 4 5 6 7 8 9",
    "naïve café — ünïcödé 你好 世界 🙂",
)


def write_tiny_tokenizer(folder: Path) -> int:
    """Train a byte-level BPE tokenizer with a chat template and save it into `folder`; return its vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_tiny_model(folder: Path, architecture: str = "llama", *, seed: int = 2, **config_fields: object) -> None:
    """Write a random float32 checkpoint of two layers and 512 positions, with its tokenizer, into `folder`.

    Args:
        folder: an empty folder.
        architecture: a model type of transformers.
        seed: of the weights; with the usual one greedy answers are long.
        config_fields: fields of the model's config that differ from the usual tiny ones.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab_size = write_tiny_tokenizer(folder)
    fields: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.5,  # far from uniform logits: greedy tokens are well apart and do not repeat at once
        "bos_token_id": None,
        "eos_token_id": _SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": _SPECIAL_TOKENS.index("<|endoftext|>"),
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(architecture, **(fields | config_fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
