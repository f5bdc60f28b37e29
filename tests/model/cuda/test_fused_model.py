"""Padded steps of the fused path against transformers: with plain kernels on the CPU, with Triton's on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import pytest
import torch

from helpers.batches import Row
from helpers.fused_steps import FusedSteps
from helpers.model_steps import make_reference, reference_logits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

SHAPE: dict[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 of small heads, tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 of wide heads": ("qwen3", {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("llama", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}),
}
TIMES = 2.5
PROMPTS = {3: [5, 6, 7, 8, 9], 0: [11] * 20, 7: list(range(1, 150, 2)), 9: [44]}


@dataclasses.dataclass(frozen=True)
class Where:
    """What computes."""

    device: str
    dtype: torch.dtype


PLACES = [
    pytest.param(Where("cpu", torch.float32), id="plain float32"),
    pytest.param(Where("cpu", torch.bfloat16), id="plain bfloat16"),
    pytest.param(Where("cuda", torch.bfloat16), id="Triton bfloat16", marks=pytest.mark.gpu),
    pytest.param(Where("cuda", torch.float16), id="Triton float16", marks=pytest.mark.gpu),
]
places = pytest.mark.parametrize("where", PLACES)


def make_steps(where: Where, architecture: str, **options: object) -> FusedSteps:
    """Put a reference behind steps."""
    if where.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    model = reference(architecture, torch.float32)
    return FusedSteps(model, device=torch.device(where.device), dtype=where.dtype, **options)  # type: ignore[arg-type]


def assert_right(got: torch.Tensor, architecture: str, sequences: Mapping[int, list[int]], where: Where) -> None:
    """Compare the logits after each sequence with float32: at most TIMES as far off as transformers itself is.

    Random weights amplify rounding, so there is no tolerance for all models.
    """
    exact, rounded = (
        torch.stack(
            [reference_logits(reference(architecture, dtype), tokens)[-1].float() for tokens in sequences.values()]
        )
        for dtype in (torch.float32, where.dtype)
    )
    allowed = max(1e-5, TIMES * float((rounded - exact).norm() / exact.norm()))
    error = float((got - exact).norm() / exact.norm())
    assert error < allowed, f"relative error {error}, transformers' {allowed / TIMES}"


@functools.cache
def reference(architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model, once."""
    name, fields = ARCHITECTURES[architecture]
    model = make_reference(name, SHAPE | fields)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("where", [PLACES[0], *PLACES[2:]])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_then_decode_steps_of_any_number_of_rows(where: Where, architecture: str) -> None:
    """Also of one row, and of those that lie between two padded sizes."""
    steps = make_steps(where, architecture)
    got = steps.logits([Row(slot, 0, tokens) for slot, tokens in PROMPTS.items()])
    assert_right(got, architecture, PROMPTS, where)
    sequences = {slot: list(tokens) for slot, tokens in PROMPTS.items()}
    for slots in ([3, 7, 9], [0], [9, 0, 3, 7]):
        rows = [Row(slot, len(sequences[slot]), [slot + 1]) for slot in slots]
        for slot in slots:
            sequences[slot].append(slot + 1)
        got = steps.logits(rows)
        assert_right(got, architecture, {slot: sequences[slot] for slot in slots}, where)


@places
def test_a_prompt_in_chunks_beside_decoding_rows(where: Where) -> None:
    steps = make_steps(where, "qwen3")
    steps.logits([Row(1, 0, [3, 4, 5]), Row(2, 0, [7] * 30)])
    prompt = list(range(2, 180))
    got = steps.logits([Row(1, 3, [6]), Row(4, 0, prompt[:50]), Row(2, 30, [8])])
    assert_right(got, "qwen3", {1: [3, 4, 5, 6], 4: prompt[:50], 2: [7] * 30 + [8]}, where)
    got = steps.logits([Row(4, 50, prompt[50:51]), Row(1, 4, [9])])
    assert_right(got, "qwen3", {4: prompt[:51], 1: [3, 4, 5, 6, 9]}, where)
    got = steps.logits([Row(2, 31, [1]), Row(4, 51, prompt[51:])])
    assert_right(got, "qwen3", {2: [7] * 30 + [8, 1], 4: prompt}, where)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_with_invariant_kernels_neighbours_and_chunks_change_no_bit(page_size: int) -> None:
    where = Where("cuda", torch.bfloat16)
    steps = make_steps(where, "qwen3", invariant=True, page_size=page_size)
    prompt = list(range(2, 150))
    alone = steps.logits([Row(0, 0, prompt)])
    then_alone = steps.logits([Row(0, len(prompt), [5])])
    steps.logits([Row(1, 0, prompt[:70]), Row(2, 0, [9] * 33)])
    beside = steps.logits([Row(3, 0, [8] * 40), Row(1, 70, prompt[70:]), Row(2, 33, [1])])
    then_beside = steps.logits([Row(3, 40, [5]), Row(2, 34, [1]), Row(1, len(prompt), [5])])
    assert torch.equal(alone[0], beside[1])
    assert torch.equal(then_alone[0], then_beside[2])
    assert_right(alone, "qwen3", {0: prompt}, where)
