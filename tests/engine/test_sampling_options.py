"""Everything that a caller may ask of tokens, through whole engines: against transformers, alone and among others."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncllm import Engine, InvalidRequestError, RequestFailedError, SamplingParams
from asyncllm.model.open import TorchBackend
from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine
from helpers.lagging_device import LaggingBackend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from asyncllm import Completion
    from helpers.engines import TinyModelFolder

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8, 30, 31, 32, 33, 40, 41]  # over a page, with repeats
LONG = [(7 * number) % 350 + 5 for number in range(60)]


def make_engine(folder: Path, *, lagging: bool = False, **fields: object) -> Engine:
    """Make a small float32 engine, not started."""
    usual: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
        "kv_pool_tokens": 4096,
        "page_size": 16,
        "debug_checks": True,
        "seed": 0,
    }
    backend = LaggingBackend(TorchBackend()) if lagging else None
    return Engine(folder, backend=backend, **{**usual, **fields})


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModelFolder) -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def generate(engine: Engine, prompt: Sequence[int], **fields: Any) -> Completion:  # noqa: ANN401 - fields of all kinds
    """Generate on an open engine, from a test without a loop."""
    return anyio.run(lambda: engine.generate(prompt, **fields))


# -- against transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        ({"banned_token_ids": range(100, 384)}, {"suppress_tokens": list(range(100, 384))}),
        ({"logit_bias": {50: 9.0, 60: -2.0}}, {"sequence_bias": [[[50], 9.0], [[60], -2.0]]}),
        (
            {"logit_bias": {50: 9.0, 8: 12.0}, "repetition_penalty": 1.4},
            {"sequence_bias": [[[50], 9.0], [[8], 12.0]], "repetition_penalty": 1.4},
        ),
        ({"logit_bias": {2: 40.0}, "min_tokens": 7}, {"sequence_bias": [[[2], 40.0]], "min_new_tokens": 7}),
    ],
    ids=" and ".join,
)
def test_greedy_tokens_are_those_of_transformers(
    ours: dict[str, Any], theirs: dict[str, Any], folder: Path, reference: PreTrainedModel
) -> None:
    with make_engine(folder) as engine:
        for prompt in (PROMPT, LONG, [9]):
            found = generate(engine, prompt, max_tokens=25, **ours).token_ids
            ids = reference.generate(  # type: ignore[operator]  # a method, though transformers says a tensor
                torch.tensor([prompt]), max_new_tokens=25, do_sample=False, **theirs
            )
            assert list(found) == ids[0, len(prompt) :].tolist()


def test_min_tokens_keeps_what_ends_away_until_then(folder: Path) -> None:
    """The id of the model's end and a stop id have all the probability, and come at the first place they may."""
    bias = {"logit_bias": {2: 50.0, 77: 40.0}, "max_tokens": 9}
    with make_engine(folder) as engine:
        assert generate(engine, PROMPT, **bias).token_ids == (2,)
        assert generate(engine, PROMPT, ignore_eos=True, **bias).token_ids == (2,) * 9
        for least in (1, 4, 9):
            found = generate(engine, PROMPT, min_tokens=least, stop_token_ids=[77], **bias)
            assert not {2, 77} & set(found.token_ids[:least])
            assert len(found.token_ids) == min(least + 1, 9)
            assert found.finish_reason == ("stop" if least < 9 else "length")


def test_logprobs_are_those_of_transformers_cached_or_not(folder: Path, reference: PreTrainedModel) -> None:
    """In chunks and whole; a second time the prompt is in the cache, and yet computed."""
    for budget in (600, 64 + 256):
        with make_engine(folder, step_token_budget=budget, min_prefill_chunk=16) as engine:
            for _ in range(2):
                found = generate(
                    engine, LONG * 4, max_tokens=6, temperature=0.5, top_k=2, seed=4, logprobs=3, prompt_logprobs=2
                )
                assert found.usage.cached_tokens == 0
                tokens = [*LONG * 4, *found.token_ids]
                with torch.inference_mode():
                    exact = reference(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
                assert found.prompt_logprobs is not None
                assert found.logprobs is not None
                assert found.prompt_logprobs[0] is None
                told = [*found.prompt_logprobs[1:], *found.logprobs]
                assert len(told) == len(tokens) - 1
                for place, each in enumerate(told):
                    assert each is not None
                    assert each.id == tokens[place + 1]
                    assert each.logprob == pytest.approx(float(exact[place, each.id]), abs=2e-4)
                    assert each.rank == 1 + int((exact[place] > exact[place, each.id]).sum())
                    best = exact[place].topk(len(each.top))
                    assert [token for token, _ in each.top] == best.indices.tolist()
                    assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=2e-4)
                assert {len(each.top) for each in found.logprobs} == {3}


def test_two_prompts_that_share_a_beginning_have_the_same_logprobs_there(folder: Path) -> None:
    with make_engine(folder) as engine:
        one, other = (
            generate(engine, [*LONG[:40], *rest], max_tokens=1, prompt_logprobs=0).prompt_logprobs
            for rest in ([5, 6], [9, 9, 9])
        )
    assert one is not None
    assert other is not None
    assert one[:40] == other[:40]


@pytest.mark.parametrize("prompt", [[9], PROMPT, LONG])
def test_max_tokens_0_scores_the_prompt_and_generates_nothing(prompt: list[int], folder: Path) -> None:
    async def main() -> None:
        async with make_engine(folder) as engine:
            full = await engine.generate(prompt, max_tokens=1, prompt_logprobs=2)
            scored = await engine.generate(prompt, max_tokens=0, prompt_logprobs=2)
            async with engine.stream(prompt, max_tokens=0, prompt_logprobs=2) as stream:
                assert [token async for token in stream] == []
                streamed = await stream.result()
            for found in (scored, streamed):
                assert found.prompt_logprobs == full.prompt_logprobs
                assert (found.text, found.token_ids, found.finish_reason) == ("", (), "length")
                assert (found.usage.completion_tokens, found.usage.max_tokens) == (0, 0)
            check_nothing_left(engine)

    anyio.run(main)


def test_a_prompt_as_long_as_the_context_or_the_pool_can_be_scored(folder: Path) -> None:
    for setting in ("max_model_tokens", "kv_pool_tokens"):
        settings: dict[str, Any] = {setting: 64}
        with make_engine(folder, **settings) as engine:
            found = generate(engine, [5] * 64, max_tokens=0, prompt_logprobs=0)
            assert found.prompt_logprobs is not None
            assert len(found.prompt_logprobs) == 64
            with pytest.raises(InvalidRequestError, match=r"(?s)65 prompt tokens.*64"):
                generate(engine, [5] * 65, max_tokens=0, prompt_logprobs=0)


# -- alone and among others --------------------------------------------------------------------------------------

USUAL: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.1, "seed": 2, "top_p": 0.8},
    {"temperature": 1.1, "seed": 3, "top_k": 9, "min_p": 0.02},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "seed": 5, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 6, "logit_bias": {40: 4.0, 41: -math.inf}},
    {"temperature": 1.0, "seed": 7, "allowed_token_ids": range(20, 60)},
    {"temperature": 1.0, "seed": 8, "banned_token_ids": range(100, 384)},
    {"temperature": 0.0, "ignore_eos": False, "logit_bias": {2: 9.0}, "min_tokens": 5},
    {"temperature": 0.9, "seed": 10, "logprobs": 2, "top_p": 0.9},
    {"temperature": 0.9, "seed": 11, "logprobs": 2, "logprobs_mode": "processed", "top_k": 5},
    {"temperature": 0.7, "seed": 12, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 13, "logits_hook": lambda ids, logits: logits.roll(len(ids))},
    {"temperature": 0.8, "seed": 14, "choices": ["alpha beta gamma", "delta"], "ignore_eos": False},
    {
        "temperature": 0.9,
        "seed": 15,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {40: 2.0},
        "banned_token_ids": [41, 42],
        "min_tokens": 12,
        "stop_token_ids": [43],
        "logprobs": 1,
        "top_p": 0.95,
    },
]


def close(one: Completion, other: Completion) -> bool:
    """Whether two completions have the same tokens and the same logprobs."""
    return (one.token_ids, one.text, one.logprobs, one.prompt_logprobs) == (
        other.token_ids,
        other.text,
        other.logprobs,
        other.prompt_logprobs,
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("lagging", [True, False])
def test_all_kinds_in_one_batch_give_each_what_it_has_alone(overlap: bool, lagging: bool, folder: Path) -> None:
    """Twice: the second time prompts are cached, and their order is another. So every pair of kinds meets."""

    async def main() -> None:
        params = [SamplingParams(**(USUAL | kind)) for kind in KINDS]
        prompts = [PROMPT[: 3 + number] + LONG[number : number + 20] for number in range(len(KINDS))]
        async with make_engine(folder) as engine:
            alone = [await engine.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        assert len({completion.token_ids for completion in alone}) == len(alone)
        async with make_engine(folder, overlap=overlap, lagging=lagging, max_running_requests=64) as engine:
            for order in (range(len(params)), reversed(range(len(params)))):
                numbers = list(order)
                together = await engine.generate_all([prompts[n] for n in numbers], [params[n] for n in numbers])
                for number, completion in zip(numbers, together, strict=True):
                    assert close(completion, alone[number]), KINDS[number]
            await engine.drain_async()
            check_nothing_left(engine)

    anyio.run(main)


def test_a_penalized_stream_that_was_parked_goes_on_with_the_tokens_it_has_unpaused(folder: Path) -> None:
    """It gets another slot, whose history is another request's, and its own is sent again."""
    fields: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "temperature": 0.9, "seed": 3}
    fields |= {"max_tokens": 50, "ignore_eos": True, "min_tokens": 30, "logprobs": 1}

    async def main() -> None:
        small = {"page_size": 4, "kv_pool_tokens": 64, "min_prefill_chunk": 4, "max_running_requests": 4}
        async with make_engine(folder, lagging=True, pause_grace_seconds=0.0, step_token_budget=16, **small) as engine:
            alone = await engine.generate(PROMPT[:6], **fields)
            engine.reset_prefix_cache()
            async with engine.stream(PROMPT[:6], buffer_tokens=4, **fields) as slow:
                first = [await anext(slow) for _ in range(3)]
                while not engine.stats().paused:
                    await engine.check_integrity_async()
                others = [engine.stream([20, 21], max_tokens=20, seed=n, presence_penalty=1.0) for n in range(2)]
                for other in others:
                    await other.result()
                assert engine.stats().preemptions == 1
                rest = [token async for token in slow]
                assert tuple(token.id for token in (*first, *rest)) == alone.token_ids
                assert [token.logprob for token in (*first, *rest)] == pytest.approx(
                    [each.logprob for each in alone.logprobs or ()], abs=1e-4
                )

    anyio.run(main)


def test_a_parked_request_that_computes_its_prompt_again_tells_its_logprobs_once(folder: Path) -> None:
    fields: dict[str, Any] = {"prompt_logprobs": 1, "max_tokens": 50, "ignore_eos": True}

    async def main() -> None:
        small: dict[str, Any] = {
            "page_size": 4,
            "kv_pool_tokens": 64,
            "min_prefill_chunk": 4,
            "max_running_requests": 4,
        }
        async with make_engine(folder, pause_grace_seconds=0.0, step_token_budget=16, **small) as engine:
            alone = await engine.generate(PROMPT[:6], **fields)
            async with engine.stream(PROMPT[:6], buffer_tokens=4, **fields) as slow:
                await anext(slow)
                while not engine.stats().paused:
                    await engine.check_integrity_async()
                await engine.generate([20, 21], max_tokens=20)
                assert engine.stats().parked == 1
                await engine.reset_prefix_cache_async()
                completion = await slow.result()
                assert completion.token_ids == alone.token_ids
                assert completion.prompt_logprobs == alone.prompt_logprobs

    anyio.run(main)


def test_a_drawn_seed_is_told_and_repeats_the_tokens(folder: Path) -> None:
    with make_engine(folder, seed=None) as engine:
        drawn = generate(engine, PROMPT, max_tokens=20, temperature=1.5, frequency_penalty=0.2)
        assert generate(engine, PROMPT, max_tokens=20, temperature=1.5, frequency_penalty=0.2).seed != drawn.seed
        again = generate(engine, PROMPT, max_tokens=20, temperature=1.5, frequency_penalty=0.2, seed=drawn.seed)
        assert again.token_ids == drawn.token_ids


def test_tokens_of_a_stream_carry_their_logprobs(folder: Path) -> None:
    async def main() -> None:
        async with make_engine(folder) as engine, engine.stream(PROMPT, logprobs=2, **USUAL) as stream:
            tokens = [token async for token in stream]
            completion = await stream.result()
            assert [(each.logprob, each.top) for each in completion.logprobs or ()] == [
                (token.logprob, token.top_logprobs) for token in tokens
            ]
            plain = [token async for token in engine.stream(PROMPT, **USUAL)]
            assert {(token.logprob, token.top_logprobs) for token in plain} == {(None, None)}

    anyio.run(main)


# -- hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lagging", [True, False])
def test_a_hook_sees_all_tokens_and_the_logits_after_penalties_and_biases(lagging: bool, folder: Path) -> None:
    seen: list[tuple[list[int], torch.Tensor]] = []
    threads: set[str] = set()

    def hook(ids: Sequence[int], logits: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        seen.append((list(ids), logits.clone()))
        logits[:] = -math.inf
        logits[50 + len(ids) % 3] = 1.0

    with make_engine(folder, lagging=lagging) as engine:
        found = generate(
            engine,
            PROMPT,
            max_tokens=4,
            ignore_eos=True,
            logits_hook=hook,
            banned_token_ids=[9],
            repetition_penalty=2.0,
        )
        assert found.token_ids == tuple(50 + (len(PROMPT) + n) % 3 for n in range(4))
    assert lagging or threads == {"asyncllm-engine"}
    assert [ids for ids, _ in seen] == [[*PROMPT, *found.token_ids[:n]] for n in range(4)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, logits in seen:
        with torch.inference_mode():
            after = model(torch.tensor([ids])).logits[0, -1]
        exact = after.clone()
        for token in set(ids):
            exact[token] = exact[token] / 2.0 if exact[token] > 0 else exact[token] * 2.0
        exact[9] = -math.inf
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, exact, atol=2e-4, rtol=1e-4)


def test_a_hook_that_changes_nothing_changes_no_token(folder: Path) -> None:
    for kind in KINDS[:12]:
        with make_engine(folder) as engine:
            without = generate(engine, PROMPT, **(USUAL | kind))
            hooked = generate(engine, PROMPT, **(USUAL | kind), logits_hook=lambda _ids, logits: logits.clone())
        assert hooked.token_ids == without.token_ids
        if without.logprobs is not None:
            assert hooked.logprobs is not None
            for one, other in zip(hooked.logprobs, without.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert (one.id, one.rank, len(one.top)) == (other.id, other.rank, len(other.top))


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (lambda _ids, _logits: 1 / 0, ZeroDivisionError),
        (lambda _ids, _logits: sys.exit("enough"), SystemExit),
        (lambda _ids, logits: logits[:5], ValueError),
        (lambda _ids, _logits: 5, TypeError),
        (lambda _ids, logits: logits.fill_(math.nan), ValueError),
        (lambda _ids, logits: logits.fill_(-math.inf), ValueError),
    ],
    ids=["raises", "exits", "short", "no tensor", "not a number", "nothing left"],
)
def test_a_hook_that_fails_fails_its_request_alone(bad: Any, cause: type[BaseException], folder: Path) -> None:  # noqa: ANN401
    async def main() -> None:
        async with make_engine(folder) as engine:
            other = engine.stream(PROMPT, **USUAL)
            with pytest.raises(RequestFailedError, match="hook") as failed:
                await engine.generate(PROMPT, logits_hook=bad)
            assert isinstance(failed.value.__cause__, cause)
            assert len((await other.result()).token_ids) == 12
            await engine.drain_async()
            check_nothing_left(engine)

    anyio.run(main)


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens must be an integer >= 1, not 0"),
        ({"max_tokens": -1, "prompt_logprobs": 1}, r"max_tokens must be an integer >= 0, not -1"),
        ({"min_tokens": -1}, r"min_tokens must be an integer >= 0, not -1"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens must be an integer from 0 to 8, not 9"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be a finite number > 0, not 0"),
        ({"repetition_penalty": -1.5}, r"repetition_penalty must be a finite number > 0, not -1.5"),
        ({"repetition_penalty": math.nan}, r"repetition_penalty must be a finite number > 0, not nan"),
        ({"presence_penalty": math.inf}, r"presence_penalty must be a finite number, not inf"),
        ({"frequency_penalty": "1"}, r"frequency_penalty must be a finite number, not '1'"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty must be a finite number, not nan"),
        ({"logit_bias": {5: math.inf}}, r"logit_bias must hold finite numbers or -inf, not inf \(of id 5\)"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias must hold finite numbers or -inf, not nan \(of id 5\)"),
        (
            {"logit_bias": {5: -1e39}},
            r"logit_bias must hold numbers of at most 3.40282e\+38 in size, not -1e\+39 \(of id 5\)",
        ),
        ({"logit_bias": {5: 10**400}}, r"logit_bias must hold numbers of at most 3.40282e\+38 in size, not 1000"),
        (
            {"temperature": 1e39},
            r"temperature must be a finite number >= 0 and of at most 3.40282e\+38 in size, not 1e\+39",
        ),
        (
            {"presence_penalty": 10**400},
            r"presence_penalty must be a finite number and of at most 3.40282e\+38 in size",
        ),
        ({"logprobs_mode": np.zeros(2)}, r"logprobs_mode must be 'raw' or 'processed', not array"),
        ({"logit_bias": {"5": 1.0}}, r"logit_bias must hold token ids \(integers >= 0\), not '5'"),
        ({"logit_bias": [1, 2]}, r"logit_bias must map token ids to numbers, not \[1, 2\]"),
        ({"logit_bias": {384: 1.0}}, r"logit_bias has 384, outside of the vocabulary \(0 to 383\)"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must hold at least one id"),
        ({"allowed_token_ids": [384]}, r"allowed_token_ids has 384, outside of the vocabulary \(0 to 383\)"),
        ({"allowed_token_ids": 5}, r"allowed_token_ids must be token ids, not 5"),
        ({"banned_token_ids": [-1]}, r"banned_token_ids must hold token ids \(integers >= 0\), not -1"),
        ({"banned_token_ids": [900]}, r"banned_token_ids has 900, outside of the vocabulary \(0 to 383\)"),
        ({"banned_token_ids": range(384)}, r"no token could be chosen"),
        ({"allowed_token_ids": [2, 7], "banned_token_ids": [7], "min_tokens": 1}, r"no token could be chosen"),
        ({"allowed_token_ids": [7], "logit_bias": {7: -math.inf}}, r"no token could be chosen"),
        ({"logprobs": -1}, r"logprobs must be an integer from 0 to 1024, not -1"),
        ({"logprobs": True}, r"logprobs must be an integer from 0 to 1024, not True"),
        ({"logprobs": 2000}, r"logprobs must be an integer from 0 to 1024, not 2000"),
        ({"logprobs": 385}, r"logprobs must be from 0 to 384, the vocabulary's size, not 385"),
        ({"prompt_logprobs": 385}, r"prompt_logprobs must be from 0 to 384, the vocabulary's size, not 385"),
        ({"logprobs_mode": "cooked"}, r"logprobs_mode must be 'raw' or 'processed', not 'cooked'"),
        ({"logits_hook": 5}, r"logits_hook must be a function of ids and logits, not 5"),
        ({"regex": "a+", "min_tokens": 2}, r"min_tokens cannot be given with regex, which ends by itself"),
        ({"min_tokens": 5000}, r"min_tokens must be from 0 to max_tokens \(\d+\), not 5000"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_wrong_values_are_refused_at_the_call(fields: dict[str, Any], message: str, folder: Path) -> None:
    with make_engine(folder) as engine, pytest.raises(InvalidRequestError, match=message):
        engine.stream([5, 6], **fields)


def test_params_can_be_copied_with_changes_and_stay_as_they_are() -> None:
    biases = {5: 1.0, 6: -math.inf}
    params = SamplingParams(logit_bias=biases, allowed_token_ids=[7, 8], banned_token_ids=range(3), max_tokens=4)
    biases.clear()
    copy = dataclasses.replace(params, max_tokens=5)
    assert copy.logit_bias == params.logit_bias == ((5, 1.0), (6, -math.inf))
    assert copy.allowed_token_ids == (7, 8)
    assert copy.banned_token_ids == (0, 1, 2)


def test_many_ids_are_what_few_are(folder: Path) -> None:
    """Allowed and banned ids that leave the same, as few and as many; with biases, of which some ban."""
    fields: dict[str, Any] = {"temperature": 1.2, "seed": 4, **USUAL}
    left, bias = range(40, 48), {41: 2.0, 300: 1.0, 42: -math.inf}
    others = [token for token in range(384) if token not in left]
    with make_engine(folder) as engine:
        few = generate(engine, PROMPT, allowed_token_ids=left, logit_bias=bias, **fields).token_ids
        banned = generate(engine, PROMPT, banned_token_ids=others, logit_bias=bias, **fields).token_ids
        both = generate(
            engine, PROMPT, allowed_token_ids=range(30, 48), banned_token_ids=range(40), logit_bias=bias, **fields
        ).token_ids
    assert set(few) <= set(left) - {42}
    assert few == banned == both
    assert len(set(few)) > 2


def test_ids_of_one_request_may_be_any_iterable_and_empty_bans_are_none(folder: Path) -> None:
    with make_engine(folder) as engine:
        plain = generate(engine, PROMPT, **USUAL).token_ids
        assert generate(engine, PROMPT, banned_token_ids=[], logit_bias={}, **USUAL).token_ids == plain
        found = generate(engine, PROMPT, allowed_token_ids=(n for n in (7, 8)), **USUAL).token_ids
        assert set(found) <= {7, 8}


# -- defaults, and a model without weights -----------------------------------------------------------------------


def test_a_generation_configs_options_are_defaults(tiny_model: TinyModelFolder, tmp_path: Path) -> None:
    import json
    import shutil

    plain = tiny_model()
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    settings = {"repetition_penalty": 1.5, "suppress_tokens": [7, 8], "min_new_tokens": 3, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    same = {"repetition_penalty": 1.5, "banned_token_ids": [7, 8], "min_tokens": 3}
    off = {"repetition_penalty": 1.0, "banned_token_ids": (), "min_tokens": 0}
    with make_engine(plain) as engine:
        asked, unasked = (generate(engine, PROMPT, max_tokens=20, **each).token_ids for each in (same, {}))
    assert asked != unasked
    with make_engine(folder) as engine:
        assert generate(engine, PROMPT, max_tokens=20).token_ids == asked
        assert generate(engine, PROMPT, max_tokens=20, **off).token_ids == unasked
        assert len(generate(engine, PROMPT, max_tokens=2).token_ids) == 2


def test_stop_texts_count_from_min_tokens_on() -> None:
    with scripted_engine({"p": "ab ab ab"}) as engine:
        for least, text in ((0, ""), (1, ""), (2, "ab "), (4, "ab "), (5, "ab ab "), (8, "ab ab ab")):
            found = anyio.run(lambda n=least: engine.generate("p", stop="ab", min_tokens=n, max_tokens=8))  # type: ignore[misc]
            assert found.text == text, least


def test_a_scripted_model_takes_only_what_may_be_taken_and_tells_that_it_is_certain() -> None:
    with scripted_engine({"ping": "pong"}) as engine:

        def ask(**fields: Any) -> Completion:  # noqa: ANN401 - fields of all kinds
            return anyio.run(lambda: engine.generate("ping", **fields))

        assert ask(presence_penalty=2.0, repetition_penalty=3.0, temperature=5.0).text == "pong"
        assert ask(banned_token_ids=[ord("n")]).text == "po"
        assert ask(allowed_token_ids=[65], max_tokens=3).text == "AAA"
        assert len(ask(min_tokens=6, max_tokens=9).token_ids) == 7
        told = ask(logprobs=2, prompt_logprobs=0)
        found = [(each.id, each.logprob, each.rank) for each in told.logprobs or ()]
        assert found[:4] == [(token, 0.0, 1) for token in b"pong"]
        assert [each.top[0] for each in told.logprobs or ()][:1] == [(ord("p"), 0.0)]
        assert len(told.prompt_logprobs or ()) == 5
        seen: list[int] = []

        def hook(ids: Sequence[int], logits: torch.Tensor) -> None:
            seen.append(len(ids))
            if len(ids) == 7:
                logits[ord("X")] = 1.0

        assert ask(logits_hook=hook).text == "poXg"
        assert seen == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("step", range(5))
def test_a_step_that_fails_and_runs_again_tells_nothing_twice(step: int) -> None:
    """A prompt in four steps; one step of these, or of the completion, fails once."""
    model = ScriptedModel()
    model.fail_at_step(step, MemoryError("no memory"))
    prompt = LONG * 8
    with scripted_engine(model, step_token_budget=128, min_prefill_chunk=16) as engine:
        fields: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 0, "max_tokens": 3, "ignore_eos": True}
        found = generate(engine, [token % 250 for token in prompt], min_tokens=3, **fields)
    assert found.prompt_logprobs is not None
    assert [each and each.id for each in found.prompt_logprobs] == [None, *(token % 250 for token in prompt[1:])]
    assert tuple(each.id for each in found.logprobs or ()) == found.token_ids
    assert len(found.token_ids) == 3
