"""What rows may ask for beyond temperature and filters, against the plainest statement of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model import option_sampler
from asyncllm.model.batch_tensors import BatchTensors
from asyncllm.model.option_sampler import OptionSampler
from asyncllm.model.sampler import sample
from asyncllm.request import LogitOptions
from asyncllm.scheduler.batch import PromptScores, StepResult
from helpers.batches import Row, make_batch
from helpers.draws import assert_drawn_from

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


def batch_of(count: int, *, temperature: float = 1.0, masks: Mapping[int, Ints] | None = None) -> Batch:
    """Make a step of rows with one token each; row i draws with seed i."""
    batch = make_batch(0, [Row(slot=row, start=4, tokens=[0], seed=row) for row in range(count)])
    temperatures = np.full(count, temperature, dtype=np.float32)
    return dataclasses.replace(batch, temperatures=temperatures, masks=masks or {})


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


def test_a_row_with_two_masks_takes_what_both_allow() -> None:
    flags = np.random.default_rng(3).random((2, VOCAB)) < 0.4
    options = LogitOptions(prompt_tokens=1, mask=packed(flags[1]))
    batch = dataclasses.replace(
        batch_of(300, masks={row: packed(flags[0]) for row in range(200)}),
        options=dict.fromkeys(range(100, 300), options),
    )
    tokens, finite = tokens_of(random_logits(1).expand(300, -1), batch)
    assert all(finite)
    for rows, allowed in ((slice(100), flags[0]), (slice(100, 200), flags[0] & flags[1]), (slice(200, 300), flags[1])):
        assert allowed[tokens[rows]].all()
        assert len(set(tokens[rows])) > 3


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70, 1000])
def test_both_ways_to_mask_drop_the_same_tokens_and_leave_the_others_bits(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    flags, rows = rng.random((5, vocab)) < 0.5, torch.tensor([6, 0, 3, 8, 5])
    masks = torch.from_numpy(np.stack([packed(each) for each in flags]))
    logits = torch.from_numpy(rng.normal(size=(9, vocab)).astype(np.float32))
    logits[:, 0] = torch.tensor([0.0, -0.0, 1e38, -1e38, torch.inf, -torch.inf, -0.0, 1e-45, -1e-45])
    expected = logits.numpy().copy()
    for row, allowed in zip(rows.tolist(), flags, strict=True):
        expected[row][~allowed] = -np.inf
    for way in (option_sampler._mask_by_bits, option_sampler._mask_by_bytes):
        masked = logits.clone()
        way(masked, rows, masks)
        assert masked.numpy().tobytes() == expected.tobytes()


def test_a_mask_that_allows_nothing_is_told() -> None:
    masks: Mapping[int, Ints] = {1: np.zeros(3, dtype=np.int32)}
    tokens, finite = tokens_of(random_logits(3), batch_of(3, masks=masks))
    assert finite == [True, False, True]
    assert 0 <= tokens[1] < VOCAB


# -- options, against the plainest statement of them in float64 --------------------------------------------------

DRAWS = 8_000
PROMPT, GENERATED = [3, 9, 9, 40], [9, 11, 11, 60, 11]
HISTORY = np.array(PROMPT + GENERATED, dtype=np.int32)
POSITION = len(HISTORY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Temperature and filters of a case."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def ids(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def asked(**fields: object) -> LogitOptions:
    return LogitOptions(prompt_tokens=len(PROMPT), **fields)  # type: ignore[arg-type]  # names of fields


BIASES: dict[str, object] = {"bias_ids": ids(5, 9, 33), "biases": np.array([3.0, -1.0, -np.inf], dtype=np.float32)}
LATE: dict[str, object] = {"late_ids": ids(2, 9), "first_end": POSITION + 1}
OPTIONS: dict[str, dict[str, object]] = {
    "repetition": {"repetition_penalty": 1.7},
    "a repetition penalty that rewards": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "a negative frequency penalty": {"frequency_penalty": -0.8},
    "bias and ban": BIASES,
    "allowed": {"allowed_ids": ids(1, 9, 11, 33, 50)},
    "too early to end": LATE,
    "repetition and presence": {"repetition_penalty": 1.7, "presence_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.8},
    "repetition and bias": {"repetition_penalty": 1.7, **BIASES},
    "frequency and allowed": {"frequency_penalty": 0.8, "allowed_ids": ids(1, 9, 11, 33, 50)},
    "bias and allowed": {"allowed_ids": ids(5, 9, 33, 50), **BIASES},
    "allowed and too early": {"allowed_ids": ids(2, 9, 33, 50), **LATE},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "allowed_ids": np.arange(40, dtype=np.int32),
        **BIASES,
        **LATE,
    },
}
FILTERS = {
    "plain": Draw(),
    "temperature": Draw(temperature=0.6),
    "top-k": Draw(top_k=9),
    "top-p": Draw(top_p=0.8),
    "min-p": Draw(min_p=0.05),
    "temperature, top-k and top-p": Draw(temperature=1.5, top_k=12, top_p=0.9),
}
CASES = [(name, "plain") for name in OPTIONS] + [(name, each) for name in ("all", "frequency") for each in FILTERS]


def edited(logits: npt.NDArray[np.float64], options: LogitOptions) -> npt.NDArray[np.float64]:
    """Apply the documented rules before temperature, one token after the other."""
    changed = logits.copy()
    for token in range(len(changed)):
        if options.allowed_ids is not None and token not in options.allowed_ids:
            changed[token] = -np.inf
        if token in options.late_ids and options.first_end > POSITION:
            changed[token] = -np.inf
        for biased, bias in zip(options.bias_ids, options.biases, strict=True):
            changed[token] += bias if token == biased else 0.0
        if token in HISTORY:
            penalty = options.repetition_penalty
            changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
        count = GENERATED.count(token)
        changed[token] -= options.frequency_penalty * count + options.presence_penalty * (count > 0)
    return changed


def exact(logits: npt.NDArray[np.float64], options: LogitOptions, draw: Draw) -> npt.NDArray[np.float64]:
    """Return the probabilities that the documented rules give: float64 [vocab]."""
    scaled = edited(logits, options) / draw.temperature
    weights = np.exp(scaled - scaled.max())
    if draw.top_k:
        weights = np.where(weights >= np.sort(weights)[-draw.top_k], weights, 0.0)
    if draw.top_p < 1.0:
        ordered = np.sort(weights)[::-1]
        before = np.cumsum(ordered) - ordered
        weights = np.where(weights >= ordered[before < draw.top_p * weights.sum()][-1], weights, 0.0)
    weights = np.where(weights >= draw.min_p * weights.max(), weights, 0.0)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def asking_batch(count: int, options: Mapping[int, LogitOptions], draw: Draw | None = None, *, seed: int = 0) -> Batch:
    """Make a step of rows that continue the history; row i draws with this seed and i more."""
    draw = draw or Draw()
    batch = make_batch(0, [Row(slot=row, start=POSITION - 1, tokens=[0], seed=seed + row) for row in range(count)])
    return dataclasses.replace(
        batch,
        temperatures=np.full(count, draw.temperature, dtype=np.float32),
        top_ps=np.full(count, draw.top_p, dtype=np.float32),
        top_ks=np.full(count, draw.top_k, dtype=np.int32),
        min_ps=np.full(count, draw.min_p, dtype=np.float32),
        options=options,
        histories={row: HISTORY for row, each in options.items() if each.penalizes},
    )


@pytest.mark.parametrize(("option", "filters"), CASES)
def test_draws_are_distributed_as_the_exact_probabilities(option: str, filters: str) -> None:
    """A chi-square test of many draws: none of what is out, and within five deviations of the mean inside."""
    options, draw = asked(**OPTIONS[option]), FILTERS[filters]
    logits = random_logits(1, seed=1)
    expected = exact(logits[0].double().numpy(), options, draw) * DRAWS
    counts, rows = np.zeros(VOCAB), 500
    for first in range(0, DRAWS, rows):
        batch = asking_batch(rows, dict.fromkeys(range(rows), options), draw, seed=first)
        counts += np.bincount(tokens_of(logits.expand(rows, -1), batch)[0], minlength=VOCAB)
    assert_drawn_from(expected, counts)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rows_of_all_kinds_meet_in_one_batch_and_are_what_they_are_alone(temperature: float) -> None:
    """Every second row asks for nothing."""
    kinds = [asked(**fields) for fields in OPTIONS.values()]
    logits, draw = random_logits(2 * len(kinds), seed=2), Draw(temperature=temperature, top_k=30)
    together, _ = tokens_of(logits, asking_batch(len(logits), {2 * n: each for n, each in enumerate(kinds)}, draw))
    for row in range(len(logits)):
        options = {} if row % 2 else {0: kinds[row // 2]}
        assert tokens_of(logits[row : row + 1], asking_batch(1, options, draw, seed=row))[0] == [together[row]]


def test_an_id_that_ends_may_come_from_its_first_position_on() -> None:
    logits = random_logits(1)
    logits[0, 2] = 50.0
    for first_end, wanted in ((POSITION + 1, False), (POSITION, True)):
        options = asked(late_ids=ids(2), first_end=first_end)
        tokens, _ = tokens_of(logits, asking_batch(1, {0: options}, Draw(temperature=0.0)))
        assert (tokens == [2]) is wanted


def sampled_by(sampler: OptionSampler, logits: torch.Tensor, batch: Batch) -> list[int]:
    """Sample a batch's asking rows."""
    staging = BatchTensors(num_slots=8, max_pages=1, max_step_tokens=8, vocab_size=VOCAB, pinned=False)
    staged = staging.stage(batch)
    assert staged.options is not None
    with torch.inference_mode():
        tokens: list[int] = sampler.sample(logits, staged.options, lambda places: logits[places]).tokens.tolist()
    return tokens


def continuing(slot: int, position: int, options: LogitOptions, history: Ints | None = None) -> Batch:
    """Make a step with one row whose next token is for this position."""
    batch = make_batch(0, [Row(slot=slot, start=position - 1, tokens=[0])])
    return dataclasses.replace(batch, options={0: options}, histories={} if history is None else {0: history})


def test_the_device_remembers_what_it_sampled_by_slot_until_another_history_comes() -> None:
    """With a huge presence penalty no token comes twice, until another request has the slot."""
    sampler, logits = OptionSampler(num_slots=3), random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    options = LogitOptions(prompt_tokens=2, presence_penalty=1e6)
    history = ids(order[0], order[3])  # a prompt's: no penalty
    for _ in range(2):
        seen = [
            sampled_by(sampler, logits, continuing(1, 2 + n, options, None if n else history))[0] for n in range(50)
        ]
        assert seen == order[:50]


@pytest.mark.parametrize("penalty", ["repetition", "frequency"])
def test_rows_with_histories_of_different_lengths_look_at_their_own_alone(penalty: str) -> None:
    """The shorter one's slot still holds the end of another's: its best token, which no penalty may meet.

    Its own token, there twice, is rewarded, but not enough: it would be if it counted once for each place past the
    history's end.
    """
    sampler, logits = OptionSampler(num_slots=2), random_logits(2, seed=6)
    order = logits[0].argsort(descending=True).tolist()
    gap = float(logits[0, order[0]] - logits[0, order[5]])
    options = LogitOptions(prompt_tokens=0, repetition_penalty=1.9)
    if penalty == "frequency":
        options = LogitOptions(prompt_tokens=0, frequency_penalty=-gap / 4)
    before, short, long = ids(*[order[0]] * 9), ids(order[5], order[5]), ids(*[1] * 12)
    sampled_by(sampler, logits[:1], continuing(0, len(before), options, before))
    batch = make_batch(0, [Row(0, len(short) - 1, [0]), Row(1, len(long) - 1, [0])])
    batch = dataclasses.replace(batch, options={0: options, 1: options}, histories={0: short, 1: long})
    assert sampled_by(sampler, logits, batch)[0] == order[0]


def test_the_memory_of_histories_grows_and_keeps_what_it_has() -> None:
    sampler, logits = OptionSampler(num_slots=2), random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    long = np.full(700, order[0], dtype=np.int32)
    options = LogitOptions(prompt_tokens=0, presence_penalty=1e6)
    assert sampled_by(sampler, logits, continuing(0, 3, options, long[:3])) == [order[1]]
    assert sampled_by(sampler, logits, continuing(1, 700, options, long)) == [order[1]]
    assert sampled_by(sampler, logits, continuing(0, 4, options)) == [order[2]]
    assert sampled_by(sampler, logits, continuing(1, 701, options)) == [order[2]]


# -- logprobs ----------------------------------------------------------------------------------------------------


def told(logits: torch.Tensor, batch: Batch) -> StepResult:
    """Return what a batch samples, and what it tells of that."""
    slots = int(batch.slots.max()) + 1
    staging = BatchTensors(
        num_slots=slots, max_pages=1, max_step_tokens=batch.query_tokens, vocab_size=VOCAB, pinned=False
    )
    staged = staging.stage(batch)
    assert staged.options is not None
    samples = logits[: len(batch.sample_rows)]
    with torch.inference_mode():
        asked = OptionSampler(num_slots=slots).sample(samples, staged.options, lambda places: logits[places])
    tokens = np.zeros(len(samples), dtype=np.int64)
    tokens[asked.places] = asked.tokens
    result = StepResult(index=0, token_ids=tuple(tokens.tolist()), finite=(True,) * len(tokens))
    return staged.options.outcome.complete(result)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("filters", FILTERS)
def test_logprobs_are_of_the_model_or_of_what_is_drawn_from(filters: str, processed: bool) -> None:
    draw, logits = FILTERS[filters], random_logits(5, seed=3)
    kinds = [asked(**OPTIONS["all"], logprobs=count, processed_logprobs=processed) for count in (0, 1, 2, 5, VOCAB)]
    result = told(logits, asking_batch(5, dict(enumerate(kinds)), draw))
    for row, (kind, token) in enumerate(zip(kinds, result.token_ids, strict=True)):
        exactly = exact(logits[row].double().numpy(), kind, draw)
        if not processed:
            exactly = logits[row].double().softmax(dim=-1).numpy()
        found = result.logprobs[row]
        assert found.id == token
        assert found.logprob == pytest.approx(np.log(exactly[token]), abs=1e-4)
        assert found.rank == 1 + (exactly > exactly[token]).sum()
        assert len(found.top) == kind.logprobs
        with np.errstate(divide="ignore"):
            best = np.log(np.sort(exactly)[::-1][: kind.logprobs])
            np.testing.assert_allclose([each for _, each in found.top], best, atol=1e-4)
            np.testing.assert_allclose([np.log(exactly[each]) for each, _ in found.top], best, atol=1e-4)


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = torch.zeros(1, VOCAB, device="cpu")
    logits[0, 5] = 1.0
    batch = asking_batch(1, {0: asked(logprobs=0, bias_ids=ids(5), biases=np.array([-9.0], dtype=np.float32))})
    result = told(logits, batch)
    assert result.token_ids[0] != 5
    assert result.logprobs[0].rank == 2


def test_processed_logprobs_of_a_greedy_row_are_those_before_temperature() -> None:
    logits = random_logits(1, seed=4)
    kind = asked(repetition_penalty=1.5, logprobs=3, processed_logprobs=True)
    result = told(logits, asking_batch(1, {0: kind}, Draw(temperature=0.0, top_k=2)))
    found, exactly = result.logprobs[0], exact(logits[0].double().numpy(), kind, Draw())
    assert found.rank == 1
    assert found.top[0][0] == result.token_ids[0] == int(exactly.argmax())
    np.testing.assert_allclose([each for _, each in found.top], np.log(np.sort(exactly)[::-1][:3]), atol=1e-4)


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_prompts_are_scored_in_slices_of_any_size(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.model.option_sampler._SCORED_ELEMENTS", VOCAB * rows_at_once)
    logits = random_logits(9, seed=5)  # after each token of the step
    batch = make_batch(0, [Row(0, 7, [1]), Row(1, 0, [5, 6, 7, 8]), Row(2, 3, [9, 10, 11, 12], sample=False)])
    targets = {1: ids(6, 7, 8), 2: ids(10, 11, 12, 13)}
    scores = {row: PromptScores(targets=each, logprobs=row) for row, each in targets.items()}
    result = told(logits, dataclasses.replace(batch, prompt_scores=scores))
    assert result.logprobs == {}
    for row, first in ((1, 1), (2, 5)):
        exactly = logits[first : first + len(targets[row])].log_softmax(dim=-1)
        found = result.prompt_logprobs[row]
        assert [each.id for each in found] == targets[row].tolist()
        for place, each in enumerate(found):
            assert each.logprob == pytest.approx(float(exactly[place, each.id]), abs=1e-5)
            assert [token for token, _ in each.top] == exactly[place].topk(row).indices.tolist()
