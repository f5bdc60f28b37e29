"""What a step takes without an engine around it: decode steps by number of rows, and steps with prompts.

    python -m benchmarks.gpu_steps [--shapes qwen3-0.6b,qwen3-8b] [--context 1024] [--rows 1,2,4,...]
        [--set NAME=VALUE ...]

Steps are launched one after the other by the engine's own runner, as fast as they run. Prints a JSON line each, with
the floor: the bytes of weights and KV that a step reads, over the bandwidth of a copy on an H200 (4.26 TB/s).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.config import EngineConfig
from asyncllm.model.open import TorchBackend
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP, Batch
from benchmarks.gpu_throughput import ENGINE, setting
from benchmarks.gpu_workloads import SHAPES, write_config

if TYPE_CHECKING:
    from asyncllm.backend import OpenBackend

BYTES_PER_SECOND = 4.26e12
ROWS = "1,2,4,8,16,24,32,48,64,96,128,192,256"
MIXED = ((0, 64), (63, 193), (0, 512), (0, 1024), (128, 896), (0, 2048), (128, 1920), (0, 4096), (200, 3896))


def make_batch(opened: OpenBackend, decode_rows: int, chunk: int, context: int, *, fill: bool = False) -> Batch:
    """Make a step of rows that decode at position `context` - 1, and one prompt's chunk that ends there."""
    rows = decode_rows + (1 if chunk else 0)
    ints = np.full(rows, context - 1, dtype=np.int32)
    lens = np.ones(rows, dtype=np.int32)
    tokens = np.full(decode_rows, SAMPLED_LAST_STEP, dtype=np.int32)
    if chunk:
        lens[-1] = chunk
        ints[-1] = max(0, context - chunk)
        tokens = np.concatenate([tokens, np.arange(chunk, dtype=np.int32)])
    columns = -(-max(context, chunk) // opened.page_size)
    slots, column = np.divmod(np.arange(rows * columns if fill else 0, dtype=np.int32), columns)
    pages = (slots * columns + column) % opened.num_pages  # rows may share what nobody reads as text
    return Batch(
        index=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=ints,
        query_lens=lens,
        token_ids=tokens,
        sample_rows=np.arange(rows, dtype=np.int32),
        temperatures=np.full(rows, 0.6, dtype=np.float32),
        top_ps=np.ones(rows, dtype=np.float32),
        top_ks=np.zeros(rows, dtype=np.int32),
        min_ps=np.zeros(rows, dtype=np.float32),
        seeds=np.arange(rows, dtype=np.int64),
        table_writes=np.stack([slots, column, pages]).astype(np.int32),
        page_copies=np.zeros((2, 0), dtype=np.int32),
    )


def microseconds(opened: OpenBackend, decode_rows: int, chunk: int, context: int) -> float:
    """Return what a step takes when they follow each other at once; the median of five runs."""
    opened.runner.launch(make_batch(opened, decode_rows, chunk, context, fill=True)).result()
    batch = make_batch(opened, decode_rows, chunk, context)
    times = []
    for _ in range(5):
        steps = 12
        began = time.perf_counter()
        for _ in range(steps):
            last = opened.runner.launch(batch)
        last.wait()
        times.append((time.perf_counter() - began) / steps * 1e6)
    return sorted(times)[2]


def weight_bytes(shape: str) -> int:
    """Return the bytes of 16-bit weights that a decode step reads."""
    size = {name: value for name, value in SHAPES[shape].items() if isinstance(value, int)}
    hidden, heads = size["hidden_size"], size["num_attention_heads"] * 2 + size["num_key_value_heads"] * 2
    layer = hidden * 128 * heads + 3 * hidden * size["intermediate_size"]
    return 2 * (size["num_hidden_layers"] * layer + 151936 * hidden)


def measure(shape: str, options: argparse.Namespace, folder: Path) -> None:
    """Open a shape and time its steps."""
    began = time.perf_counter()
    config = EngineConfig(model=write_config(folder, shape), **(ENGINE | {"kv_pool_tokens": 524288} | options.set))
    opened = TorchBackend().open(config, lambda _stage, _done, _total: None)
    print(json.dumps({"shape": shape, "open_seconds": round(time.perf_counter() - began, 2)}), flush=True)
    layers = int(str(SHAPES[shape]["num_hidden_layers"]))
    try:
        for rows in map(int, options.rows.split(",")):
            taken = microseconds(opened, rows, 0, options.context)
            floor = (weight_bytes(shape) + rows * options.context * layers * 8 * 128 * 4) / BYTES_PER_SECOND * 1e6
            line = {"shape": shape, "rows": rows, "context": options.context, "us": round(taken, 1)}
            share = {"floor_us": round(floor, 1), "of_floor": round(floor / taken, 3)}
            print(json.dumps(line | share | {"tokens_per_second": round(rows / taken * 1e6)}), flush=True)
        for rows, chunk in MIXED:
            if rows + chunk <= opened.step_token_budget:
                taken = microseconds(opened, rows, chunk, options.context)
                print(json.dumps({"shape": shape, "rows": rows, "chunk": chunk, "us": round(taken, 1)}), flush=True)
    finally:
        opened.runner.close()


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--set", type=setting, action="append", default=[])
    options = parser.parse_args()
    options.set = dict(options.set)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes.split(","):
            measure(shape, options, Path(folder))


if __name__ == "__main__":
    main()
