"""The GPU workloads through vLLM, to be compared with `benchmarks.gpu_throughput` on the same machine.

    python -m benchmarks.gpu_vllm --shape qwen3-0.6b --api async [--workloads offline,single,prefix,life] [--repeats 1]

Needs vLLM (measured: 0.26). `--api llm` is its blocking `LLM`, whole completions; `--api async` its `AsyncLLM`, every
token through a stream. Compiled, with graphs, `max_num_seqs=256`, prefix caching on, no tokenizer, else its defaults;
random weights, the same prompts, lengths and seeds. One engine a process. Prints a JSON line a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_workloads import SHAPES, WORKLOADS, Ask, figures, write_config

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
    "max_num_seqs": 256,
    "seed": 0,
    "gpu_memory_utilization": 0.85,
    "enable_prefix_caching": True,
}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at its first use
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def sampling(ask: Ask, **more: object) -> Any:  # noqa: ANN401 - of a library that need not be there
    """Make vLLM's parameters of a request."""
    from vllm import SamplingParams  # noqa: PLC0415 - once the environment is set

    return SamplingParams(
        temperature=ask.temperature, ignore_eos=True, max_tokens=ask.max_tokens, detokenize=False, **more
    )


def show(options: argparse.Namespace, run: Callable[[str, int], dict[str, float]]) -> None:
    """Run all workloads, each once to warm up, and print the figures."""
    for workload in options.workloads.split(","):
        for repeat in range(options.repeats + 1):
            found = run(workload, repeat)
            if repeat:
                line = {"peer": f"vllm {options.api}", "shape": options.shape, "workload": workload, "repeat": repeat}
                print(json.dumps(line | {name: round(value, 3) for name, value in found.items()}), flush=True)


def run_blocking(options: argparse.Namespace, path: Path, began: float) -> None:
    """Measure `LLM`; of a workload in which requests come and go there is nothing to measure."""
    from vllm import LLM  # noqa: PLC0415 - once the environment is set

    llm = LLM(str(path), **SETTINGS)

    def run(workload: str, seed: int) -> dict[str, float]:
        asks = WORKLOADS[workload](seed=seed)
        started = time.perf_counter()
        found = llm.generate(
            [{"prompt_token_ids": ask.prompt} for ask in asks], [sampling(ask) for ask in asks], use_tqdm=False
        )
        seconds = time.perf_counter() - started
        tokens = sum(len(each.outputs[0].token_ids) for each in found)
        return {"tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds}

    llm.generate([{"prompt_token_ids": [1, 2, 3]}], [sampling(Ask(prompt=[], max_tokens=1))], use_tqdm=False)
    print(json.dumps({"seconds_to_first_token": round(time.perf_counter() - began, 1)}), flush=True)
    show(options, run)


async def run_streams(options: argparse.Namespace, path: Path, began: float) -> None:
    """Measure `AsyncLLM`."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - once the environment is set
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - once the environment is set
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - once the environment is set

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(path), **SETTINGS))
    names = iter(range(10**9))

    async def stream(ask: Ask, stamps: list[float]) -> None:
        params = sampling(ask, output_kind=RequestOutputKind.DELTA)
        async for out in engine.generate({"prompt_token_ids": ask.prompt}, params, request_id=str(next(names))):
            stamps.extend([time.perf_counter()] * len(out.outputs[0].token_ids))
            if ask.leave_after is not None and len(stamps) >= ask.leave_after:
                break

    async def come(ask: Ask, stamps: list[float], started: float) -> float:
        await asyncio.sleep(max(0.0, started + ask.start_seconds - time.perf_counter()))
        start = time.perf_counter() if ask.start_seconds else started
        await stream(ask, stamps)
        return start

    async def run(workload: str, seed: int) -> dict[str, float]:
        asks = WORKLOADS[workload](seed=seed)
        stamps: list[list[float]] = [[] for _ in asks]
        started = time.perf_counter()
        starts = await asyncio.gather(*(come(ask, own, started) for ask, own in zip(asks, stamps, strict=True)))
        return figures(starts, stamps, time.perf_counter() - started)

    await stream(Ask(prompt=[1, 2, 3], max_tokens=1), [])
    print(json.dumps({"seconds_to_first_token": round(time.perf_counter() - began, 1)}), flush=True)
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(
        show, options, lambda workload, seed: asyncio.run_coroutine_threadsafe(run(workload, seed), loop).result()
    )
    engine.shutdown()


def main() -> None:
    """Measure as the command line says."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=tuple(SHAPES))
    parser.add_argument("--api", default="async", choices=("llm", "async"))
    parser.add_argument("--workloads", default="offline,single,prefix,life")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), options.shape)
        if options.api == "llm":
            options.workloads = ",".join(name for name in options.workloads.split(",") if name != "life")
            run_blocking(options, path, began)
        else:
            asyncio.run(run_streams(options, path, began))


if __name__ == "__main__":
    main()
