"""The whole engine on a device that lags: every stream has the tokens that it has alone, and all is given back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncllm import Engine
from asyncllm.model.open import TorchBackend
from asyncllm.testing import ScriptedModel
from helpers.engines import TinyModelFolder, small_engine
from helpers.idle import Idle
from helpers.lagging_device import LaggingBackend
from helpers.loops import on_loop

if TYPE_CHECKING:
    from asyncllm.backend import Backend

USERS = 12
REQUESTS = 3


@pytest.mark.parametrize(("library", "kind"), [("asyncio", "scripted"), ("trio", "scripted"), ("asyncio", "tiny")])
def test_streams_on_a_lagging_device_have_the_tokens_that_they_have_alone(
    library: str, kind: str, tiny_model: TinyModelFolder
) -> None:
    """Invariants 3 and 6: with overlap, few pages, shared prefixes, and readers that leave."""

    async def main() -> None:
        rng = random.Random(6)
        asked = [([rng.randrange(3)] * rng.randint(1, 40), rng.randint(1, 12)) for _ in range(USERS * REQUESTS)]
        async with small_engine(kind, tiny_model, overlap=False, prefix_cache="none", max_running_requests=1) as alone:
            whole = [
                (await alone.generate(prompt, max_tokens=max_tokens, ignore_eos=True)).token_ids
                for prompt, max_tokens in asked
            ]
        inner: Backend = ScriptedModel() if kind == "scripted" else TorchBackend()
        engine = Engine(
            "scripted" if kind == "scripted" else tiny_model(),
            backend=LaggingBackend(inner),
            page_size=4,
            kv_pool_tokens=160,
            max_running_requests=8,
            min_prefill_chunk=8,
            step_token_budget=24,
            debug_checks=True,
            device="cpu",
            dtype="float32",
            cpu_threads=1,
        )

        async def use(first: int) -> None:
            for place in range(first, len(asked), USERS):
                prompt, max_tokens = asked[place]
                leaves = rng.choice([max_tokens, max_tokens, rng.randint(0, max_tokens)])
                async with engine.stream(prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
                    read = tuple([(await anext(stream)).id for _ in range(leaves)])
                    assert read == whole[place][:leaves]

        async with engine:
            idle = await Idle.watch(engine)
            async with anyio.create_task_group() as tasks:
                for first in range(USERS):
                    tasks.start_soon(use, first)
            await idle.check()
            assert engine.stats().prefix_hit_tokens > 0

    on_loop(library, main)
