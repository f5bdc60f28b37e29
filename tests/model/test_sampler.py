"""The sampler against exact probabilities in float64, and against everything that a row must not depend on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model import sampler
from asyncllm.model.batch_tensors import BatchTensors
from asyncllm.model.sampler import sample, uniforms
from asyncllm.scheduler.batch import Batch
from helpers.draws import assert_drawn_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

VOCAB = 60
DRAWS = 8_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How one row's token is chosen."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


def choose(
    logits: torch.Tensor, asks: Sequence[Ask], positions: Sequence[int] | None = None
) -> tuple[list[int], list[bool]]:
    """Sample rows by way of a staged batch, as a step does; a row's draw is for this position (1)."""
    count, vocab = logits.shape
    batch = Batch(
        index=0,
        slots=np.arange(count, dtype=np.int32),
        starts=np.array(positions if positions is not None else np.ones(count), dtype=np.int32) - 1,
        query_lens=np.ones(count, dtype=np.int32),
        token_ids=np.zeros(count, dtype=np.int32),
        sample_rows=np.arange(count, dtype=np.int32),
        temperatures=np.array([ask.temperature for ask in asks], dtype=np.float32),
        top_ps=np.array([ask.top_p for ask in asks], dtype=np.float32),
        top_ks=np.array([ask.top_k for ask in asks], dtype=np.int32),
        min_ps=np.array([ask.min_p for ask in asks], dtype=np.float32),
        seeds=np.array([ask.seed for ask in asks], dtype=np.int64),
        table_writes=np.zeros((3, 0), dtype=np.int32),
        page_copies=np.zeros((2, 0), dtype=np.int32),
    )
    staging = BatchTensors(num_slots=count, max_pages=1, max_step_tokens=count, vocab_size=vocab, pinned=False)
    with torch.inference_mode():
        tokens, finite = sample(logits, staging.stage(batch).on_device(torch.device("cpu")))
    return tokens.tolist(), finite.tolist()


def random_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Give normal logits: float32 [rows, vocab]."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator, dtype=torch.float32, device="cpu") * scale


def exact(logits: npt.NDArray[np.float64], ask: Ask) -> npt.NDArray[np.float64]:
    """Return the probabilities that the documented rules give, by the plainest code: float64 [vocab]."""
    scaled = logits / ask.temperature
    weights = np.exp(scaled - scaled.max())
    if 0 < ask.top_k < len(weights):
        weights = np.where(weights >= np.sort(weights)[-ask.top_k], weights, 0.0)
    if ask.top_p < 1.0:
        mass, last = 0.0, weights.max()
        for weight in np.sort(weights)[::-1]:
            if mass >= ask.top_p * weights.sum():
                break
            mass, last = mass + weight, weight
        weights = np.where(weights >= last, weights, 0.0)
    weights = np.where(weights >= ask.min_p * weights.max(), weights, 0.0)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


CASES = {
    "plain": Ask(),
    "temperature below 1": Ask(temperature=0.4),
    "temperature above 1": Ask(temperature=2.5),
    "top-k": Ask(top_k=5),
    "top-p": Ask(top_p=0.7),
    "min-p": Ask(min_p=0.1),
    "temperature and top-k": Ask(temperature=1.8, top_k=7),
    "temperature and top-p": Ask(temperature=1.8, top_p=0.6),
    "temperature and min-p": Ask(temperature=1.8, min_p=0.2),
    "top-k and top-p": Ask(top_k=8, top_p=0.8),
    "top-k and min-p": Ask(top_k=6, min_p=0.05),
    "top-p and min-p": Ask(top_p=0.9, min_p=0.15),
    "all": Ask(temperature=1.5, top_k=20, top_p=0.85, min_p=0.04),
}


FEW = 64
# At nearly uniform probabilities these keep more tokens than that.
WIDE_CASES = {
    "many by top-k": Ask(temperature=8.0, top_k=400),
    "many by top-p": Ask(temperature=8.0, top_p=0.8),
    "many by min-p": Ask(temperature=8.0, min_p=0.2),
    "few by top-p of many by top-k": Ask(temperature=8.0, top_k=400, top_p=0.4),
}


@pytest.mark.parametrize(
    ("name", "vocab"), [*((name, VOCAB) for name in CASES), *((name, 700) for name in (*CASES, *WIDE_CASES))]
)
def test_draws_are_distributed_as_the_exact_probabilities(
    name: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chi-square test of many draws: none outside what is kept, and within five deviations of the mean inside."""
    monkeypatch.setattr(sampler, "_CANDIDATES", FEW)
    ask = (CASES | WIDE_CASES)[name]
    logits = random_logits(1, vocab, seed=1)
    expected = exact(logits[0].double().numpy(), ask) * DRAWS
    rows = 500
    counts = np.zeros(vocab)
    for first in range(0, DRAWS, rows):
        asks = [dataclasses.replace(ask, seed=first + row) for row in range(rows)]
        tokens, _ = choose(logits.expand(rows, -1), asks)
        counts += np.bincount(tokens, minlength=vocab)
    assert_drawn_from(expected, counts)


def test_rows_of_all_kinds_meet_in_one_batch_and_are_what_they_are_alone() -> None:
    asks = [dataclasses.replace(ask, seed=place) for place, ask in enumerate(CASES.values())]
    asks += [Ask(temperature=0.0), Ask(top_k=400), Ask(top_p=0.999), Ask(top_k=1), Ask(top_p=0.0)]
    logits = random_logits(len(asks), 700, seed=2)
    together, _ = choose(logits, asks)
    alone = [choose(logits[row : row + 1], [ask])[0][0] for row, ask in enumerate(asks)]
    assert together == alone


@pytest.mark.parametrize("few", [1, 7, FEW])
def test_how_many_candidates_are_looked_at_first_changes_no_token(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [*CASES.values(), *WIDE_CASES.values(), Ask(top_p=0.0), Ask(top_k=1), Ask(min_p=1.0)]
    asks = [dataclasses.replace(ask, seed=seed) for ask in cases for seed in range(5)]
    logits = random_logits(len(asks), 700, seed=9)
    expected, _ = choose(logits, asks)
    monkeypatch.setattr(sampler, "_CANDIDATES", few)
    assert choose(logits, asks)[0] == expected


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1000])
def test_a_draw_is_where_its_number_falls_in_the_vocabularys_order_and_never_at_a_weight_of_zero(vocab: int) -> None:
    rng, rows = np.random.default_rng(vocab), 500
    weights = rng.random((rows, vocab)) ** 8 * (rng.random((rows, vocab)) < rng.random((rows, 1)))
    weights[np.arange(rows), rng.integers(vocab, size=rows)] = 1.0
    numbers = rng.random(rows).astype(np.float32)
    numbers[::5], numbers[1::5] = 0.0, 1.0 - 2.0**-24  # the ends of the range
    weights = weights.astype(np.float32)
    places = sampler._draw(torch.from_numpy(weights), torch.from_numpy(numbers)).numpy()
    ends = weights.astype(np.float64).cumsum(axis=1)
    targets, rounding = numbers * ends[:, -1], 1e-5 * ends[:, -1]
    at = np.arange(rows)
    assert (weights[at, places] > 0.0).all()
    assert (targets < ends[at, places] + rounding).all()
    assert (targets >= ends[at, places] - weights[at, places] - rounding).all()


def test_the_order_of_a_batch_changes_no_row() -> None:
    asks = [dataclasses.replace(ask, seed=place) for place, ask in enumerate(CASES.values())]
    logits, positions = random_logits(len(asks), seed=3), list(range(5, 5 + len(asks)))
    tokens, _ = choose(logits, asks, positions)
    order = np.random.default_rng(0).permutation(len(asks))
    permuted, _ = choose(logits[order], [asks[row] for row in order], [positions[row] for row in order])
    assert permuted == [tokens[row] for row in order]


def test_a_draw_depends_on_seed_and_position() -> None:
    logits = random_logits(1).expand(200, -1)
    same, _ = choose(logits, [Ask(seed=7)] * 200, [9] * 200)
    assert len(set(same)) == 1
    by_seed, _ = choose(logits, [Ask(seed=seed) for seed in range(200)], [9] * 200)
    by_position, _ = choose(logits, [Ask(seed=7)] * 200, list(range(1, 201)))
    assert len(set(by_seed)) > 20
    assert len(set(by_position)) > 20


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.01}])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float, filters: dict[str, float]) -> None:
    logits = random_logits(50, 700, seed=4, scale=30.0)
    ask = Ask(temperature=temperature, top_p=filters.get("top_p", 1.0), top_k=int(filters.get("top_k", 0)))
    tokens, finite = choose(logits, [dataclasses.replace(ask, seed=row) for row in range(50)])
    assert tokens == logits.argmax(dim=-1).tolist()
    assert all(finite)


def test_just_below_the_least_temperature_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(40, VOCAB, device="cpu")
    logits[:, 10:20] = 1.0
    assert choose(logits, [Ask(temperature=0.99e-5, seed=row) for row in range(40)])[0] == [10] * 40
    drawn = choose(logits, [Ask(temperature=1.01e-5, seed=row) for row in range(40)])[0]
    assert set(drawn) <= set(range(10, 20))
    assert len(set(drawn)) > 3


@pytest.mark.parametrize("ask", [Ask(top_p=0.0), Ask(top_p=1e-9), Ask(top_k=1), Ask(min_p=1.0)], ids=repr)
def test_the_strictest_filters_keep_the_best_token(ask: Ask) -> None:
    logits = random_logits(50, 700, seed=5)
    tokens, _ = choose(logits, [dataclasses.replace(ask, seed=row) for row in range(50)])
    assert tokens == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("ask", [Ask(top_k=VOCAB), Ask(top_k=VOCAB + 5), Ask(top_k=0), Ask(top_p=1.0)], ids=repr)
def test_filters_that_are_off_change_nothing(ask: Ask) -> None:
    logits = random_logits(50, seed=6)
    plain, _ = choose(logits, [Ask(seed=row) for row in range(50)])
    assert choose(logits, [dataclasses.replace(ask, seed=row) for row in range(50)])[0] == plain


@pytest.mark.parametrize("ask", [Ask(top_k=3), Ask(top_p=0.3), Ask(top_k=4, top_p=0.5)], ids=repr)
def test_equal_logits_stand_or_fall_together(ask: Ask) -> None:
    """The best, then four equal ones of which the filter's edge takes some: all stay."""
    logits = torch.full((1, 700), -3.0, device="cpu")
    logits[0, [5, 100, 300, 500, 650]] = torch.tensor([2.2, 2.0, 2.0, 2.0, 2.0])
    tokens, _ = choose(logits.expand(2000, -1), [dataclasses.replace(ask, seed=row) for row in range(2000)])
    assert len(set(tokens)) == 5


def test_more_equal_logits_than_candidates_all_stay() -> None:
    logits = torch.zeros(1, 700, device="cpu")
    tokens, _ = choose(logits.expand(2000, -1), [Ask(top_k=10, seed=row) for row in range(2000)])
    assert len(set(tokens)) > 600
    tokens, _ = choose(logits.expand(2000, -1), [Ask(top_k=10, top_p=0.5, seed=row) for row in range(2000)])
    assert max(tokens) > 600


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ask", [Ask(temperature=0.0), Ask(), Ask(top_p=0.9)], ids=["greedy", "plain", "filtered"])
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(ask: Ask, dtype: torch.dtype, bad: float) -> None:
    logits = random_logits(3, seed=7).to(dtype)
    expected, _ = choose(logits, [ask] * 3)
    logits[1, 17] = bad
    tokens, finite = choose(logits, [ask] * 3)
    assert finite == [True, False, True]
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]
    assert 0 <= tokens[1] < VOCAB


def test_large_finite_float16_logits_are_finite() -> None:
    """Their sum is beyond float16."""
    _, finite = choose(torch.full((1, 700), 200.0, dtype=torch.float16, device="cpu"), [Ask(temperature=0.0)])
    assert finite == [True]


def test_logits_are_not_changed() -> None:
    logits = random_logits(3, seed=8)
    before = logits.clone()
    choose(logits, [Ask(temperature=0.0), Ask(), Ask(top_p=0.5)])
    assert torch.equal(logits, before)


def test_uniform_numbers_are_uniform_and_independent_of_seed_and_position() -> None:
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300))
    numbers = uniforms(seeds.ravel().astype(np.int64), positions.ravel())
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    grid = numbers.reshape(300, 300)
    for table in (grid, grid[1:] - grid[:-1], grid[:, 1:] - grid[:, :-1]):  # neighbours differ by no pattern
        bins, _ = np.histogram(table % 1.0, bins=64, range=(0.0, 1.0))
        expected = table.size / 64
        assert abs(((bins - expected) ** 2 / expected).sum() - 63) < 5 * (2 * 63) ** 0.5
    assert abs(np.corrcoef(grid[1:].ravel(), grid[:-1].ravel())[0, 1]) < 0.02


def test_uniform_numbers_are_these() -> None:
    """They may never change: a seed's completion is promised to stay."""
    numbers = uniforms(np.array([0, 1, 2**62], dtype=np.int64), np.array([1, 1, 4000], dtype=np.int32))
    assert (numbers * 2**24).astype(np.int64).tolist() == [10946269, 6177195, 2874969]
