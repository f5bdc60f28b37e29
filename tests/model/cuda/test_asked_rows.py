"""Rows that ask, chosen again behind a step: over many steps and requests, against the options' reference."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model.cuda import option_rows
from asyncllm.model.cuda.asked_rows import AskedRows
from asyncllm.model.cuda.fused_model import StepBuffers
from asyncllm.model.cuda.option_rows import NO_ROW, AdditionRows, CountRows
from asyncllm.model.cuda.plain_kernels import PlainKernels
from asyncllm.model.cuda.staged_graph import BehindSteps, StagedGraph, padded_rows
from asyncllm.model.cuda.step_layout import StepLayout
from asyncllm.model.option_sampler import OptionSampler
from asyncllm.model.option_tensors import stage_options
from asyncllm.model.sampler import uniforms
from asyncllm.request import LogitOptions
from helpers.batches import Row, make_batch
from helpers.fused_steps import Sampling, make_config
from helpers.sampling_rules import kept_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.scheduler.batch import Batch, Ints

VOCAB = 70
SLOTS, ROWS, TURNS = 8, 6, 2
CPU = torch.device("cpu")
LEFT_ALONE = 7  # what the results say before, and after where nothing is to be told


def ids(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def packed(allowed: np.typing.NDArray[np.bool_]) -> Ints:
    """Pack flags, bit i % 32 of word i // 32."""
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


class Device:
    """What is on the device: the steps' memory, and the rows that ask; logits are the test's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        layout = StepLayout(tokens=ROWS, rows=ROWS, tiles=0, writes=1)
        self.buffers = StepBuffers([layout], vocab_size=VOCAB, dtype=dtype, device=CPU)
        self.token_pool = torch.zeros(SLOTS + 1, dtype=torch.int32, device="cpu")
        self.rows = AskedRows(
            self.buffers,
            self.token_pool,
            PlainKernels(make_config(vocab_size=VOCAB), dtype),
            BehindSteps(turns=TURNS, captures=False, device=CPU, on_stream=contextlib.nullcontext),
        )

    def enqueue(self, batch: Batch, places: Ints, *, turn: int = 0) -> torch.Tensor:
        """Choose the edited rows' tokens; return their logits before temperature."""
        self.buffers.output[0] = -1
        self.buffers.output[1] = LEFT_ALONE
        return self.rows.enqueue(batch, places, turn=turn, direct=None)


def reference_logits(device: Device, batch: Batch, places: Ints, sequences: dict[int, list[int]]) -> torch.Tensor:
    """Return what the options' reference makes of the edited rows' logits, told the whole of every history."""
    slots = batch.slots[batch.sample_rows]
    histories = {
        sample: np.array(sequences[int(slots[sample])], dtype=np.int32)
        for sample, asked in batch.options.items()
        if asked.penalizes
    }
    whole = dataclasses.replace(batch, histories=histories)
    starts = np.zeros(batch.rows, dtype=np.int64)
    staged = stage_options(whole, places=places, row_starts=starts, vocab_size=VOCAB, pinned=False)
    assert staged is not None
    inputs = staged.on_device(CPU)
    logits = device.buffers.logits.index_select(0, inputs.places).to(torch.float32)
    OptionSampler(num_slots=SLOTS + 1)._edit(logits, inputs, staged)
    return logits[[row for row, sample in enumerate(batch.asking) if sample in batch.edited]]


def assert_same_logits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare within float32's rounding, and -inf in the same places."""
    assert torch.equal(got == -torch.inf, expected == -torch.inf)
    assert not got.isnan().any()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# -- random requests in random steps -----------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Live:
    """A request in a slot."""

    tokens: list[int]
    options: LogitOptions | None
    masked: bool
    sampling: Sampling
    seed: int
    known: bool = False  # whether the device has its history


SAMPLINGS = [
    Sampling(),
    Sampling(),
    Sampling(temperature=5e-6),  # greedy, too
    Sampling(temperature=0.8),
    Sampling(temperature=1.2, top_k=4),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.0, top_k=30, top_p=0.9, min_p=0.05),
]


def random_options(rng: np.random.Generator) -> LogitOptions:
    """Ask for a few things at once, seldom for none, or for what changes nothing."""

    def sometimes(share: float = 0.35) -> bool:
        return bool(rng.random() < share)

    def some(most: int) -> Ints:
        return rng.permutation(VOCAB)[: rng.integers(1, most)].astype(np.int32)

    prompt = int(rng.integers(1, 12))
    if sometimes(0.1):
        return LogitOptions(prompt_tokens=prompt, logprobs=2)
    bias_ids = some(6) if sometimes() else ids()
    biases = (rng.normal(size=len(bias_ids)) * 4).astype(np.float32)
    biases[rng.random(len(biases)) < 0.3] = -np.inf
    return LogitOptions(
        prompt_tokens=prompt,
        repetition_penalty=float(rng.choice([0.6, 1.7])) if sometimes() else 1.0,
        presence_penalty=float(rng.normal()) if sometimes() else 0.0,
        frequency_penalty=float(rng.normal()) if sometimes() else 0.0,
        bias_ids=bias_ids,
        biases=biases,
        allowed_ids=some(VOCAB) if sometimes(0.25) else None,
        mask=packed(rng.random(VOCAB) < 0.6) if sometimes(0.25) else None,
        late_ids=some(5) if sometimes() else ids(),
        first_end=prompt + int(rng.integers(0, 5)),
    )


def random_request(rng: np.random.Generator, pool: Sequence[LogitOptions]) -> Live:
    """Make a request; those of one pool of options meet again in other slots, as the same object or as a copy."""
    options: LogitOptions | None = pool[int(rng.integers(len(pool)))]
    if rng.random() < 0.2:
        options = None
    elif options is not None and rng.random() < 0.4:
        options = dataclasses.replace(options)
    length = int(rng.integers(1, 12)) if options is None else options.prompt_tokens
    return Live(
        tokens=rng.integers(0, 20, length).tolist(),
        options=options,
        masked=bool(rng.random() < 0.3),
        sampling=SAMPLINGS[int(rng.integers(len(SAMPLINGS)))],
        seed=int(rng.integers(2**62)),
    )


def random_mask(rng: np.random.Generator) -> Ints:
    """Allow some tokens, sometimes none past a short mask's end, sometimes none at all."""
    share = 0.0 if rng.random() < 0.1 else 0.5
    return packed(rng.random(rng.choice([32, 64, VOCAB])) < share)


def random_step(rng: np.random.Generator, live: dict[int, Live]) -> Batch:
    """Put some requests into a step, some of several tokens, some that are not sampled."""
    slots = rng.permutation(SLOTS)[: rng.integers(1, ROWS + 1)].tolist()
    rows = []
    for slot in slots:
        length = int(rng.integers(1, len(live[slot].tokens) + 1))
        start = len(live[slot].tokens) - length
        rows.append(Row(slot, start, [0] * length, sample=bool(rng.random() < 0.85), seed=live[slot].seed))
    sampled = [live[row.slot] for row in rows if row.sample]
    options = {n: each.options for n, each in enumerate(sampled) if each.options is not None and each.options.asks}
    histories = {n: each for n, each in enumerate(sampled) if n in options and options[n].penalizes and not each.known}
    return dataclasses.replace(
        make_batch(0, rows),
        temperatures=np.array([each.sampling.temperature for each in sampled], dtype=np.float32),
        top_ps=np.array([each.sampling.top_p for each in sampled], dtype=np.float32),
        top_ks=np.array([each.sampling.top_k for each in sampled], dtype=np.int32),
        min_ps=np.array([each.sampling.min_p for each in sampled], dtype=np.float32),
        masks={n: random_mask(rng) for n, each in enumerate(sampled) if each.masked},
        options=options,
        histories={n: np.array(each.tokens, dtype=np.int32) for n, each in histories.items()},
    )


def assert_chosen(device: Device, batch: Batch, places: Ints, expected: torch.Tensor, live: dict[int, Live]) -> None:
    """Compare tokens and results of a step's edited rows with what their logits say; the others' stay as they were."""
    slots = batch.slots[batch.sample_rows]
    output = device.buffers.output.tolist()
    for row, sample in enumerate(batch.edited):
        place, slot, logits = int(places[sample]), int(slots[sample]), expected[row]
        sampling = live[slot].sampling
        token = output[0][place]
        assert device.token_pool[slot] == token
        if logits.max() == -torch.inf:
            assert output[1][place] == 0
            assert 0 <= token < VOCAB
            continue
        assert output[1][place] == LEFT_ALONE
        if sampling.temperature < 1e-5:
            assert token == int(logits.argmax())
        else:
            assert token in kept_tokens(logits, sampling)
    others = sorted(set(range(ROWS)) - {int(places[sample]) for sample in batch.edited})
    assert all(output[0][place] == -1 and output[1][place] == LEFT_ALONE for place in others)


@pytest.mark.parametrize("seed", range(30))
def test_rows_get_what_the_reference_of_the_options_gives_them_over_many_steps(seed: int) -> None:
    """Requests come and go, some by way of another slot; each tells its history once, when it gets its slot."""
    rng = np.random.default_rng(seed)
    device = Device(torch.float16 if seed % 2 else torch.float32)
    pool = [random_options(rng) for _ in range(6)]
    live = {slot: random_request(rng, pool) for slot in range(SLOTS)}
    for step in range(25):
        for slot in rng.permutation(SLOTS)[: rng.integers(0, 3)].tolist():
            live[slot] = random_request(rng, pool)
        if rng.random() < 0.2:  # two requests begin again, in each other's slots
            one, other = rng.permutation(SLOTS)[:2].tolist()
            live[one], live[other] = live[other], live[one]
            live[one].known = live[other].known = False
        batch = random_step(rng, live)
        slots = batch.slots[batch.sample_rows].tolist()
        places = rng.permutation(ROWS)[: len(slots)].astype(np.int32)
        device.buffers.logits.normal_(std=3.0, generator=torch.Generator("cpu").manual_seed(100 * seed + step))
        before, pool_before = device.buffers.logits.clone(), device.token_pool.clone()
        if batch.edited:
            edited = device.enqueue(batch, places, turn=step % TURNS)
            expected = reference_logits(device, batch, places, {slot: each.tokens for slot, each in live.items()})
            assert_same_logits(edited, expected)
            assert_chosen(device, batch, places, expected, live)
            assert torch.equal(device.buffers.logits, before)
        edited_slots = [slots[sample] for sample in batch.edited]
        quiet = [slot for slot in range(SLOTS + 1) if slot not in edited_slots]
        assert torch.equal(device.token_pool[quiet], pool_before[quiet])
        for slot in slots:
            token = int(device.token_pool[slot]) if slot in edited_slots else int(rng.integers(VOCAB))
            live[slot].tokens.append(token)
            live[slot].known = live[slot].known or slot in edited_slots


# -- single rules ------------------------------------------------------------------------------------------------


def step_of(*asked: LogitOptions | None, position: int = 4, histories: dict[int, Ints] | None = None) -> Batch:
    """Make a greedy step in which row i, in slot i, asks this, for its token at this position."""
    batch = make_batch(0, [Row(slot, position - 1, [0]) for slot in range(len(asked))])
    options = {row: each for row, each in enumerate(asked) if each is not None}
    return dataclasses.replace(batch, options=options, histories=histories or {})


PLACES = np.arange(ROWS, dtype=np.int32)


def test_what_ends_a_request_is_out_until_its_first_position_and_biases_are_there_all_along() -> None:
    device = Device()
    options = LogitOptions(
        prompt_tokens=2,
        late_ids=ids(3, 5),
        first_end=6,
        bias_ids=ids(5, 9),
        biases=np.array([2.0, 1.0], dtype=np.float32),
    )
    for position in (4, 5, 6, 7):
        edited = device.enqueue(step_of(options, position=position), PLACES)[0].tolist()
        early = position < 6
        assert edited[3] == (-np.inf if early else 0.0)
        assert edited[5] == (-np.inf if early else 2.0)
        assert edited[9] == 1.0
        assert device.token_pool[0] == (9 if early else 5)


def test_a_short_mask_allows_nothing_past_its_end_whatever_the_one_before_allowed() -> None:
    device = Device()
    whole = packed(np.ones(VOCAB, dtype=np.bool_))
    for mask, left in ((whole, VOCAB), (whole[:1], 32), (np.zeros(0, dtype=np.int32), 0)):
        batch = dataclasses.replace(step_of(None, None), masks={1: mask})
        edited = device.enqueue(batch, PLACES)
        assert edited.shape == (1, VOCAB)
        assert int(edited[0].isfinite().sum()) == left
        assert edited[0, :left].isfinite().all()


def test_a_mask_is_of_one_step_and_of_one_row_alone() -> None:
    device = Device()
    options = LogitOptions(prompt_tokens=1, bias_ids=ids(4), biases=np.ones(1, dtype=np.float32))
    masked = dataclasses.replace(step_of(options, options), masks={0: packed(np.zeros(VOCAB, dtype=np.bool_))})
    assert device.enqueue(masked, PLACES).isfinite().any(dim=1).tolist() == [False, True]
    assert device.buffers.output[1, :2].tolist() == [0, LEFT_ALONE]
    assert device.enqueue(step_of(options, options), PLACES).isfinite().all()
    assert device.buffers.output[1, :2].tolist() == [LEFT_ALONE, LEFT_ALONE]


def test_a_token_is_drawn_by_its_rows_own_seed_and_position() -> None:
    """All tokens are equally likely, so that the number itself says which."""
    device, seeds = Device(), np.array([3, 5, 2**62, 11], dtype=np.int64)
    options = LogitOptions(prompt_tokens=1, bias_ids=ids(4), biases=np.zeros(1, dtype=np.float32))
    for position in (4, 5):
        batch = dataclasses.replace(
            step_of(None, options, options, options, position=position),
            seeds=seeds,
            temperatures=np.ones(4, dtype=np.float32),
        )
        device.enqueue(batch, PLACES)
        expected = (uniforms(seeds, np.full(4, position)) * VOCAB).astype(np.int64).tolist()
        assert device.buffers.output[0, :4].tolist() == [-1, *expected[1:]]


def test_a_row_of_next_to_no_temperature_takes_the_first_of_its_best() -> None:
    device = Device()
    device.buffers.logits[:, [8, 9, 30]] = 1.0
    options = LogitOptions(prompt_tokens=1, bias_ids=ids(8), biases=np.array([-1.0], dtype=np.float32))
    batch = step_of(*[options] * ROWS)
    temperatures = np.full(ROWS, 5e-6, dtype=np.float32)
    device.enqueue(dataclasses.replace(batch, temperatures=temperatures, seeds=np.arange(ROWS)), PLACES)
    assert device.buffers.output[0].tolist() == [9] * ROWS


def test_steps_in_flight_have_host_memory_of_their_own() -> None:
    device = Device()
    options = LogitOptions(prompt_tokens=1, bias_ids=ids(4), biases=np.ones(1, dtype=np.float32))
    masked = dataclasses.replace(step_of(options), masks={0: packed(np.ones(VOCAB, dtype=np.bool_))})
    device.enqueue(masked, PLACES, turn=0)
    (size,) = device.rows._sizes._made.values()
    before = size.graph.host(0).copy(), size.host_masks[0].clone()
    other = dataclasses.replace(
        step_of(options, position=9), masks={0: packed(np.zeros(VOCAB, dtype=np.bool_))}, seeds=np.array([5])
    )
    device.enqueue(other, PLACES, turn=1)
    assert np.array_equal(size.graph.host(0), before[0])
    assert torch.equal(size.host_masks[0], before[1])
    assert not np.array_equal(size.graph.host(1), before[0])
    assert not torch.equal(size.host_masks[1], before[1])


def test_requests_that_ask_the_same_share_a_row_and_one_after_the_other_take_no_more_rows() -> None:
    device = Device()
    for step in range(40):
        biases = np.full(1, step // 2, dtype=np.float32)  # two steps ask the same, by objects of their own
        asked = [LogitOptions(prompt_tokens=1, bias_ids=ids(4), biases=biases.copy()) for _ in range(5)]
        edited = device.enqueue(step_of(*asked), PLACES)
        assert (edited[:, 4] == step // 2).all()
    assert len(device.rows._additions.values) <= 2


@pytest.mark.parametrize("most", [1, 2, 4, 5, 16, 100, 256])
def test_every_number_of_rows_has_a_padded_size_not_much_larger(most: int) -> None:
    sizes = padded_rows(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for rows in range(1, most + 1):
        assert next(size for size in sizes if rows <= size) < 4 * rows + 1


# -- the tables --------------------------------------------------------------------------------------------------


def biased(*values: float, **fields: object) -> LogitOptions:
    biases = np.array(values, dtype=np.float32)
    bias_ids = np.arange(len(values), dtype=np.int32)
    return LogitOptions(prompt_tokens=1, bias_ids=bias_ids, biases=biases, **fields)  # type: ignore[arg-type]


def test_equal_additions_are_one_row_and_others_are_not() -> None:
    rows = AdditionRows(VOCAB, CPU)
    mask = packed(np.arange(VOCAB) < 50)
    kinds: list[tuple[LogitOptions, Ints]] = [
        (biased(1.0, 2.0), ids()),
        (biased(1.0, 3.0), ids()),
        (biased(1.0, 2.0), ids(7)),
        (biased(1.0, 2.0), ids(8)),
        (biased(1.0, 2.0, allowed_ids=ids(0, 7)), ids()),
        (biased(1.0, 2.0, allowed_ids=ids()), ids()),
        (biased(1.0, 2.0, mask=mask), ids()),
        (LogitOptions(prompt_tokens=1, allowed_ids=ids(0, 7)), ids()),
        (LogitOptions(prompt_tokens=1), ids(0, 7)),
    ]
    taken = [rows.take(asked, late_ids=late) for asked, late in kinds]
    assert sorted(taken) == list(range(len(kinds)))
    again = [rows.take(dataclasses.replace(asked), late_ids=late.copy()) for asked, late in kinds]
    assert again == taken


def test_who_adds_nothing_has_no_row() -> None:
    rows = AdditionRows(VOCAB, CPU)
    asked = LogitOptions(prompt_tokens=1, repetition_penalty=2.0, late_ids=ids(4), first_end=3)
    assert rows.take(asked, late_ids=ids()) == NO_ROW
    rows.give_back(NO_ROW)
    assert rows.take(asked, late_ids=asked.late_ids) == 0


def test_a_row_is_kept_until_its_last_user_gives_it_back_and_then_another_gets_it() -> None:
    rows = AdditionRows(VOCAB, CPU)
    first, second, third = biased(1.0), biased(2.0), biased(3.0)
    shared, own = rows.take(first, late_ids=ids()), rows.take(second, late_ids=ids())
    assert rows.take(first, late_ids=ids()) == shared
    rows.give_back(shared)
    assert rows.take(third, late_ids=ids()) not in {shared, own}
    assert rows.values[shared, 0] == 1.0
    rows.give_back(shared)
    assert rows.take(biased(4.0), late_ids=ids()) == shared
    assert rows.values[shared, 0] == 4.0
    assert rows.take(first, late_ids=ids()) not in {shared, own}  # its row is gone, so it is written again


def test_the_tables_grow_and_keep_what_they_have() -> None:
    additions, counts = AdditionRows(VOCAB, CPU), CountRows(VOCAB, CPU)
    taken = [additions.take(biased(float(n), -1.0), late_ids=ids(5)) for n in range(21)]
    for slot in range(21):
        counts.write(slot, np.full(1 + slot, 6, dtype=np.int32), prompt_tokens=1)
    for n in range(21):
        expected = torch.zeros(VOCAB, device="cpu")
        expected[0], expected[1], expected[5] = n, -1.0, -torch.inf
        assert torch.equal(additions.values[taken[n]], expected)
        own = counts.values[counts.row(n)]
        assert own[6] == (n - 0x8000 if n else -0x8000)
        assert int((own != 0).sum()) == 1
    assert len(additions.values) < 2 * 21
    assert len({counts.row(slot) for slot in range(21)}) == 21


def test_counts_are_of_what_was_generated_and_the_highest_bit_is_of_the_prompt() -> None:
    counts = CountRows(VOCAB, CPU)
    history = np.array([3, 9, 9, 40, 9, 11, 11, 60, 11], dtype=np.int32)
    counts.write(2, history, prompt_tokens=4)
    found = counts.values[counts.row(2)].tolist()
    expected = [0] * VOCAB
    expected[3] = expected[40] = -0x8000
    expected[9], expected[11], expected[60] = 1 - 0x8000, 3, 1
    assert found == expected
    counts.write(2, history[:5], prompt_tokens=5)  # another request has the slot
    found = counts.values[counts.row(2)].tolist()
    assert {token for token in range(VOCAB) if found[token]} == {3, 9, 40}
    assert found[9] == -0x8000


def test_counts_stop_at_the_most_that_they_can_hold() -> None:
    counts = CountRows(VOCAB, CPU)
    often = np.concatenate([ids(5, 1), np.full(0x7FFF + 9, 5), np.full(0x7FFF + 9, 6), np.full(0x7FFF, 7)])
    counts.write(0, often.astype(np.int32), prompt_tokens=2)
    found = counts.values[counts.row(0)]
    assert found[[5, 6, 7, 1]].tolist() == [-1, 0x7FFF, 0x7FFF, -0x8000]


def test_a_token_is_penalized_by_how_often_it_came_though_its_history_was_told_once() -> None:
    """Each time it is chosen it loses 3; it is 10 better than the next."""
    device = Device()
    device.buffers.logits[0, 6], device.buffers.logits[0, 8] = 10.0, 0.5
    options = LogitOptions(prompt_tokens=2, frequency_penalty=3.0)
    chosen: list[int] = []
    for step in range(6):
        told: dict[int, Ints] = {} if step else {0: ids(6, 6)}
        edited = device.enqueue(step_of(options, position=2 + step, histories=told), PLACES)
        assert edited[0, 6] == 10.0 - 3.0 * chosen.count(6)
        chosen.append(int(device.token_pool[0]))
    assert chosen == [6, 6, 6, 6, 8, 0]


# -- no memory for a table ---------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the write of this number find no memory."""
    write, writes = option_rows._Table.write, itertools.count()

    def sometimes(table: option_rows._Table, row: int, values: np.typing.NDArray[np.generic]) -> None:
        if next(writes) == number:
            raise torch.OutOfMemoryError("no memory")
        write(table, row, values)

    monkeypatch.setattr(option_rows._Table, "write", sometimes)


@pytest.mark.parametrize("number", range(4))
def test_a_step_that_found_no_memory_for_what_rows_ask_does_it_when_it_is_tried_again(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, each with something that holds until its first end and something that always does."""
    device = Device()
    asked = [
        LogitOptions(prompt_tokens=1, late_ids=ids(9), first_end=99, bias_ids=ids(row), biases=biased(5.0).biases)
        for row in range(2)
    ]
    failing(monkeypatch, number)
    with pytest.raises(torch.OutOfMemoryError):
        device.enqueue(step_of(*asked), PLACES)
    edited = device.enqueue(step_of(*asked), PLACES)
    for row in range(2):
        assert edited[row, row] == 5.0
        assert edited[row, 9] == -torch.inf
        assert int((edited[row] != 0.0).sum()) == 2
    rows = [device.rows._additions.take(asked[0], late_ids=asked[0].late_ids) for _ in range(2)]
    assert rows[0] == rows[1]
    assert device.rows._additions._users[rows[0]] == 3  # the request's, and these two: none was lost


def test_a_row_for_which_there_was_no_memory_is_given_to_nobody_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = AdditionRows(VOCAB, CPU)
    kept, other = rows.take(biased(1.0), late_ids=ids()), rows.take(biased(2.0), late_ids=ids())
    rows.give_back(kept)
    failing(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        rows.take(biased(3.0), late_ids=ids())
    taken = [rows.take(biased(value), late_ids=ids()) for value in (4.0, 5.0)]
    assert len({other, *taken}) == 3
    assert [float(rows.values[row, 0]) for row in (other, *taken)] == [2.0, 4.0, 5.0]


def test_graphs_are_dropped_also_where_a_step_failed_after_a_table_had_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    device, dropped = Device(), []
    device.enqueue(step_of(LogitOptions(prompt_tokens=1, bias_ids=ids(0), biases=biased(1.0).biases)), PLACES)
    monkeypatch.setattr(StagedGraph, "drop", lambda _: dropped.append(1))
    asked = [
        LogitOptions(prompt_tokens=1, bias_ids=ids(row), biases=biased(9.0).biases, late_ids=ids(7), first_end=99)
        for row in range(3)
    ]
    failing(monkeypatch, 2)
    with pytest.raises(torch.OutOfMemoryError):
        device.enqueue(step_of(*asked), PLACES)
    device.enqueue(step_of(*asked), PLACES)
    assert dropped


def test_what_an_ended_request_asked_is_kept_by_nobody() -> None:
    """Its hook may hold anything of its caller's."""
    device = Device()
    options = LogitOptions(prompt_tokens=1, bias_ids=ids(3), biases=biased(1.0).biases)
    device.enqueue(step_of(options), PLACES)
    gone = weakref.ref(options)
    del options
    assert gone() is None
