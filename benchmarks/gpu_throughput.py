"""Tokens a second of one GPU through the engine's streams, with random weights in published shapes.

    python -m benchmarks.gpu_throughput [--shapes qwen3-0.6b,qwen3-8b] [--workloads offline,single,prefix,life]
        [--repeats 3] [--blocking] [--parts] [--profile] [--set NAME=VALUE ...]

Every token goes to an asyncio task of its own request. Prints a JSON line a run, then a table of medians beside
what peers were measured to do on an H200. `--blocking` adds runs that return whole completions, in turns with the
others, `--parts` what the engine thread spends in each part of a step, `--profile` which kernels take the GPU's
time; the last two slow the runs down, so take the rates from runs without them.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import collections
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from asyncllm import Engine, SamplingParams
from asyncllm.engine_loop import EngineLoop
from asyncllm.live_requests import LiveRequests
from asyncllm.model.cuda.asked_rows import AskedRows
from asyncllm.model.cuda.cuda_runner import CUDARunner, CUDAStep
from asyncllm.model.cuda.direct_calls import DirectCalls
from asyncllm.model.cuda.staging import StepStaging
from asyncllm.model.cuda.told_rows import ToldRows
from asyncllm.scheduler.scheduler import Scheduler
from benchmarks.gpu_workloads import SHAPES, WORKLOADS, Ask, figures, write_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Output tokens a second on an H200 by `benchmarks.gpu_vllm`: vLLM 0.26 streaming (AsyncLLM) and blocking (LLM), which
# vary with the host by a third; nano-vllm in another run.
PEERS: dict[tuple[str, str], dict[str, float]] = {
    ("qwen3-0.6b", "offline"): {"vllm-async": 15364, "vllm": 21222, "nano-vllm": 19202},
    ("qwen3-0.6b", "single"): {"vllm-async": 462, "vllm": 487, "nano-vllm": 372},
    ("qwen3-0.6b", "prefix"): {"vllm-async": 12693, "vllm": 12444, "nano-vllm": 11510},
    ("qwen3-0.6b", "life"): {"vllm-async": 7133},
    ("qwen3-8b", "offline"): {"vllm-async": 9449, "vllm": 9646, "nano-vllm": 8610},
    ("qwen3-8b", "single"): {"vllm-async": 190.4, "vllm": 190.5, "nano-vllm": 161},
    ("qwen3-8b", "life"): {"vllm-async": 5573},
}
GAPS = (3e-6, 2e-5, 1e-4, 1e-3, 1e9)
ENGINE = {"load_format": "dummy", "dtype": "bfloat16", "max_running_requests": 256, "max_model_tokens": 4096, "seed": 0}


async def stream_one(engine: Engine, ask: Ask, stamps: list[float], began: float) -> None:
    """Read one request's tokens, noting when each came."""
    if ask.start_seconds:
        await asyncio.sleep(max(0.0, began + ask.start_seconds - time.perf_counter()))
        stamps.append(time.perf_counter())
    params = SamplingParams(temperature=ask.temperature, max_tokens=ask.max_tokens, ignore_eos=True)
    async with engine.stream(ask.prompt, params) as stream:
        async for _ in stream:
            stamps.append(time.perf_counter())
            if ask.leave_after is not None and len(stamps) > ask.leave_after:
                break


async def run_once(engine: Engine, asks: list[Ask]) -> dict[str, float]:
    """Run a workload on an engine that has no prefix of it; return its figures."""
    await engine.reset_prefix_cache_async()
    stamps: list[list[float]] = [[] for _ in asks]
    steps, began = engine.stats().steps, time.perf_counter()
    await asyncio.gather(*(stream_one(engine, ask, own, began) for ask, own in zip(asks, stamps, strict=True)))
    seconds = time.perf_counter() - began
    starts = [own.pop(0) if ask.start_seconds else began for ask, own in zip(asks, stamps, strict=True)]
    return figures(starts, stamps, seconds) | {"steps": engine.stats().steps - steps}


async def run_blocking(engine: Engine, asks: list[Ask]) -> float:
    """Run a workload for its completions alone; return tokens a second."""
    await engine.reset_prefix_cache_async()
    params = [SamplingParams(temperature=ask.temperature, max_tokens=ask.max_tokens, ignore_eos=True) for ask in asks]
    began = time.perf_counter()
    completions = await engine.generate_all([ask.prompt for ask in asks], params)
    return sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - began)


@contextlib.contextmanager
def timed_parts(seconds: dict[str, float]) -> Iterator[None]:
    """Have the time that the engine thread spends in each part added up."""
    places: list[tuple[type[Any], str, str]] = [
        (Scheduler, "schedule", "schedule"),
        (CUDARunner, "launch", "launch"),
        (StepStaging, "stage", "launch: stage"),
        (DirectCalls, "launch", "launch: replay"),
        (AskedRows, "enqueue", "launch: edited rows"),
        (ToldRows, "enqueue", "launch: told rows"),
        (CUDAStep, "wait", "wait"),
        (EngineLoop, "_commit_oldest", "commit all"),
        (Scheduler, "commit", "commit: scheduler"),
        (LiveRequests, "advance", "commit: advance"),
        (LiveRequests, "deliver", "deliver"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]

    def clocked(function: Callable[..., object], part: str) -> Callable[..., object]:
        def run(*arguments: object, **named: object) -> object:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds[part] += time.perf_counter() - began

        return run

    try:
        for (owner, name, function), (_, _, part) in zip(originals, places, strict=True):
            setattr(owner, name, clocked(function, part))
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


async def show_parts(engine: Engine, shape: str, workload: str) -> None:
    """Run once with clocks in the engine thread."""
    seconds: dict[str, float] = collections.defaultdict(float)
    with timed_parts(seconds):
        found = await run_once(engine, WORKLOADS[workload](seed=1))
    steps = found["steps"]
    parts = {part: round(1e6 * value / steps, 1) for part, value in seconds.items()}
    whole = round(1e6 * found["seconds"] / steps, 1)
    print(json.dumps({"shape": shape, "workload": workload, "us_per_step": whole, "parts_us": parts}), flush=True)


def idle_seconds(profiler: profile) -> dict[float, float]:
    """Return for how long nothing ran on the GPU between its first and last work, by the gap's length in seconds."""
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    if results is None:
        raise RuntimeError("the profiler has no results")
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type().name == "CUDA" and event.duration_ns()
    )
    idle, busy_until = dict.fromkeys(GAPS, 0.0), spans[0][0]
    for start, end in spans:
        if start > busy_until:
            gap = (start - busy_until) / 1e9
            idle[next(limit for limit in GAPS if gap < limit)] += gap
        busy_until = max(busy_until, end)
    return idle


def idle_ms(idle: dict[float, float]) -> dict[str, float]:
    """Name the gaps by their limits in microseconds."""
    return {f"<{1e6 * limit:g} us": round(1e3 * seconds, 1) for limit, seconds in idle.items()}


async def show_kernels(engine: Engine, shape: str, workload: str) -> None:
    """Run once under torch's profiler; print the GPU's busy share and where its time goes."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        found = await run_once(engine, WORKLOADS[workload](seed=1))
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / 1e6
    idle = idle_seconds(profiler)
    line = {"shape": shape, "workload": workload, "seconds": round(found["seconds"], 3), "steps": found["steps"]}
    line |= {"gpu_busy_share": round(1 - sum(idle.values()) / found["seconds"], 3)}
    print(json.dumps(line | {"gpu_idle_ms_by_gap": idle_ms(idle)}), flush=True)
    for event in events[:16]:
        share = event.self_device_time_total / 1e6 / busy
        each = event.self_device_time_total / event.count
        print(f"    {100 * share:5.1f} %  {event.count:7d} x {each:8.1f} us  {event.key[:80]}", flush=True)


async def measure(shape: str, options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Open an engine of a shape and run all workloads on it."""
    rows: list[dict[str, object]] = []
    began = time.perf_counter()
    async with Engine(write_config(folder, shape), **(ENGINE | options.set)) as engine:
        await engine.generate([1, 2, 3], max_tokens=1, ignore_eos=True)
        first = time.perf_counter() - began
        config = engine.config
        print(
            json.dumps(
                {
                    "shape": shape,
                    "seconds_to_first_token": round(first, 2),
                    "attention_backend": config.attention_backend,
                    "kv_pool_tokens": config.kv_pool_tokens,
                    "page_size": config.page_size,
                    "step_token_budget": config.step_token_budget,
                }
            ),
            flush=True,
        )
        for workload in options.workloads:
            for repeat in range(options.repeats + 1):  # the first one warms up
                found = await run_once(engine, WORKLOADS[workload](seed=repeat))
                if options.blocking:
                    found["blocking_tokens_per_second"] = await run_blocking(engine, WORKLOADS[workload](seed=repeat))
                if repeat:
                    line = {name: round(value, 3) for name, value in found.items()}
                    rows.append({"shape": shape, "workload": workload, "repeat": repeat, **line})
                    print(json.dumps(rows[-1]), flush=True)
            if options.parts:
                await show_parts(engine, shape, workload)
            if options.profile:
                await show_kernels(engine, shape, workload)
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Medians, and ratios to the peers."""
    lines = [f"{'shape':12}{'workload':10}{'tokens/s':>10}{'TTFT p50':>10}{'ITL p50':>9}{'p99':>8}   beside peers"]
    groups: dict[tuple[str, str], list[dict[str, object]]] = collections.defaultdict(list)
    for row in rows:
        groups[str(row["shape"]), str(row["workload"])].append(row)
    for key, group in groups.items():
        names = ("tokens_per_second", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")
        rate, first, gap, late = (statistics.median(float(str(row[name])) for row in group) for name in names)
        peers = ", ".join(f"{rate / speed:.2f}x {peer}" for peer, speed in PEERS.get(key, {}).items())
        lines.append(f"{key[0]:12}{key[1]:10}{rate:10.1f}{first:10.1f}{gap:9.2f}{late:8.2f}   {peers}")
    return "\n".join(lines)


def setting(text: str) -> tuple[str, object]:
    """Read NAME=VALUE, a field of the engine's settings."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--workloads", default="offline,single,prefix,life")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", type=setting, action="append", default=[])
    options = parser.parse_args()
    options.workloads = options.workloads.split(",")
    options.set = dict(options.set)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes.split(","):
            rows += asyncio.run(measure(shape, options, Path(folder)))
    print(table(rows))


if __name__ == "__main__":
    main()
