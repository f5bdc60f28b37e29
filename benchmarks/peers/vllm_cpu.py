"""vLLM's CPU build: AsyncLLM, streaming deltas, compiled."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from benchmarks.workloads import Clock, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Work


async def serve_all(model: str, dtype: str, names: str, round_number: str) -> None:
    """Run the workloads once."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model, dtype=dtype, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048
    )
    engine = AsyncLLM.from_engine_args(arguments)
    loop = asyncio.get_running_loop()
    next_id = iter(range(1 << 30))

    async def read(number: int, one: Work, clock: Clock) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=one.new_tokens,
            min_tokens=one.new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": one.prompt}
        async for output in engine.generate(prompt, params, request_id=str(next(next_id))):
            clock.token(number, len(output.outputs[0].token_ids))

    def serve(work: Sequence[Work], clock: Clock) -> None:
        async def gather() -> None:
            await asyncio.gather(*(read(number, one, clock) for number, one in enumerate(work)))

        asyncio.run_coroutine_threadsafe(gather(), loop).result()

    await asyncio.to_thread(run, "vLLM", serve, names.split(","), int(round_number))
    engine.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    asyncio.run(serve_all(*sys.argv[1:]))
