"""Attention in plain torch, what a GPU falls back to: against transformers, here on the CPU."""

from __future__ import annotations

import pytest
import torch

from asyncllm.model.attention.gathering import GatheringAttention
from helpers.batches import Row
from helpers.model_steps import TinyDecoder, make_reference, reference_logits


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_chunks_and_decoding_rows_beside_each_other(page_size: int, kv_heads: int) -> None:
    model = make_reference("llama", {"num_key_value_heads": kv_heads})
    steps = TinyDecoder(model, page_size=page_size, attention=GatheringAttention())
    prompt, other = list(range(3, 73)), [9, 8, 7]
    steps.logits([Row(0, 0, prompt[:30]), Row(1, 0, other)])
    got = steps.logits([Row(1, 3, [6]), Row(0, 30, prompt[30:])])
    expected = torch.cat([reference_logits(model, [*other, 6])[-1:], reference_logits(model, prompt)[30:]])
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-4)
