"""What transformers generates, to compare with: greedy, float32, one prompt at a time.

Runs in the tests; owns nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["greedy_reference", "mixed_prompts"]


def greedy_reference(path: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """Return what `generate` of transformers adds to each prompt, end-of-sequence ids ignored."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, gguf_file = (path.parent, path.name) if path.is_file() else (path, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([list(prompt)]), max_new_tokens=max_tokens, do_sample=False, use_cache=True
            )
            answers.append(tuple(ids[0, len(prompt) :].tolist()))
    return answers


def mixed_prompts(count: int, *, vocab_size: int, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Draw prompts of all lengths, of a page and beside a page, some with common beginnings, none with special ids."""
    rng = random.Random(seed)
    lengths = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, *(rng.randint(2, longest) for _ in range(count))]
    shared = [rng.randrange(10, vocab_size) for _ in range(longest)]
    prompts = []
    for number, length in enumerate(lengths[:count]):
        kept = rng.choice((0, 0, length // 2, length)) if number else 0
        own = [rng.randrange(10, vocab_size) for _ in range(length - kept)]
        prompts.append((*shared[:kept], *own))
    return prompts
