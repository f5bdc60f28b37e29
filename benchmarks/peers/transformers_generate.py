"""transformers' own generate: one padded batch, tokens noted through a streamer's place in the stopping criteria."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from benchmarks.workloads import Clock, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Work


class Watch(StoppingCriteria):
    """Tells the clock of each step's tokens; never stops."""

    def __init__(self, work: Sequence[Work], clock: Clock) -> None:
        self._left = [one.new_tokens for one in work]
        self._clock = clock

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object) -> torch.BoolTensor:  # noqa: ARG002  # the base's
        """Note the tokens that requests still wait for."""
        for number, left in enumerate(self._left):
            if left:
                self._clock.token(number)
                self._left[number] -= 1
        return torch.BoolTensor([False] * input_ids.shape[0])


def main(model: str, dtype: str, names: str, round_number: str) -> None:
    """Run the workloads once."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 2

    def serve(work: Sequence[Work], clock: Clock) -> None:
        longest = max(len(one.prompt) for one in work)
        ids = torch.tensor([[2] * (longest - len(one.prompt)) + one.prompt for one in work])
        mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in work])
        with torch.inference_mode():
            loaded.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(one.new_tokens for one in work),
                do_sample=False,
                stopping_criteria=[Watch(work, clock)],
            )

    run("transformers", serve, names.split(","), int(round_number))


if __name__ == "__main__":
    main(*sys.argv[1:])
