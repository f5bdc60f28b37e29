"""Samples of one prompt: each its own seed, the prompt computed once, whatever the cache keeps."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncllm.errors import InvalidRequestError
from asyncllm.testing import HashedTokens, ScriptedModel, check_nothing_left, scripted_engine

PROMPT = list(range(40, 40 + 50))  # three pages of 16 and a part of one


@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
def test_the_prompt_of_samples_is_computed_once_and_nothing_stays_leased(prefix_cache: str) -> None:
    async def main() -> None:
        model = ScriptedModel(next_token=HashedTokens())
        async with scripted_engine(model, prefix_cache=prefix_cache) as engine:
            samples = await engine.generate_samples(PROMPT, n=4, seed=7, max_tokens=5)
            assert [sample.seed for sample in samples] == [7, 8, 9, 10]
            assert engine.stats().prompt_tokens == len(PROMPT) + 3  # of each further sample the last token only
            await engine.drain_async()
            check_nothing_left(engine)
            assert prefix_cache == "radix" or engine.stats().cached_pages == 0

    asyncio.run(main())


def test_a_callers_namespace_cannot_be_that_of_samples() -> None:
    with scripted_engine() as engine, pytest.raises(InvalidRequestError, match="cache_namespace must not begin"):
        engine.stream("p", cache_namespace="\0request-0")


@pytest.mark.parametrize("n", [0, -1, True, 2.0, None, "2"])
def test_a_number_of_samples_that_is_none_is_refused(n: object) -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            with pytest.raises(InvalidRequestError, match=r"^n must be an integer >= 1, not "):
                await engine.generate_samples([5, 6], n=n, max_tokens=2)  # type: ignore[arg-type]  # what is tested
            assert len(await engine.generate_samples([5, 6], n=np.int64(2), max_tokens=2)) == 2  # type: ignore[arg-type]

    asyncio.run(main())
