"""What rows may ask for beyond temperature and filters, against the plainest statement of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model.batch_tensors import BatchTensors
from asyncllm.model.option_sampler import OptionSampler
from asyncllm.model.sampler import sample
from helpers.batches import Row, make_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from asyncllm.scheduler.batch import Batch, Ints

VOCAB = 70
CPU = torch.device("cpu")


def random_logits(rows: int, *, seed: int = 0) -> torch.Tensor:
    """Give normal logits: float32 [rows, vocab]."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator, dtype=torch.float32, device="cpu") * 2.0


def packed(allowed: npt.NDArray[np.bool_]) -> Ints:
    """Pack flags, bit i % 32 of word i // 32."""
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def batch_of(count: int, *, temperature: float = 1.0, **fields: object) -> Batch:
    """Make a step of rows with one token each; row i draws with seed i."""
    batch = make_batch(0, [Row(slot=row, start=4, tokens=[0], seed=row) for row in range(count)])
    temperatures = np.full(count, temperature, dtype=np.float32)
    return dataclasses.replace(batch, temperatures=temperatures, **fields)


def tokens_of(logits: torch.Tensor, batch: Batch) -> tuple[list[int], list[bool]]:
    """Sample a batch's rows as a step does."""
    staging = BatchTensors(
        num_slots=batch.rows, max_pages=1, max_step_tokens=batch.rows, vocab_size=VOCAB, pinned=False
    )
    staged = staging.stage(batch)
    with torch.inference_mode():
        tokens, finite = sample(logits, staged.on_device(CPU))
        if staged.options is not None:
            asked = OptionSampler(num_slots=batch.rows).sample(logits, staged.options, lambda places: logits[places])
            tokens[asked.places] = asked.tokens
            finite[asked.places] &= asked.left
    return tokens.tolist(), finite.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_row_takes_allowed_tokens_only_and_no_other_row_changes(temperature: float) -> None:
    rng, logits = np.random.default_rng(0), random_logits(60)
    before = logits.clone()
    flags = {row: rng.random(VOCAB) < 0.1 for row in range(0, 60, 3)}
    for row, allowed in flags.items():
        allowed[row % VOCAB] = True
    tokens, finite = tokens_of(
        logits, batch_of(60, temperature=temperature, masks={row: packed(each) for row, each in flags.items()})
    )
    free, _ = tokens_of(logits, batch_of(60, temperature=temperature))
    assert all(finite)
    assert all(flags[row][tokens[row]] for row in flags)
    assert all(tokens[row] == free[row] for row in range(60) if row not in flags)
    if temperature == 0.0:
        best = {row: np.where(each, logits[row].numpy(), -np.inf).argmax() for row, each in flags.items()}
        assert all(tokens[row] == best[row] for row in flags)
    assert torch.equal(logits, before)


def test_a_mask_that_is_short_allows_nothing_past_its_end() -> None:
    allowed = np.ones(32, dtype=np.bool_)
    tokens, _ = tokens_of(random_logits(200), batch_of(200, masks={row: packed(allowed) for row in range(200)}))
    assert max(tokens) < 32
    assert len(set(tokens)) > 20


def test_a_mask_that_allows_nothing_is_told() -> None:
    masks: Mapping[int, Ints] = {1: np.zeros(3, dtype=np.int32)}
    tokens, finite = tokens_of(random_logits(3), batch_of(3, masks=masks))
    assert finite == [True, False, True]
    assert 0 <= tokens[1] < VOCAB
