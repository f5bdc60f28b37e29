"""Logprobs found behind a step: over many steps, against the scores of the same logits."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.model.cuda.fused_model import StepBuffers
from asyncllm.model.cuda.plain_kernels import PlainKernels
from asyncllm.model.cuda.staged_graph import BehindSteps
from asyncllm.model.cuda.step_layout import StepLayout
from asyncllm.model.cuda.told_rows import ToldRows, tells_all
from asyncllm.model.sampler import score_tokens
from asyncllm.request import LogitOptions
from asyncllm.scheduler.batch import PromptScores, StepResult
from helpers.batches import Row, make_batch
from helpers.fused_steps import make_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncllm.model.option_outcome import Outcome
    from asyncllm.outputs import TokenLogprob
    from asyncllm.scheduler.batch import Batch

VOCAB = 70
ROWS, TURNS = 9, 3
MOST = 32
CPU = torch.device("cpu")

Places = np.typing.NDArray[np.int64]


class Device:
    """What is on the device: the steps' memory, and the rows that are told of; logits and tokens are the test's."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> None:
        layout = StepLayout(tokens=ROWS, rows=ROWS, tiles=0, writes=1)
        self.rng = np.random.default_rng(seed)
        self.buffers = StepBuffers([layout], vocab_size=VOCAB, dtype=dtype, device=CPU)
        self.rows = ToldRows(
            self.buffers,
            PlainKernels(make_config(vocab_size=VOCAB), dtype),
            BehindSteps(turns=TURNS, captures=False, device=CPU, on_stream=contextlib.nullcontext),
        )

    def run_step(self) -> None:
        """Leave another step's logits and tokens: all logits of a row differ, and 16 bits hold them."""
        order = self.rng.permuted(np.tile(np.arange(VOCAB), (ROWS, 1)), axis=1)
        scales = self.rng.choice([0.0625, 0.25, 1.0], (ROWS, 1))
        self.buffers.logits.copy_(torch.from_numpy((order - VOCAB // 2) * scales))
        tokens = np.where(self.rng.random(ROWS) < 0.3, order.argmax(axis=1), self.rng.integers(VOCAB, size=ROWS))
        self.buffers.output[0] = torch.from_numpy(tokens)
        self.buffers.output[1] = 1

    def result(self, batch: Batch, places: Places) -> StepResult:
        """Return what the step sampled."""
        tokens = self.buffers.output[0, torch.from_numpy(places)].tolist()
        return StepResult(index=batch.index, token_ids=tuple(tokens), finite=(True,) * len(tokens))

    def expected(self, batch: Batch, places: Places) -> dict[int, list[float]]:
        """Return the scores of the samples that are told of, with `MOST` likeliest tokens, from the logits as is."""
        asked = [sample for sample, each in batch.options.items() if each.logprobs is not None]
        at = torch.from_numpy(places[asked])
        scores = score_tokens(self.buffers.logits[at].float(), self.buffers.output[0, at].long(), MOST)
        return dict(zip(asked, scores.tolist(), strict=True))


def told(logprobs: int | None) -> LogitOptions:
    return LogitOptions(prompt_tokens=1, logprobs=logprobs)


def make_step(device: Device, index: int, options: Mapping[int, LogitOptions]) -> tuple[Batch, Places]:
    """Make a step of at least as many samples as have options, beside rows that sample nothing; places scattered."""
    samples = max(options) + 1
    drops = set(device.rng.permutation(ROWS)[samples:].tolist())
    batch = make_batch(index, [Row(slot=row, start=1, tokens=[0], sample=row not in drops) for row in range(ROWS)])
    return dataclasses.replace(batch, options=options), device.rng.permutation(ROWS)[:samples]


def random_options(rng: np.random.Generator) -> dict[int, LogitOptions]:
    """Ask for logprobs in at least one sample, elsewhere for nothing, or for what changes logits alone or as well."""
    samples = int(rng.integers(1, ROWS + 1))
    kinds = {
        sample: (told(int(rng.choice([0, 1, 2, 5, MOST]))), told(None), None)[int(kind)]
        for sample, kind in enumerate(rng.choice(3, samples, p=[0.6, 0.2, 0.2]))
    }
    kinds[int(rng.integers(samples))] = told(3)
    options = {sample: asked for sample, asked in kinds.items() if asked is not None}
    for sample, asked in options.items():
        if rng.random() < 0.3:
            options[sample] = dataclasses.replace(asked, presence_penalty=1.0)
    return options


def assert_tells(got: TokenLogprob, token: int, scores: list[float], count: int) -> None:
    """Compare with scores that have `MOST` likeliest tokens."""
    assert got.id == token
    assert got.logprob == pytest.approx(scores[0], abs=1e-5)
    assert got.rank == scores[1]
    assert [each for each, _ in got.top] == scores[2 : 2 + count]
    assert [logprob for _, logprob in got.top] == pytest.approx(scores[2 + MOST : 2 + MOST + count], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_what_samples_are_told_is_what_their_steps_logits_say(seed: int, dtype: torch.dtype) -> None:
    """Of the model's logits, whatever edits them; each result is read just before its turn comes again."""
    device = Device(dtype, seed=seed)
    unread: collections.deque[tuple[Batch, Outcome, StepResult, dict[int, list[float]]]] = collections.deque()

    def read() -> None:
        batch, outcome, result, expected = unread.popleft()
        whole = outcome.complete(result)
        assert whole.logprobs.keys() == expected.keys()
        for sample, scores in expected.items():
            count = batch.options[sample].logprobs
            assert count is not None
            assert_tells(whole.logprobs[sample], result.token_ids[sample], scores, count)

    for index in range(40):
        if len(unread) == TURNS:
            read()
        batch, places = make_step(device, index, random_options(device.rng))
        assert tells_all(batch)
        device.run_step()
        outcome = device.rows.enqueue(batch, places, turn=index % TURNS, direct=None)
        unread.append((batch, outcome, device.result(batch, places), device.expected(batch, places)))
    while unread:
        read()


def test_the_rest_of_a_result_stays_as_it_is() -> None:
    device = Device()
    batch, places = make_step(device, 5, {1: told(2), 4: told(0)})
    device.run_step()
    outcome = device.rows.enqueue(batch, places, turn=0, direct=None)
    error = ValueError("its hook's")
    result = dataclasses.replace(
        device.result(batch, places), finite=(True, True, False, True, True), failures={2: error}
    )
    whole = outcome.complete(result)
    assert dataclasses.replace(whole, logprobs={}) == result
    assert whole.logprobs.keys() == {1, 4}
    assert (len(whole.logprobs[1].top), len(whole.logprobs[4].top)) == (2, 0)


@pytest.mark.parametrize("rows", range(1, ROWS + 1))
def test_as_many_rows_as_a_step_has_are_told_of(rows: int) -> None:
    device = Device()
    batch, places = make_step(device, 0, {sample: told(sample) for sample in range(rows)})
    device.run_step()
    whole = device.rows.enqueue(batch, places, turn=0, direct=None).complete(device.result(batch, places))
    for sample, scores in device.expected(batch, places).items():
        assert_tells(whole.logprobs[sample], int(device.buffers.output[0, places[sample]]), scores, sample)


def test_logits_and_results_of_the_step_are_left_alone() -> None:
    device = Device()
    batch, places = make_step(device, 0, {0: told(5), 2: told(MOST)})
    device.run_step()
    logits, output = device.buffers.logits.clone(), device.buffers.output.clone()
    device.rows.enqueue(batch, places, turn=0, direct=None)
    assert torch.equal(device.buffers.logits, logits)
    assert torch.equal(device.buffers.output, output)


def test_rows_can_be_told_of_again_after_a_close() -> None:
    device = Device()
    batch, places = make_step(device, 0, {0: told(1)})
    device.run_step()
    device.rows.enqueue(batch, places, turn=0, direct=None)
    device.rows.close()
    device.rows.close()
    whole = device.rows.enqueue(batch, places, turn=1, direct=None).complete(device.result(batch, places))
    assert_tells(whole.logprobs[0], int(device.buffers.output[0, places[0]]), device.expected(batch, places)[0], 1)


EDITED = LogitOptions(prompt_tokens=1, repetition_penalty=1.5, bias_ids=np.array([3], dtype=np.int32))
HOOKED = LogitOptions(prompt_tokens=1, hook=lambda _tokens, logits: logits)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (told(0), True),
        (told(MOST), True),
        (told(MOST + 1), False),
        (dataclasses.replace(EDITED, logprobs=5), True),
        (dataclasses.replace(told(2), processed_logprobs=True), False),
        (dataclasses.replace(told(None), processed_logprobs=True), True),
        (HOOKED, False),
        (dataclasses.replace(HOOKED, logprobs=2), False),
    ],
    ids=["0", "the most", "more", "edited", "processed", "nothing processed", "a hook", "a hook and logprobs"],
)
def test_this_way_tells_some_of_the_models_likeliest_tokens_alone(asked: LogitOptions, expected: bool) -> None:
    """One sample that asks for something else sends the whole step the other way, wherever it is."""
    device = Device()
    for options in ({0: asked}, {0: asked, 1: told(3)}, {0: told(3), 1: EDITED, 2: asked}):
        batch, _ = make_step(device, 0, options)
        assert tells_all(batch) is expected


def test_this_way_does_not_tell_of_prompts() -> None:
    device = Device()
    scores = {1: PromptScores(targets=np.array([4], dtype=np.int32), logprobs=0)}
    for options in ({}, {0: told(3)}):
        batch, _ = make_step(device, 0, options or {0: told(None)})
        assert not tells_all(dataclasses.replace(batch, options=options, prompt_scores=scores))
