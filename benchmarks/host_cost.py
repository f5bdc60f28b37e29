"""What a step costs the host: the whole engine over a device that takes no time.

    python -m benchmarks.host_cost [--requests 1,64,256,1024] [--tokens 200]

Prints a JSON line a size and a table: microseconds a step and a token of the engine thread and of all threads, and
tokens a second, streaming every token to asyncio readers and returning whole completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import TYPE_CHECKING

from asyncllm.backend import GenerationDefaults, OpenBackend
from asyncllm.engine import Engine
from asyncllm.model.model_config import ModelConfig
from asyncllm.scheduler.batch import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import Progress
    from asyncllm.config import EngineConfig
    from asyncllm.scheduler.batch import Batch

PAGE_SIZE = 16
CONTEXT = 4096


class EndedStep:
    """A step that is done as soon as it is launched."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        """Always."""
        return True

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        """Call at once."""
        callback()
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def result(self) -> StepResult:
        """Token 5 for each row."""
        return self._result


class NoDevice:
    """A backend whose steps take no time and sample token 5."""

    def open(self, config: EngineConfig, progress: Progress) -> OpenBackend:
        """Give a pool in which all requests fit."""
        progress("nothing", 1, 1)
        return OpenBackend(
            runner=self,
            tokenizer=None,
            model_config=ModelConfig.from_hf(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "vocab_size": 1000,
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 1,
                    "num_key_value_heads": 1,
                    "rms_norm_eps": 1e-5,
                    "max_position_embeddings": CONTEXT,
                }
            ),
            generation=GenerationDefaults(),
            eos_token_ids=frozenset({2}),
            page_size=PAGE_SIZE,
            num_pages=config.max_running_requests * CONTEXT // PAGE_SIZE,
            max_model_tokens=CONTEXT,
            step_token_budget=config.max_running_requests + 8192,
            min_prefill_chunk=64,
            resolved={},
        )

    def launch(self, batch: Batch) -> EndedStep:
        """Sample without looking."""
        rows = len(batch.sample_rows)
        return EndedStep(StepResult(index=batch.index, token_ids=(5,) * rows, finite=(True,) * rows))

    def close(self) -> None:
        """Nothing is held."""


async def measure(requests: int, tokens: int, *, streaming: bool) -> dict[str, float]:
    """Run `requests` of `tokens` tokens each; times of the whole process and of the engine thread."""
    async with Engine("none", backend=NoDevice(), max_running_requests=max(requests, 1), seed=0) as engine:
        thread_seconds: list[float] = []
        engine.add_step_listener(lambda _: thread_seconds.append(time.thread_time()))

        async def read(number: int) -> None:
            async with engine.stream([10 + number % 900, number // 900], max_tokens=tokens) as stream:
                async for _ in stream:
                    pass

        started, process = time.perf_counter(), time.process_time()
        if streaming:
            await asyncio.gather(*(read(number) for number in range(requests)))
        else:
            await engine.generate_all(
                [[10 + number % 900, number // 900] for number in range(requests)], max_tokens=tokens
            )
        seconds, process = time.perf_counter() - started, time.process_time() - process
        steps = len(thread_seconds)
        engine_us = 1e6 * (thread_seconds[-1] - thread_seconds[0]) / (steps - 1)
    return {
        "requests": requests,
        "streaming": streaming,
        "steps": steps,
        "engine_thread_us_per_step": round(engine_us, 1),
        "engine_thread_us_per_token": round(engine_us * steps / (requests * tokens), 2),
        "process_us_per_token": round(1e6 * process / (requests * tokens), 2),
        "tokens_per_second": round(requests * tokens / seconds),
    }


def main() -> None:
    """Measure each size and print a table."""
    parser = argparse.ArgumentParser(description="Host time of a step, by the number of running requests.")
    parser.add_argument("--requests", default="1,64,256,1024")
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    rows = []
    for requests in map(int, options.requests.split(",")):
        for streaming in (True, False):
            rows.append(asyncio.run(measure(requests, options.tokens, streaming=streaming)))
            print(json.dumps(rows[-1]), flush=True)
    names = list(rows[0])
    print("\t".join(names))
    for row in rows:
        print("\t".join(str(row[name]) for name in names))


if __name__ == "__main__":
    main()
