"""The kernels that edit logits and choose tokens, over vocabularies in which groups of tokens have several members.

Against their plain twins where these go through tokens in the same order, else against what the rules keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model.cuda.step_kernels import OptionTables
from asyncllm.model.cuda.step_layout import AskedLayout, Counts, StepLayout, ToldLayout
from asyncllm.model.sampler import uniforms
from helpers.fused_steps import Sampling, make_config
from helpers.sampling_rules import kept_tokens
from helpers.triton_twins import DEVICE, ON_GPU, both, dtypes, kernels, marks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.model.cuda.step_layout import AskedSections, ToldSections

pytestmark = marks

SMALL, LARGE = 500, 20_000
LANES = 8192
SLOTS = 160
UNTOUCHED = -7
SEEDS = range(6 if ON_GPU else 1)


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Give normal numbers, float32."""
    return (torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)) * scale).to(DEVICE)


def make_asked(rows: int, *, padded: int, sampling: Sampling, seeds: Sequence[int]) -> AskedSections[torch.Tensor]:
    """Make rows that ask for nothing yet, their places and slots scattered, and padding behind them."""
    layout = AskedLayout(rows=padded)
    asked = layout.device(torch.zeros(layout.size, dtype=torch.int32, device=DEVICE))
    rng = np.random.default_rng(rows)
    asked.counts[Counts.ROWS] = rows
    asked.places[:rows] = torch.from_numpy(rng.permutation(padded)[:rows].astype(np.int32))
    asked.slots[:rows] = torch.from_numpy(rng.permutation(SLOTS)[:rows].astype(np.int32))
    asked.kv_lens[:rows] = torch.arange(3, 3 + rows)
    asked.seeds[:rows] = torch.tensor(seeds)
    asked.temperatures[:rows], asked.top_ps[:rows] = sampling.temperature, sampling.top_p
    asked.top_ks[:rows], asked.min_ps[:rows] = sampling.top_k, sampling.min_p
    asked.masks_at[:rows] = asked.additions_at[:rows] = asked.counts_at[:rows] = -1
    asked.repetitions[:rows] = 1.0
    return asked


def make_tables(vocab: int, rows: int, *, seed: int = 0) -> OptionTables:
    """Make tables of random content; in the counts are all kinds: none, few, the most, each in the prompt or not."""
    rng = np.random.default_rng(seed)
    additions = (rng.normal(size=(rows, vocab)) * (rng.random((rows, vocab)) < 0.3)).astype(np.float32)
    additions[rng.random((rows, vocab)) < 0.2] = -np.inf
    counts = rng.choice([0, 0, 0, 1, 3, 0x7FFF], (rows, vocab)) - 0x8000 * (rng.random((rows, vocab)) < 0.3)
    return OptionTables(
        masks=torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32))).astype(np.int32)).to(DEVICE),
        additions=torch.from_numpy(additions).to(DEVICE),
        counts=torch.from_numpy(counts.astype(np.int16)).to(DEVICE),
    )


def no_tables(vocab: int) -> OptionTables:
    """Make tables of which no row takes anything."""
    return make_tables(vocab, 1)


@dtypes
@pytest.mark.parametrize(("vocab", "padded"), [(SMALL, 9), (LARGE, 9), (LARGE, 20), (LARGE, 130)])
def test_logits_are_edited_as_the_plain_twin_does_it(dtype: torch.dtype, vocab: int, padded: int) -> None:
    """With and without each of mask, additions and penalties, of other rows of the tables; padding is left alone."""
    plain, fast = kernels(make_config(vocab_size=vocab), dtype)
    asked, tables = make_asked(8, padded=padded, sampling=Sampling(), seeds=range(8)), make_tables(vocab, 8)
    for row in range(8):
        asked.masks_at[row] = 7 - row if row & 1 else -1
        asked.additions_at[row] = 7 - row if row & 2 else -1
        asked.counts_at[row] = 7 - row if row & 4 else -1
    asked.repetitions[:8] = torch.tensor([1.7, 0.6, 1.0, 1.3, 1.7, 0.6, 1.0, 1.3])
    asked.presences[:8] = torch.tensor([0.5, -0.5, 1.5, 0.0, 0.5, -0.5, 1.5, 0.0])
    asked.frequencies[:8] = torch.tensor([0.1, 0.0, -0.3, 0.2, 0.1, 0.0, -0.3, 0.2])
    logits = normal(padded, vocab).to(dtype)
    before = logits.clone()
    expected = torch.full((padded, vocab), float(UNTOUCHED), device=DEVICE)
    got = expected.clone()
    asked.kept[:8] = 1
    for kernel, edited in ((plain, expected), (fast, got)):
        own = tables._replace(counts=tables.counts.clone())
        results, pool = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in ((2, padded), SLOTS + 1))
        kernel.choose_asked(logits, asked, own, edited=edited, token_pool=pool, results=results)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # -inf where the twin has it
    assert (got[8:] == UNTOUCHED).all()
    assert torch.equal(got[0], logits[asked.places[0].long()].float())
    assert (got[1:4] == -torch.inf).any(dim=1).all()
    assert torch.equal(logits, before)


def sample_asked(
    kernel: StepKernels, logits: torch.Tensor, asked: AskedSections[torch.Tensor], tables: OptionTables
) -> torch.Tensor:
    """Sample; return results, int32 [2, rows], in which what was not written is `UNTOUCHED`.

    The tokens must be in the token pool, and nothing else.
    """
    rows = int(asked.counts[Counts.ROWS])
    results = torch.full((2, len(logits)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    pool = torch.full((SLOTS + 1,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    places, slots = asked.places[:rows].long(), asked.slots[:rows].long()
    by_place = torch.zeros_like(logits)
    by_place[places] = logits[:rows]
    edited = torch.empty(logits.shape, device=DEVICE)
    kernel.choose_asked(by_place, asked, tables, edited=edited, token_pool=pool, results=results)
    expected = torch.full_like(pool, UNTOUCHED)
    expected[slots] = results[0, places]
    assert torch.equal(pool, expected)
    assert int((results[0] != UNTOUCHED).sum()) == rows
    return results


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=0.9, top_p=0.4),
    Sampling(temperature=0.9, top_p=0.5, top_k=20),
    Sampling(temperature=1.0, min_p=0.2, top_p=0.9),
    Sampling(temperature=2.0, top_k=400, top_p=0.99),
]


@both
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_asking_rows_take_the_tokens_of_the_plain_twin_and_count_them(dependent: bool, sampling: Sampling) -> None:
    """Edited logits are float32, many of them -inf; the row with nothing left says so, and the others say nothing."""
    plain, fast = kernels(make_config(vocab_size=SMALL), torch.float16, dependent=dependent)
    logits = normal(8, SMALL) + make_tables(SMALL, 8).additions
    logits[4] = -torch.inf
    for seed in SEEDS:
        asked = make_asked(6, padded=8, sampling=sampling, seeds=range(6 * seed, 6 * seed + 6))
        asked.counts_at[:6] = torch.tensor([3, -1, 0, 5, -1, 1])
        tables, twins = make_tables(SMALL, 6, seed=seed), make_tables(SMALL, 6, seed=seed)
        tables.counts[0] = twins.counts[0] = 0  # of row 2
        results = sample_asked(fast, logits, asked, tables)
        assert tables.counts[0].nonzero().flatten().tolist() == [int(results[0, asked.places[2]])]
        assert torch.equal(results, sample_asked(plain, logits, asked, twins))
        assert torch.equal(tables.counts, twins.counts)
        finite = [UNTOUCHED] * 8
        finite[int(asked.places[4])] = 0
        assert results[1].tolist() == finite
        for row in (0, 1, 2, 3, 5):
            assert int(results[0, asked.places[row]]) in kept_tokens(logits[row], sampling)


def test_counts_keep_the_prompts_bit_and_stop_at_the_most() -> None:
    _, fast = kernels(make_config(vocab_size=SMALL), torch.float16)
    starts = torch.tensor([0, 5, -0x8000, 3 - 0x8000, 0x7FFE, 0x7FFF, -1], dtype=torch.int16, device=DEVICE)
    after = torch.tensor([1, 6, 1 - 0x8000, 4 - 0x8000, 0x7FFF, 0x7FFF, -1], dtype=torch.int16, device=DEVICE)
    rows = torch.arange(len(starts), device=DEVICE)
    asked = make_asked(len(starts), padded=8, sampling=Sampling(), seeds=range(len(starts)))
    asked.counts_at[: len(starts)] = rows.flip(0)
    logits = normal(8, SMALL)
    logits[rows, 20 + 70 * rows] = 100.0
    tables = make_tables(SMALL, len(starts))
    tables.counts[rows.flip(0), 20 + 70 * rows] = starts
    expected = tables.counts.clone()
    expected[rows.flip(0), 20 + 70 * rows] = after
    sample_asked(fast, logits, asked, tables)
    assert torch.equal(tables.counts, expected)


def rounded(rows: int, steps_per_one: float, *, seed: int = 0) -> torch.Tensor:
    """Give logits that 16 bits hold, of which many are equal."""
    return (normal(rows, LARGE, seed=seed) * steps_per_one).round() / steps_per_one


def few_finite(rows: int) -> torch.Tensor:
    """Give logits of which only some are finite: one, three or a few thousand."""
    logits = normal(rows, LARGE)
    for row, count in enumerate((1, 3, 6000)):
        logits[row, torch.from_numpy(np.random.default_rng(row).permutation(LARGE)[count:])] = -torch.inf
    return logits


def sharing(rows: int) -> torch.Tensor:
    """Give logits whose best are in the same groups: those of tokens that are equal modulo LANES."""
    logits = normal(rows, LARGE)
    for offset in range(0, LARGE, LANES):
        logits[:, offset : offset + 60 : 3] = 12.0 + normal(rows, 20, seed=offset)
    return logits


TOP_KS = {
    "the best": Sampling(temperature=1.5, top_k=1),
    "few": Sampling(temperature=3.0, top_k=5),
    "few, under top-p": Sampling(temperature=3.0, top_k=40, top_p=0.6),
    "few, under min-p": Sampling(temperature=3.0, top_k=40, min_p=0.3),
    "more than are looked for among few": Sampling(temperature=3.0, top_k=1500),
}


LOGITS = {
    "distinct": lambda: normal(3, LARGE),
    "some are equal": lambda: rounded(3, 2.0),
    "most are equal": lambda: rounded(3, 0.1),
    "few are finite": lambda: few_finite(3),
    "the best share groups": lambda: sharing(3),
}


@dtypes
@pytest.mark.parametrize("padded", [4, 130])  # in 32 and 4 parts
@pytest.mark.parametrize("sampling", TOP_KS.values(), ids=TOP_KS)
@pytest.mark.parametrize("kind", LOGITS)
def test_what_top_k_draws_is_among_those_that_the_rules_keep(
    kind: str, sampling: Sampling, padded: int, dtype: torch.dtype
) -> None:
    """Of float32, as asking rows have them, and of 16 bits, as the model gives them."""
    _, fast = kernels(make_config(vocab_size=LARGE), dtype)
    logits = torch.zeros(padded, LARGE, device=DEVICE)
    logits[:3] = LOGITS[kind]()
    short = logits.to(dtype)
    kept = [kept_tokens(logits[row], sampling) for row in range(3)]
    kept_short = [kept_tokens(short[row].float(), sampling) for row in range(3)]
    for seed in SEEDS:
        asked = make_asked(3, padded=padded, sampling=sampling, seeds=range(3 * seed, 3 * seed + 3))
        results = sample_asked(fast, logits, asked, no_tables(LARGE))
        assert all(int(results[0, asked.places[row]]) in kept[row] for row in range(3))
        assert (results[1] == UNTOUCHED).all()
        tokens = sample_step(fast, short, asked)
        assert all(tokens[row] in kept_short[row] for row in range(3))


def sample_step(kernel: StepKernels, logits: torch.Tensor, asked: AskedSections[torch.Tensor]) -> list[int]:
    """Sample rows of a step that draw as these do; return their tokens."""
    rows, layout = int(asked.counts[Counts.ROWS]), StepLayout(tokens=len(logits), rows=len(logits), tiles=0, writes=1)
    inputs = layout.device(torch.zeros(layout.size, dtype=torch.int32, device=DEVICE))
    for name in ("counts", "slots", "kv_lens", "temperatures", "top_ps", "top_ks", "min_ps", "seeds"):
        getattr(inputs, name).copy_(getattr(asked, name))
    results = torch.full((2, len(logits)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    pool = torch.full((SLOTS + 1,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    kernel.sample(logits, inputs, pool, results)
    assert (results[:, rows:] == UNTOUCHED).all()
    assert torch.equal(results[1, :rows], logits[:rows].isfinite().all(dim=1).int())
    assert torch.equal(pool[asked.slots[:rows].long()], results[0, :rows])
    return results[0, :rows].tolist()


# -- tokens in the order in which the kernel goes through them ---------------------------------------------------


def in_order() -> npt.NDArray[np.intp]:
    """Return the order in which a row is gone through, or what top-k may keep of it: lane by lane."""
    tokens = np.arange(LARGE)
    return np.lexsort((tokens // LANES, tokens % LANES))


@pytest.mark.parametrize("padded", [4, 20, 130])  # in 32, 16 and 4 parts
@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        (Sampling(temperature=1.0), "distinct"),
        (Sampling(temperature=1.0, top_p=0.5), "distinct"),
        (Sampling(temperature=1.0, top_p=0.9, min_p=0.01), "distinct"),
        (Sampling(temperature=3.0, top_k=1500), "distinct"),
        (Sampling(temperature=9.0, top_k=5), "distinct"),
        (Sampling(temperature=9.0, top_k=40), "the best share groups"),
        (Sampling(temperature=9.0, top_k=60, top_p=0.6), "the best share groups"),
        (Sampling(temperature=3.0, top_k=60, min_p=0.3), "the best share groups"),
    ],
    ids=str,
)
def test_a_token_is_the_plain_twins_in_the_order_of_the_kernel(sampling: Sampling, kind: str, padded: int) -> None:
    """However many rows there are: a neighbour must not change what is drawn."""
    plain, fast = kernels(make_config(vocab_size=LARGE), torch.float16)
    logits = LOGITS[kind]()[:1].repeat(padded, 1)
    order = torch.from_numpy(in_order()).to(DEVICE)
    for seed in SEEDS:
        asked = make_asked(4, padded=padded, sampling=sampling, seeds=range(4 * seed, 4 * seed + 4))
        found = sample_asked(fast, logits, asked, no_tables(LARGE))
        expected = sample_asked(plain, logits[:, order].contiguous(), asked, no_tables(LARGE))
        places = asked.places[:4].long()
        assert torch.equal(found[0, places].long(), order[expected[0, places].long()])


@pytest.mark.parametrize("padded", [4, 20, 130])
@pytest.mark.parametrize("top_k", [1, 40])
def test_a_row_of_equal_tokens_is_drawn_from_as_a_whole(top_k: int, padded: int) -> None:
    """They are more than are looked for among few; sums of ones are exact, so each draw is the twin's."""
    plain, fast = kernels(make_config(vocab_size=LARGE), torch.float16)
    logits, order = torch.ones(padded, LARGE, device=DEVICE), torch.from_numpy(in_order()).to(DEVICE)
    asked = make_asked(4, padded=padded, sampling=Sampling(temperature=1.0, top_k=top_k), seeds=range(4))
    found = sample_asked(fast, logits, asked, no_tables(LARGE))
    expected = sample_asked(plain, logits, asked, no_tables(LARGE))
    places = asked.places[:4].long()
    assert torch.equal(found[0, places].long(), order[expected[0, places].long()])


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0, top_p=0.2), Sampling(1.0, 0.2, 15_000), Sampling(1.0, 1.0, 9_000)], ids=str
)
def test_what_is_drawn_of_much_the_same_tokens_is_the_plain_twins(sampling: Sampling) -> None:
    """Top-p takes several attempts, and where sums fall, tokens that were dropped lie beside others that were not.

    So many weights are summed up in another order that one number in a thousand falls beside.
    """
    plain, fast = kernels(make_config(vocab_size=LARGE), torch.float16)
    logits, rows = normal(1, LARGE, scale=0.4), 12
    asked = make_asked(rows, padded=rows, sampling=sampling, seeds=range(rows))
    order = torch.from_numpy(in_order()).to(DEVICE)
    found = sample_asked(fast, logits.repeat(rows, 1), asked, no_tables(LARGE))
    expected = sample_asked(plain, logits[:, order].repeat(rows, 1), asked, no_tables(LARGE))
    assert set(found[0].tolist()) <= kept_tokens(logits[0], sampling)
    assert int((found[0].long() == order[expected[0].long()]).sum()) >= rows - 1


def seeds_at_edges(weights: npt.NDArray[np.float64], *, position: int, count: int) -> list[int]:
    """Find seeds whose number, at this position, falls nearest to where one weight ends and the next begins."""
    ends = weights.cumsum() / weights.sum()
    seeds = np.arange(1_000_000)
    drawn = uniforms(seeds, np.full(len(seeds), position)).astype(np.float64)
    after = np.searchsorted(ends, drawn).clip(1, len(ends) - 1)
    distances = np.minimum(np.abs(ends[after] - drawn), np.abs(ends[after - 1] - drawn))
    return [int(seed) for seed in distances.argsort()[:count]]


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("out", ["the first", "the last", "scattered"])
def test_what_is_out_is_not_drawn_though_a_number_falls_on_an_edge(out: str, top_k: int) -> None:
    """Where sums in another order differ by rounding, the number may seem to lie beside the token that it hit."""
    _, fast = kernels(make_config(vocab_size=LARGE), torch.float16)
    logits, position, rows = normal(1, LARGE, scale=2.0)[0], 7, 16
    tokens = torch.arange(LARGE, device=DEVICE)
    logits[{"the first": tokens < LANES, "the last": tokens >= LANES, "scattered": tokens % 3 > 0}[out]] = -torch.inf
    sampling = Sampling(temperature=1.0, top_k=top_k)
    kept = kept_tokens(logits, sampling)
    weights = np.zeros(3 * LANES)
    weights[sorted(kept)] = logits[sorted(kept)].double().exp().cpu().numpy()
    weights = weights[:LARGE][in_order()] if top_k else weights.reshape(3, LANES).sum(axis=0)
    asked = make_asked(
        rows, padded=rows, sampling=sampling, seeds=seeds_at_edges(weights, position=position, count=rows)
    )
    asked.kv_lens[:rows] = position
    results = sample_asked(fast, logits.repeat(rows, 1), asked, no_tables(LARGE))
    assert set(results[0].tolist()) <= kept


# -- what is told of tokens --------------------------------------------------------------------------------------

MOST_TOLD = 32


def make_told(tops: Sequence[int], *, padded: int, places: Sequence[int]) -> ToldSections[torch.Tensor]:
    """Make rows of which so many likeliest tokens are told, and padding behind them that would be told of, too."""
    layout = ToldLayout(rows=padded)
    told = layout.device(torch.zeros(layout.size, dtype=torch.int32, device=DEVICE))
    told.counts[Counts.ROWS] = len(tops)
    told.places[: len(tops)] = torch.tensor(places)
    told.tops[: len(tops)] = torch.tensor(tops)
    told.tops[len(tops) :] = 3
    return told


def tell(
    kernel: StepKernels, logits: torch.Tensor, told: ToldSections[torch.Tensor], tokens: Sequence[int]
) -> torch.Tensor:
    """Return what is told, in which what was not written is `UNTOUCHED`; tokens are by place."""
    results = torch.full((2, len(logits)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    results[0] = torch.tensor(tokens)
    before = logits.clone(), results.clone()
    scores = torch.full((len(told.places), 2 + 2 * MOST_TOLD), float(UNTOUCHED), device=DEVICE)
    kernel.tell(logits, told, results, scores)
    assert torch.equal(logits, before[0])
    assert torch.equal(results, before[1])
    return scores


TOLD = {
    "distinct": lambda vocab: normal(5, vocab),
    "some are equal": lambda vocab: (normal(5, vocab, seed=1) * 2).round() / 2,
    "most are equal": lambda vocab: (normal(5, vocab, seed=2) / 10).round() * 10,
    "all are equal": lambda vocab: torch.full((5, vocab), -2.5, device=DEVICE),
    "the best are beside each other": lambda vocab: (
        normal(5, vocab, seed=3) + 40.0 * (torch.arange(vocab, device=DEVICE) < 40)
    ),
    "some are out": lambda vocab: normal(5, vocab).masked_fill(torch.arange(vocab, device=DEVICE) % 9 > 0, -torch.inf),
}


@dtypes
@pytest.mark.parametrize("padded", [5, 20, 130])  # in 32, 16 and 4 parts
@pytest.mark.parametrize("vocab", [SMALL, LARGE])
@pytest.mark.parametrize("kind", TOLD)
def test_tokens_are_told_of_as_the_plain_twin_does_it(kind: str, vocab: int, padded: int, dtype: torch.dtype) -> None:
    """Of equal logits any ids will do, but none twice; what was not asked for, and padding, is left alone."""
    plain, fast = kernels(make_config(vocab_size=vocab), dtype)
    logits, tops, places = TOLD[kind](vocab).to(DEVICE, dtype), [5, 0, MOST_TOLD, 1], [3, 0, 4, 1]
    tokens = [int(logits[0].argmax()), int(logits[1].argmin()), 7, vocab - 1, 18]
    told = make_told(tops, padded=padded, places=places)
    got, expected = tell(fast, logits, told, tokens), tell(plain, logits, told, tokens)
    ids, twins = slice(2, 2 + MOST_TOLD), slice(2 + MOST_TOLD, None)
    for row, (top, place) in enumerate(zip(tops, places, strict=True)):
        found = got[row, 2 : 2 + top].long()
        assert found.unique().numel() == top
        assert torch.equal(logits[place, found], logits[place, expected[row, 2 : 2 + top].long()])
        assert (got[row, ids][top:] == UNTOUCHED).all()
    assert torch.equal(got[:, 1], expected[:, 1])
    torch.testing.assert_close(got[:, 0], expected[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, twins], expected[:, twins], rtol=1e-5, atol=1e-5)
    assert (got[len(tops) :] == UNTOUCHED).all()


@pytest.mark.parametrize("padded", [5, 20, 130])
def test_a_token_is_told_of_however_far_from_the_best_it_is(padded: int) -> None:
    """The best has rank 1 and hardly less than 0; one that is 80 below is told of as well, with its rank."""
    _, fast = kernels(make_config(vocab_size=LARGE), torch.float16)
    logits = normal(3, LARGE, scale=1.0).clamp(-4.0, 4.0).to(torch.float16)
    logits[:, 12_345] = 40.0
    logits[:, 19_999] = -40.0
    logits[:, 3] = -41.0
    scores = tell(fast, logits, make_told([2, 2, 0], padded=padded, places=[0, 1, 2]), [12_345, 19_999, 3])
    assert scores[:3, 1].tolist() == [1, LARGE - 1, LARGE]
    torch.testing.assert_close(scores[:3, 0].cpu(), torch.tensor([0.0, -80.0, -81.0]), rtol=1e-6, atol=1e-6)
    assert scores[:2, 2].tolist() == [12_345, 12_345]
