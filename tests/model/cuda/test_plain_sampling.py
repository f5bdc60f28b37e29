"""How the fused path draws tokens, by its plain kernels: as often as the exact probabilities say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model.cuda.plain_kernels import PlainKernels
from asyncllm.model.cuda.step_kernels import OptionTables
from asyncllm.model.cuda.step_layout import AskedLayout, Counts, StepLayout
from asyncllm.model.sampler import uniforms
from helpers.draws import assert_drawn_from
from helpers.fused_steps import Sampling, make_config
from helpers.sampling_rules import kept_tokens

if TYPE_CHECKING:
    from asyncllm.model.cuda.step_layout import StepSections

VOCAB, DRAWS = 70, 3_000
KERNELS = PlainKernels(make_config(vocab_size=VOCAB), torch.float32)
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=9),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.7, top_p=0.3),
    Sampling(temperature=1.0, top_p=0.99),
    Sampling(temperature=1.5, top_p=0.7, top_k=12),
    Sampling(temperature=1.0, top_p=0.9, min_p=0.05),
    Sampling(temperature=1.0, top_p=0.7, min_p=0.02),
    Sampling(temperature=2.0, top_p=0.8, top_k=30, min_p=0.1),
]


def make_logits(*, seed: int = 1, ties: bool = False) -> torch.Tensor:
    """Give normal logits, float32 [vocab]; with ties, many are equal."""
    logits = torch.randn(VOCAB, generator=torch.Generator("cpu").manual_seed(seed)) * 2.0
    return logits.round() if ties else logits


def make_inputs(rows: int, sampling: Sampling) -> StepSections[torch.Tensor]:
    """Make a step's inputs in which row i, in slot i, draws with seed i."""
    layout = StepLayout(tokens=rows, rows=rows, tiles=0, writes=1)
    inputs = layout.device(torch.zeros(layout.size, dtype=torch.int32, device="cpu"))
    inputs.counts[Counts.ROWS] = rows
    inputs.slots[:] = inputs.seeds[:] = torch.arange(rows)
    inputs.kv_lens[:] = 9
    inputs.temperatures[:], inputs.top_ps[:] = sampling.temperature, sampling.top_p
    inputs.top_ks[:], inputs.min_ps[:] = sampling.top_k, sampling.min_p
    return inputs


def sampled(logits: torch.Tensor, inputs: StepSections[torch.Tensor]) -> torch.Tensor:
    """Sample all rows; their tokens must be in the token pool, too."""
    rows = len(inputs.slots)
    results = torch.full((2, rows), -1, dtype=torch.int32, device="cpu")
    token_pool = torch.full((rows + 1,), -1, dtype=torch.int32, device="cpu")
    KERNELS.sample(logits.expand(rows, -1), inputs, token_pool, results)
    assert torch.equal(token_pool[inputs.slots.long()], results[0])
    assert results[1].all()
    return results[0]


@pytest.mark.parametrize(
    ("sampling", "ties"),
    [*((each, False) for each in SAMPLINGS), *((each, True) for each in SAMPLINGS[3:8:2])],
    ids=str,
)
def test_draws_are_distributed_as_the_exact_probabilities(sampling: Sampling, ties: bool) -> None:
    """Whatever the attempts that top-p takes; with ties, the last that is kept has equals."""
    logits = make_logits(ties=ties)
    kept = sorted(kept_tokens(logits.double(), sampling))
    expected = np.zeros(VOCAB)
    expected[kept] = (logits[kept].double() / sampling.temperature).softmax(dim=-1).numpy() * DRAWS
    tokens = sampled(logits, make_inputs(DRAWS, sampling))
    assert_drawn_from(expected, np.bincount(tokens.numpy(), minlength=VOCAB).astype(np.float64))


def test_each_attempt_draws_by_a_number_of_its_own() -> None:
    """Uniform each, and the one tells nothing of the other."""
    seeds = np.arange(4096, dtype=np.int64)
    positions = np.full(len(seeds), 5)
    first, second, third = (uniforms(seeds, positions, attempt=attempt) for attempt in range(3))
    for one, other in ((first, second), (first, third), (second, third)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.08
        assert not (one == other).any()
    for each in (first, second, third):
        counts, _ = np.histogram(each, bins=16, range=(0.0, 1.0))
        assert_drawn_from(np.full(16, len(seeds) / 16), counts.astype(np.float64))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.5, top_k=1),
        Sampling(temperature=1.5, top_p=0.0),
        Sampling(temperature=1.5, min_p=1.0),
    ],
    ids=str,
)
def test_a_row_that_keeps_one_token_takes_its_best(sampling: Sampling) -> None:
    logits = make_logits(seed=3)
    assert (sampled(logits, make_inputs(50, sampling)) == logits.argmax()).all()


def test_a_token_depends_on_its_seed_and_position_alone() -> None:
    logits, inputs = make_logits(), make_inputs(64, Sampling(temperature=1.5, top_p=0.9))
    tokens = sampled(logits, inputs)
    assert torch.equal(sampled(logits, inputs), tokens)
    inputs.seeds.copy_(inputs.seeds.flip(0))
    assert torch.equal(sampled(logits, inputs), tokens.flip(0))
    inputs.kv_lens.add_(1)
    assert not torch.equal(sampled(logits, inputs), tokens.flip(0))


def test_a_counted_token_keeps_its_bit_and_stops_at_the_most() -> None:
    starts = [0, 5, -0x8000, 3 - 0x8000, 0x7FFE, 0x7FFF, -1]
    after = [1, 6, 1 - 0x8000, 4 - 0x8000, 0x7FFF, 0x7FFF, -1]
    rows = len(starts)
    layout = AskedLayout(rows=rows + 1)
    asked = layout.device(torch.zeros(layout.size, dtype=torch.int32, device="cpu"))
    asked.counts[Counts.ROWS] = rows
    asked.slots[:rows] = asked.places[:rows] = torch.arange(rows)
    asked.counts_at[:rows] = torch.arange(rows).flip(0)
    asked.masks_at[:rows] = asked.additions_at[:rows] = -1
    asked.repetitions[:rows] = 1.0
    logits = torch.zeros(rows, VOCAB, device="cpu")
    logits[torch.arange(rows), torch.arange(rows) + 20] = 1.0
    counts = torch.zeros(rows, VOCAB, dtype=torch.int16, device="cpu")
    counts[rows - 1 - torch.arange(rows), torch.arange(rows) + 20] = torch.tensor(starts, dtype=torch.int16)
    expected = counts.clone()
    expected[rows - 1 - torch.arange(rows), torch.arange(rows) + 20] = torch.tensor(after, dtype=torch.int16)
    tables = OptionTables(torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, VOCAB), counts)
    results = torch.full((2, rows), 7, dtype=torch.int32, device="cpu")
    pool, edited = torch.zeros(rows, dtype=torch.int32), torch.empty_like(logits)
    KERNELS.choose_asked(logits, asked, tables, edited=edited, token_pool=pool, results=results)
    assert results.tolist() == [[row + 20 for row in range(rows)], [7] * rows]
    assert torch.equal(counts, expected)
