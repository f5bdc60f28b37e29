"""Greedy tokens equal transformers', token by token, in float32, whatever the engine does inside.

The whole product of prefix cache, page size, step budget, overlap, company and repetition on a tiny random model of
each architecture; a pairwise covering set of it on the demo model, and the whole product there as a long test.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import pytest

from asyncllm import Engine
from helpers.references import greedy_reference, mixed_prompts
from helpers.tiny_models import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COMPANY: Final = 17  # a prompt alone, and beside 16 others
TINY_TOKENS: Final = 6
DEMO_TOKENS: Final = 5
PREFIX_CACHES: Final = ("radix", "none")
PAGE_SIZES: Final = (1, 4, 16)
# Tokens of a chunk at the least, and all that the budget leaves beside 17 slots: one token, odd chunks, no cut at all.
CHUNKS: Final = (1, 7, 600)

Answers = list[tuple[int, ...]]


class TinyModelOf(Protocol):
    """The fixture `tiny_model`."""

    def __call__(self, architecture: str) -> Path:
        """Return the folder of a tiny checkpoint."""


async def answers(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Answers:
    completions = await engine.generate_all(prompts, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [completion.token_ids for completion in completions]


async def check_equal(engine: Engine, prompts: list[tuple[int, ...]], expected: Answers, max_tokens: int) -> None:
    """Alone, beside all the others, and both again when the cache holds them."""
    for repetition in ("first", "again"):
        got = await answers(engine, prompts[-1:], max_tokens)
        assert got == expected[-1:], f"alone, {repetition}"
        assert await answers(engine, prompts, max_tokens) == expected, f"together, {repetition}"
    await engine.check_integrity_async()


def engine_fields(prefix_cache: str, page_size: int, chunk: int, *, overlap: bool) -> dict[str, object]:
    return {
        "dtype": "float32",
        "device": "cpu",
        "prefix_cache": prefix_cache,
        "page_size": page_size,
        "max_running_requests": COMPANY,
        "min_prefill_chunk": chunk,
        "step_token_budget": COMPANY + chunk,
        "overlap": overlap,
    }


class Case(NamedTuple):
    """A model, prompts, and what transformers answers to them."""

    model: Path
    prompts: list[tuple[int, ...]]
    expected: Answers


@pytest.fixture(scope="module", name="tiny_case", params=ARCHITECTURES)
def make_tiny_case(request: pytest.FixtureRequest, tiny_model: TinyModelOf) -> Case:
    folder = tiny_model(request.param)
    prompts = mixed_prompts(COMPANY, vocab_size=300, longest=36)
    return Case(folder, prompts, greedy_reference(folder, prompts, TINY_TOKENS))


@pytest.fixture(scope="module", name="demo_case")
def make_demo_case(demo_gguf: Path) -> Case:
    prompts = mixed_prompts(COMPANY, vocab_size=49_000, longest=36)
    return Case(demo_gguf, prompts, greedy_reference(demo_gguf, prompts, DEMO_TOKENS))


Cell = tuple[str, int, int, bool]


async def check_tiny(case: Case, cell: Cell) -> None:
    prefix_cache, page_size, chunk, overlap = cell
    fields = engine_fields(prefix_cache, page_size, chunk, overlap=overlap)
    fields |= {"kv_pool_tokens": 2048, "debug_checks": True}
    async with Engine(case.model, backend=None, **fields) as engine:
        await check_equal(engine, case.prompts, case.expected, TINY_TOKENS)


async def check_demo(case: Case, cell: Cell) -> None:
    prefix_cache, page_size, chunk, overlap = cell
    fields = engine_fields(prefix_cache, page_size, chunk, overlap=overlap)
    async with Engine(case.model, backend=None, kv_pool_tokens=4096, **fields) as engine:
        await check_equal(engine, case.prompts, case.expected, DEMO_TOKENS)


# Each pair of two settings' values stands in one of these; alone and together, first and again are inside of each.
PAIRWISE: Final[list[Cell]] = [
    ("radix", 1, 1, True),
    ("none", 1, 7, False),
    ("radix", 1, 600, False),
    ("none", 4, 1, False),
    ("radix", 4, 7, True),
    ("none", 4, 600, True),
    ("radix", 16, 1, False),
    ("none", 16, 7, True),
    ("radix", 16, 600, True),
]


VALUES: Final = (PREFIX_CACHES, PAGE_SIZES, CHUNKS, (True, False))
ALL: Final[list[Cell]] = list(itertools.product(*VALUES))


@pytest.mark.parametrize("cell", ALL, ids=repr)
def test_a_tiny_model_gives_transformers_tokens(tiny_case: Case, cell: Cell) -> None:
    asyncio.run(check_tiny(tiny_case, cell))


@pytest.mark.parametrize("cell", PAIRWISE, ids=repr)
def test_the_demo_model_gives_transformers_tokens(demo_case: Case, cell: Cell) -> None:
    asyncio.run(check_demo(demo_case, cell))


@pytest.mark.long
@pytest.mark.parametrize("cell", ALL, ids=repr)
def test_the_demo_model_gives_transformers_tokens_in_the_whole_product(demo_case: Case, cell: Cell) -> None:
    asyncio.run(check_demo(demo_case, cell))


def test_the_covering_set_has_each_pair_of_values() -> None:
    for first, second in itertools.combinations(range(len(VALUES)), 2):
        have = {(cell[first], cell[second]) for cell in PAIRWISE}
        assert have == set(itertools.product(VALUES[first], VALUES[second]))
