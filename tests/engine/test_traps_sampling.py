"""Traps of sampling and seeds that other engines fell into; those of logprobs are in `test_sampling_options.py`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncllm import Completion, Engine, InvalidRequestError
from helpers.engines import TinyModelFolder, small_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPT = [5, 6, 7, 8, 9, 10]
VOCAB = 384


@pytest.fixture
def engine(tiny_model: TinyModelFolder) -> Iterator[Engine]:
    with small_engine("tiny", tiny_model) as opened:
        yield opened


def ask(engine: Engine, *asked: dict[str, Any], prompts: Sequence[Sequence[int]] = ()) -> list[tuple[int, ...]]:
    """Generate for all at once; return their tokens."""

    async def main() -> list[Completion]:
        found: list[Completion] = [None] * len(asked)  # type: ignore[list-item]  # filled below

        async def one(place: int) -> None:
            prompt = prompts[place] if prompts else PROMPT
            found[place] = await engine.generate(prompt, max_tokens=12, ignore_eos=True, **asked[place])

        async with anyio.create_task_group() as tasks:
            for place in range(len(asked)):
                tasks.start_soon(one, place)
        return found

    return [completion.token_ids for completion in anyio.run(main)]


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-4, 1e-2])
@pytest.mark.parametrize("options", [{}, {"top_p": 1e-4}, {"repetition_penalty": 1.2}, {"top_k": 5, "min_p": 0.1}])
def test_a_tiny_temperature_is_greedy(engine: Engine, temperature: float, options: dict[str, Any]) -> None:
    greedy = {name: value for name, value in options.items() if name == "repetition_penalty"}
    tiny, best = ask(engine, {"temperature": temperature, "seed": 3, **options}, {"temperature": 0.0, **greedy})
    assert tiny == best


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": -0.1}, r"top_p must be a number from 0 to 1, not -0.1"),
        ({"top_p": 1.1}, r"top_p must be a number from 0 to 1, not 1.1"),
        ({"top_k": -2}, r"top_k must be an integer >= -1, not -2"),
        ({"min_p": 1.5}, r"min_p must be a number from 0 to 1, not 1.5"),
        ({"temperature": -1.0}, r"temperature must be a finite number >= 0, not -1.0"),
        ({"temperature": float("nan")}, r"temperature must be a finite number >= 0, not nan"),
        ({"seed": -1}, r"seed must be an integer from 0 to 9223372036854775807, not -1"),
        ({"seed": 2**63}, r"seed must be an integer from 0 to 9223372036854775807, not 9223372036854775808"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_filters_out_of_range_are_refused_by_name(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.stream(PROMPT, **fields)


def test_filters_at_the_edges_of_their_range(engine: Engine) -> None:
    """Top-p 0 and top-k 1 keep the best token; top-k of -1, 0, the vocabulary and more, and top-p 1, drop none."""
    drawn = {"temperature": 1.3, "seed": 5}
    best, plain = ask(engine, {"temperature": 0.0}, drawn)
    strict = ({"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0})
    off = ({"top_k": -1}, {"top_k": 0}, {"top_k": VOCAB}, {"top_k": VOCAB + 5}, {"top_p": 1.0}, {"min_p": 0.0})
    assert best != plain
    assert ask(engine, *({**drawn, **each} for each in strict)) == [best] * len(strict)
    assert ask(engine, *({**drawn, **each} for each in off)) == [plain] * len(off)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "presence_penalty": 0.5}])
def test_neighbours_change_no_seeded_request(engine: Engine, options: dict[str, Any]) -> None:
    """Alone, beside ones without a seed, beside ones with, beside itself, and again from the cache."""
    seeded = {"temperature": 1.1, "seed": 7, **options}
    unseeded, other = {"temperature": 1.1}, {"temperature": 0.9, "seed": 8, "frequency_penalty": 0.4}
    (alone,) = ask(engine, seeded)
    assert ask(engine, unseeded, seeded, unseeded)[1] == alone
    assert ask(engine, other, other, seeded)[2] == alone
    assert ask(engine, seeded, seeded) == [alone, alone]
    engine.reset_prefix_cache()
    assert ask(engine, seeded, unseeded)[0] == alone


def test_the_order_of_a_batch_changes_no_seeded_request(engine: Engine) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    asked = [{"temperature": 1.0, "seed": number, "repetition_penalty": 1 + number / 10} for number in range(8)]
    tokens = ask(engine, *asked, prompts=prompts)
    for _ in range(3):
        order = rng.sample(range(8), 8)
        permuted = ask(engine, *(asked[n] for n in order), prompts=[prompts[n] for n in order])
        assert permuted == [tokens[n] for n in order]
