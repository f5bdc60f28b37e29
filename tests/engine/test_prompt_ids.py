"""Token ids as callers give them: what is taken, and what is refused, whatever the fast way makes of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from asyncllm.errors import InvalidRequestError
from asyncllm.testing import scripted_engine

ARRAY = np.arange(2, 5)


@pytest.mark.parametrize(
    "prompt",
    [
        [0, True],
        [5, False],
        [2, 5.0],
        [3, "a"],
        [None],
        [np.bool_(True)],
        [[1, 2]],
        ARRAY > 3,
        1.5 * ARRAY,
        ARRAY[None],
    ],
)
def test_ids_that_are_no_integers_are_refused(prompt: list[object]) -> None:
    """Booleans above all: as numbers they look like the ids 0 and 1."""

    async def main() -> None:
        async with scripted_engine() as engine:
            with pytest.raises(InvalidRequestError, match="holds integers, not"):
                engine.stream(prompt)  # type: ignore[arg-type]  # what is tested

    asyncio.run(main())


@pytest.mark.parametrize("prompt", [5, np.array(5), torch.tensor(5), {1: 2}, b"ab", torch.empty(3, device="meta")])
def test_what_is_no_sequence_is_refused(prompt: object) -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            with pytest.raises(InvalidRequestError, match=r"a prompt (is a text or a|of token ids cannot be read)"):
                engine.stream(prompt)  # type: ignore[arg-type]  # what is tested

    asyncio.run(main())


@pytest.mark.parametrize("prompt", [[-1], [10**6], [2**63 + 5], [2**70], np.array([-3, 4])])
def test_ids_outside_of_the_vocabulary_are_refused(prompt: list[int]) -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            with pytest.raises(InvalidRequestError, match="outside of the vocabulary"):
                engine.stream(prompt)

    asyncio.run(main())


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_arrays_lists_and_ranges_of_the_same_ids_are_the_same_prompt(dtype: type[np.integer]) -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            array = np.arange(4, dtype=dtype)
            listed = (np.int64(0), 1, np.int32(2), 3), iter(torch.arange(4))
            arrays = array, np.arange(8, dtype=dtype)[::2] // 2, torch.from_numpy(array)
            prompts = (range(4), [0, 1, 2, 3], *listed, *arrays)
            completions = [await engine.generate(prompt, max_tokens=5) for prompt in prompts]  # type: ignore[arg-type]
            assert [completion.token_ids for completion in completions] == [completions[0].token_ids] * len(prompts)

    asyncio.run(main())
