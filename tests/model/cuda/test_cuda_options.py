"""Sampling options on the GPU's own path: rows that ask, beside rows that do not, against what logits say."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import TYPE_CHECKING

import pytest
import torch

from asyncllm import Engine, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from conftest import TinyModel

    from asyncllm import Completion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "max_position_embeddings": 256}
PROMPTS = [[7, 9, 30], list(range(20, 120)), [5] * 64, [250], [9, 8, 7, 6]]
ASKS = [
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0, repetition_penalty=1.4, logprobs=3),
    SamplingParams(max_tokens=16, temperature=0.8, seed=1, min_tokens=12, allowed_token_ids=range(2, 60)),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, seed=2, top_p=0.8, frequency_penalty=0.7),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0, logit_bias={41: 30.0}, presence_penalty=50.0),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, seed=4, banned_token_ids=range(100, 300)),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0, logits_hook=lambda _ids, logits: logits.neg()),
]
PLAIN = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, seed=3, top_k=20)


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", **SHAPE)


def make_engine(folder: Path, **changes: object) -> Engine:
    fields = {"device": "cuda", "dtype": "bfloat16", "kv_pool_tokens": 8192, "max_running_requests": 16, "seed": 3}
    return Engine(folder, **(fields | changes))  # type: ignore[arg-type]  # it has a backend's argument too


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
    return asyncio.run(engine.generate_all(prompts, params))


def test_rows_that_ask_and_rows_that_do_not_are_what_they_are_alone(folder: Path) -> None:
    """With invariant kernels; so what a neighbour asks changes not even rounding."""
    params = [*ASKS, PLAIN, PLAIN]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
    with make_engine(folder, batch_invariant=True) as engine:
        assert engine.config.attention_backend == "triton"
        together = run_all(engine, prompts, params)
        for prompt, asked, completion in zip(prompts, params, together, strict=True):
            assert run_all(engine, [prompt], [asked])[0].token_ids == completion.token_ids
        engine.check_integrity()


def test_tokens_heed_what_is_asked(folder: Path) -> None:
    with make_engine(folder) as engine:
        _, allowed, _, biased, banned, _ = run_all(engine, [PROMPTS[0]] * len(ASKS), ASKS)
    assert set(allowed.token_ids) <= set(range(2, 60))
    assert len(allowed.token_ids) > 12
    assert biased.token_ids.count(41) == 1
    assert not set(banned.token_ids) & set(range(100, 300))


def test_logprobs_are_those_of_transformers_within_the_dtype(folder: Path) -> None:
    """Of the prompt, long enough for several steps, and of the completion; a second time its prefix is cached."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to("cuda")
    prompt = [(7 * number) % 350 + 5 for number in range(150)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, logprobs=2, prompt_logprobs=2)
    with make_engine(folder, step_token_budget=96, min_prefill_chunk=64) as engine:
        for _ in range(2):
            (completion,) = run_all(engine, [prompt], [params])
            tokens = [*prompt, *completion.token_ids]
            with torch.inference_mode():
                logits = model(torch.tensor([tokens], device="cuda")).logits[0].float()
            exact = logits.log_softmax(dim=-1).cpu()
            assert completion.usage.cached_tokens == 0
            assert completion.logprobs is not None
            assert completion.prompt_logprobs is not None
            assert completion.prompt_logprobs[0] is None
            told = [*completion.prompt_logprobs[1:], *completion.logprobs]
            assert len(told) == len(tokens) - 1
            errors = []
            for place, each in enumerate(told):
                assert each is not None
                assert each.id == tokens[place + 1]
                assert len(each.top) == 2
                assert each.top[0][1] >= each.top[1][1]
                errors.append(abs(each.logprob - float(exact[place, each.id])))
            assert math.fsum(errors) / len(errors) < 0.15
            assert all(each is not None and each.rank == 1 for each in completion.logprobs)


def test_scoring_generates_nothing(folder: Path) -> None:
    with make_engine(folder) as engine:
        one, long = run_all(engine, [[9], PROMPTS[1]], [SamplingParams(max_tokens=0, prompt_logprobs=0)] * 2)
        assert one.prompt_logprobs == (None,)
        assert long.token_ids == ()
        assert long.prompt_logprobs is not None
        assert len(long.prompt_logprobs) == len(PROMPTS[1])


def test_logprobs_after_the_step_are_those_that_torch_finds(folder: Path) -> None:
    """Alone they are found by kernels of their own; beside a prompt's by torch."""
    prompts = PROMPTS * 3
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, top_p=0.9, seed=number, logprobs=top)
        for number, (temperature, top) in enumerate(zip([0.0, 0.8, 1.3] * 5, [0, 1, 5, 20, 3] * 3, strict=True))
    ]
    both = [dataclasses.replace(each, prompt_logprobs=0) for each in params]
    with make_engine(folder, batch_invariant=True) as engine:
        found, expected = run_all(engine, prompts, params), run_all(engine, prompts, both)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        for told, right in zip(one.logprobs, other.logprobs, strict=True):
            assert (told.id, told.rank, len(told.top)) == (right.id, right.rank, len(right.top))
            assert told.logprob == pytest.approx(right.logprob, abs=1e-3)
            assert [p for _, p in told.top] == pytest.approx([p for _, p in right.top], abs=1e-3)


def test_with_and_without_graphs_tokens_are_the_same(folder: Path) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(ASKS))]
    found = []
    for graphs in (True, False):
        with make_engine(folder, batch_invariant=True, cuda_graphs=graphs) as engine:
            found.append([each.token_ids for each in run_all(engine, prompts, ASKS)])
    assert found[0] == found[1]


def test_many_requests_that_all_ask_for_something_else_get_it(folder: Path) -> None:
    """More than the tables held when their graphs were captured; a second time in slots that others had."""
    with make_engine(folder) as engine:
        for first in (10, 60):
            params = [
                SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.7, seed=1, logit_bias={first + n: 100.0})
                for n in range(40)
            ]
            completions = run_all(engine, [PROMPTS[n % 5] for n in range(40)], params)
            assert [set(each.token_ids) for each in completions] == [{first + n} for n in range(40)]
        plain = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        after = run_all(engine, PROMPTS, [plain] * 5)
    with make_engine(folder) as engine:
        assert [each.token_ids for each in after] == [each.token_ids for each in run_all(engine, PROMPTS, [plain] * 5)]


def test_what_ends_a_request_is_out_before_its_least_number_of_tokens(folder: Path) -> None:
    """And comes at once from it on: it is by far the likeliest."""
    params = SamplingParams(
        max_tokens=9, temperature=1.0, seed=2, min_tokens=5, stop_token_ids=[7], logit_bias={7: 100.0}
    )
    with make_engine(folder) as engine:
        for completion in run_all(engine, PROMPTS, [params] * 5):
            assert len(completion.token_ids) == 6
            assert completion.token_ids.index(7) == 5
            assert completion.finish_reason == "stop"
