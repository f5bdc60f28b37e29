"""What goes into a step, and that neither prompts nor decoding requests starve."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from asyncllm.errors import ConfigurationError
from asyncllm.request import RequestState, RowSampling
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP, Batch
from asyncllm.scheduler.scheduler import SchedulingPolicy
from helpers.scheduling import World, make_request, reference


def contents(batch: Batch) -> dict[str, object]:
    """Everything in a batch, as plain values."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def test_decoding_rows_come_first_then_chunks_and_all_columns_fit() -> None:
    world = World(pages=64, slots=4, budget=8)
    sampling = [
        RowSampling(temperature=0.5 + n, top_p=0.9 - n / 8, top_k=n, min_p=n / 8, seed=2**40 + n) for n in range(3)
    ]
    first, second, third = (make_request(n, size, 4, sampling=sampling[n]) for n, size in enumerate((2, 3, 9)))
    world.submit(first, second)
    world.turn()
    world.submit(third)
    step = world.launch()
    assert step is not None
    batch = step.batch
    assert step.record.kind == "mixed"
    assert step.rows == (first, second, third)
    assert step.sampled == (first, second)
    assert batch.slots.tolist() == [r.pages.slot for r in step.rows if r.pages is not None]
    assert batch.starts.tolist() == [2, 3, 0]
    assert batch.query_lens.tolist() == [1, 1, 6]
    assert batch.token_ids.tolist() == [SAMPLED_LAST_STEP, SAMPLED_LAST_STEP, *third.prompt[:6].tolist()]
    assert batch.sample_rows.tolist() == [0, 1]
    world.commit()
    step = world.launch()
    assert step is not None
    batch = step.batch
    assert batch.starts.tolist() == [3, 4, 6]
    assert batch.token_ids.tolist() == [SAMPLED_LAST_STEP, SAMPLED_LAST_STEP, *third.prompt[6:].tolist()]
    assert step.sampled == (first, second, third)
    assert batch.sample_rows.tolist() == [0, 1, 2]
    np.testing.assert_allclose(batch.temperatures, [0.5, 1.5, 2.5])
    np.testing.assert_allclose(batch.top_ps, [0.9, 0.775, 0.65], rtol=1e-6)
    assert batch.top_ks.tolist() == [0, 1, 2]
    assert batch.min_ps.tolist() == [0, 0.125, 0.25]
    assert batch.seeds.tolist() == [2**40, 2**40 + 1, 2**40 + 2]
    dtypes = {
        field.name: getattr(batch, field.name).dtype
        for field in dataclasses.fields(batch)
        if field.name not in {"index", "masks", "options", "histories", "prompt_scores", "steady"}
    }
    floats = {"temperatures": np.float32, "top_ps": np.float32, "min_ps": np.float32}
    assert dtypes == {name: np.dtype({**floats, "seeds": np.int64}.get(name, np.int32)) for name in dtypes}
    world.run()
    world.assert_idle()


def test_every_sampled_row_keeps_its_own_settings_while_rows_come_and_go() -> None:
    draw = random.Random(3)
    world = World(pages=400, page_size=2, slots=12, budget=20, depth=2, use_eos=True)
    for number in range(60):
        sampling = RowSampling(
            temperature=number / 8, top_p=1 - number / 64, top_k=number, min_p=number / 64, seed=10**12 + number
        )
        world.submit(make_request(number, draw.randrange(1, 9), draw.randrange(1, 12), sampling=sampling))
    turns = 0
    while (step := world.launch()) is not None or world.in_flight:
        if step is not None:
            batch = step.batch
            expected = [request.sampling for request in step.sampled]
            assert batch.temperatures.tolist() == [s.temperature for s in expected]
            assert batch.top_ps.tolist() == [s.top_p for s in expected]
            assert batch.top_ks.tolist() == [s.top_k for s in expected]
            assert batch.min_ps.tolist() == [s.min_p for s in expected]
            assert batch.seeds.tolist() == [s.seed for s in expected]
            assert batch.slots.tolist() == [r.pages.slot for r in step.rows if r.pages is not None]
        if len(world.in_flight) == 2 or step is None:
            world.commit()
        turns += 1
        decoding = [r for r in world.requests if r.state is RequestState.DECODING]
        if turns % 5 == 0 and decoding:
            paused = draw.choice(decoding)
            world.pause(paused)
            world.resume(paused)
        if turns % 7 == 0 and decoding:
            world.end(draw.choice(decoding))
    assert turns > 40
    world.assert_idle()


def test_steps_of_one_steady_number_differ_in_what_they_may_alone() -> None:
    draw = random.Random(5)
    world = World(pages=400, page_size=2, slots=8, budget=20, depth=2, use_eos=True)
    made: list[tuple[int, Batch]] = []
    built = submitted = 0
    while submitted < 40 or world.in_flight:
        if submitted < 40 and draw.random() < 0.1:
            world.submit(make_request(submitted, draw.randrange(1, 9), draw.randrange(5, 30)))
            submitted += 1
        if (step := world.launch()) is not None:
            made.append((built, step.batch))
            built += 1
        if world.in_flight and (len(world.in_flight) == 2 or step is None):
            world.commit()
        decoding = [r for r in world.requests if r.state is RequestState.DECODING]
        if decoding and draw.random() < 0.05:
            paused = draw.choice(decoding)
            world.pause(paused)
            world.resume(paused)
    first: dict[int, tuple[int, Batch]] = {}
    for place, batch in made:
        if batch.steady is None:
            continue
        assert batch.token_ids.tolist() == [SAMPLED_LAST_STEP] * batch.rows
        before, other = first.setdefault(batch.steady, (place, batch))
        assert (batch.starts - other.starts == place - before).all()
        may = {"index", "starts", "table_writes", "page_copies"}
        got, expected = ({k: v for k, v in contents(each).items() if k not in may} for each in (batch, other))
        assert got == expected
    assert 10 < len(first) < sum(batch.steady is not None for _, batch in made) / 2  # it is worth it
    world.assert_idle()


def test_a_batch_is_never_changed_after_it_was_made() -> None:
    world = World(pages=64, page_size=2, slots=4, budget=12, depth=2)
    world.submit(*(make_request(number, 7, 6) for number in range(6)))
    made: list[tuple[Batch, dict[str, object]]] = []
    while (step := world.launch()) is not None or world.in_flight:
        if step is not None:
            made.append((step.batch, contents(step.batch)))
        if step is None or len(world.in_flight) == 2:
            world.commit()
    assert len(made) > 10
    for batch, before in made:
        assert contents(batch) == before


def test_streams_get_a_token_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    world = World(pages=2000, slots=5, budget=24, min_chunk=4)
    streams = [make_request(number, 2, 200) for number in range(4)]
    world.submit(*streams)
    world.turn()
    prompt = make_request(4, 50 * 20, 2)
    world.submit(prompt)
    steps = 0
    while prompt.state in {RequestState.WAITING, RequestState.PREFILLING}:
        step = world.launch()
        assert step is not None
        assert step.rows == (*streams, prompt)
        assert step.batch.query_lens.tolist() == [1, 1, 1, 1, 20]
        world.commit()
        steps += 1
    assert steps == 50


def test_a_step_is_filled_with_the_next_prompt_behind_the_tail_of_the_oldest() -> None:
    world = World(pages=200, slots=4, budget=16)
    world.submit(make_request(0, 40, 1), make_request(1, 40, 1), make_request(2, 3, 1))
    chunks = [
        [(n, len(c.token_ids)) for n, c in ((c.request.sequence, c) for c in step.chunks)] for step in world.steps()
    ]
    assert chunks == [[(0, 16)], [(0, 16)], [(0, 8), (1, 8)], [(1, 16)], [(1, 16)], [(2, 3)]]


def test_the_oldest_prompt_gets_its_least_chunk_beside_full_decoding() -> None:
    world = World(pages=2000, slots=4, budget=4 + 5, min_chunk=5)
    world.submit(*(make_request(number, 1, 100) for number in range(3)))
    world.turn()
    world.submit(make_request(3, 60, 1))
    for step in world.steps(10):
        assert [len(chunk.token_ids) for chunk in step.chunks] == [6]


def test_requests_start_only_when_a_token_of_the_budget_is_left_for_them() -> None:
    world = World(pages=200, slots=8, budget=16)
    world.submit(*(make_request(number, 16, 1) for number in range(4)))
    world.launch()
    assert world.running() == world.requests[:1]
    assert not world.scheduler.blocked


@pytest.mark.parametrize(("budget", "fits"), [(1, False), (11, False), (12, True), (13, True)])
def test_a_budget_in_which_prompts_could_starve_is_refused(budget: int, fits: bool) -> None:
    def policy() -> SchedulingPolicy:
        return SchedulingPolicy(
            max_running_requests=8, step_token_budget=budget, min_prefill_chunk=4, share_inflight_prefixes=True
        )

    if fits:
        assert policy().step_token_budget == budget
    else:
        with pytest.raises(ConfigurationError, match=f"step_token_budget={budget}"):
            policy()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_length_finish_is_known_at_the_launch(depth: int, max_tokens: int) -> None:
    """With two steps in flight too, exactly `max_tokens` steps sample for it."""
    world = World(depth=depth)
    request = make_request(0, 3, max_tokens)
    world.submit(request, make_request(1, 3, 10))
    named = [step.batch.index for step in world.steps() if request in step.rows]
    assert named == list(range(max_tokens))
    assert request.generated == reference(request)
    world.assert_idle()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(page_size: int, pages: int) -> None:
    world = World(pages=32, page_size=page_size)
    prompt = list(range(1, 1 + page_size * pages))
    for number in range(3):
        request = make_request(number, prompt, 3)
        world.submit(request)
        step = world.launch()
        assert step is not None
        assert step.batch.query_lens.tolist() == ([len(prompt)] if number == 0 else [1])
        assert request.cached_tokens == (0 if number == 0 else len(prompt) - 1)
        world.run()
        assert request.generated == reference(request)
    assert world.scheduler.prefix_hit_tokens == 2 * (len(prompt) - 1)
    world.assert_idle()


def test_a_paused_request_is_in_no_step_and_keeps_its_pages_and_promise() -> None:
    world = World(pages=32, depth=2)
    paused, other = make_request(0, 3, 8), make_request(1, 3, 20)
    world.submit(paused, other)
    world.turn()
    world.turn()
    world.pause(paused)
    while world.in_flight:
        world.commit()
    promised, reserved = world.scheduler._admission.promised_pages, world.scheduler.reserved_tokens
    held, generated, computed = paused.pages, list(paused.generated), other.computed
    assert (world.scheduler.running, world.scheduler.paused) == (2, 1)
    for step in world.steps(4):
        assert step.rows == (other,)
    while world.in_flight:
        world.commit()
    launched = other.computed - computed
    assert launched >= 4
    assert world.scheduler._admission.promised_pages == promised - launched
    assert world.scheduler.reserved_tokens == reserved - launched
    assert paused.pages is held
    assert paused.generated == generated
    world.resume(paused)
    world.run()
    assert paused.generated == reference(paused)
    world.assert_idle()


def test_all_paused_means_no_step() -> None:
    world = World()
    request = make_request(0, 3, 8)
    world.submit(request)
    world.turn()
    world.pause(request)
    assert world.launch() is None
    world.resume(request)
    assert world.launch() is not None
    world.run()
    world.assert_idle()


def _random_run(seed: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    world = World(pages=24, page_size=4, slots=5, budget=14, depth=2, use_eos=True)
    batches = []
    for number in range(80):
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
        world.submit(make_request(number, prompt, draw.randrange(1, 12), priority=draw.randrange(2)))
        batches += [contents(step.batch) for step in world.steps(draw.randrange(3))]
        live = [request for request in world.requests if request.state is not RequestState.FINISHED]
        if draw.random() < 0.3:
            for request in draw.sample(live, min(3, len(live))):
                world.end(request)
    batches += [contents(step.batch) for step in world.steps()]
    world.assert_idle()
    return batches


def test_the_same_calls_make_the_same_batches() -> None:
    first = _random_run(1)
    other_addresses = [make_request(number, 1) for number in range(999)]
    assert _random_run(1) == first
    assert len(first) > 80
    del other_addresses
