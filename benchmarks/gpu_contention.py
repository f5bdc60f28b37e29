"""What a caller that burns CPU costs an engine on a GPU, since both share the interpreter's lock.

    python -m benchmarks.gpu_contention [--shape qwen3-0.6b] [--streams 1,64] [--tokens 256] [--set NAME=VALUE ...]

Decodes beside an idle caller, beside readers that encode each token as JSON, and beside a thread in a pure Python
loop. Prints a JSON line each, with the rate's ratio to the idle caller's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from asyncllm import Engine, SamplingParams
from benchmarks.gpu_throughput import ENGINE, setting
from benchmarks.gpu_workloads import write_config

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def busy_thread(*, wanted: bool) -> Iterator[None]:
    """Have a thread count as fast as it can."""
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=count)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


async def tokens_per_second(engine: Engine, streams: int, tokens: int, *, encode: bool) -> float:
    """Decode with this many streams; each token may be encoded by its reader."""
    params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True)

    async def read(number: int) -> None:
        async with engine.stream([number + 1] * 128, params) as stream:
            async for token in stream:
                if encode:
                    json.dumps({"text": "x" * 8, "id": token.id, "index": token.index})

    began = time.perf_counter()
    await asyncio.gather(*map(read, range(streams)))
    return streams * tokens / (time.perf_counter() - began)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Open an engine and decode beside each kind of caller, three times each."""
    async with Engine(write_config(folder, options.shape), **(ENGINE | options.set)) as engine:
        await tokens_per_second(engine, 64, 16, encode=False)
        for streams in map(int, options.streams.split(",")):
            idle = 0.0
            for caller in ("idle", "encoding readers", "busy thread"):
                with busy_thread(wanted=caller == "busy thread"):
                    rates = [
                        await tokens_per_second(engine, streams, options.tokens, encode=caller == "encoding readers")
                        for _ in range(3)
                    ]
                rate = statistics.median(rates)
                idle = idle or rate
                line = {"shape": options.shape, "streams": streams, "caller": caller}
                print(json.dumps(line | {"tokens_per_second": round(rate), "ratio": round(rate / idle, 3)}), flush=True)


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--streams", default="1,64")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--set", type=setting, action="append", default=[])
    options = parser.parse_args()
    options.set = dict(options.set)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
