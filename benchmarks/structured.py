"""What structured output costs: tokens a second of free and of bound rows, alone and beside each other.

    python -m benchmarks.structured [MODEL] [--device cpu|cuda] [--rows 1,64] [--tokens 64] [--rounds 3]

Every request generates the same number of tokens: the schema's list is longer than that. Workloads take turns, and the
median round counts. Prints a JSON line a workload and a table: tokens a second of all rows, of one free row and of one
bound row, and what one mask takes when the same texts are followed again, by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import TYPE_CHECKING, Final

from asyncllm.engine import Engine
from asyncllm.structure import Structure
from asyncllm.structured.compiler import StructureCompiler

if TYPE_CHECKING:
    from collections.abc import Sequence

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMA: Final = json.dumps({"type": "array", "items": PERSON, "minItems": 1000})
PROMPT: Final = "People, as JSON:\n"


async def measure(engine: Engine, free: int, bound: int, tokens: int) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """Run so many free and bound requests at once; tokens a second, and what the bound ones wrote."""
    written: list[tuple[int, ...]] = []
    speeds: dict[str, list[float]] = {"free": [], "bound": []}

    async def read(kind: str, seed: int) -> None:
        schema = SCHEMA if kind == "bound" else None
        stream = engine.stream(
            PROMPT, max_tokens=tokens, ignore_eos=kind == "free", json_schema=schema, temperature=0.7, seed=seed
        )
        async with stream:
            completion = await stream.result()
        if len(completion.token_ids) != tokens:
            raise ValueError(f"{len(completion.token_ids)} tokens came of {tokens}")
        if kind == "bound":
            written.append(completion.token_ids)
        mean = completion.timing.itl_mean_seconds
        speeds[kind].append(0.0 if not mean else 1 / mean)

    started = time.perf_counter()
    await asyncio.gather(
        *(read("free", seed) for seed in range(free)), *(read("bound", seed) for seed in range(free, free + bound))
    )
    seconds = time.perf_counter() - started
    figures = {"all_tokens_per_second": (free + bound) * tokens / seconds}
    for kind, found in speeds.items():
        if found:
            figures[f"{kind}_row_tokens_per_second"] = statistics.median(found)
    return figures, written


def mask_microseconds(engine: Engine, texts: Sequence[tuple[int, ...]]) -> float:
    """Follow texts by themselves; the mean time of a mask."""
    if engine.tokenizer is None:
        raise ValueError("this model has no tokenizer")
    compiler = StructureCompiler(
        engine.tokenizer, eos_token_ids=engine.tokenizer.eos_token_ids, vocab_size=engine.model_config.vocab_size
    )
    seconds, masks = 0.0, 0
    for text in texts:
        constraint = compiler.compile(Structure("json_schema", SCHEMA))
        for place in range(len(text)):
            started = time.perf_counter()
            constraint.mask(text[:place])
            seconds += time.perf_counter() - started
            masks += 1
    return 1e6 * seconds / masks


async def run(options: argparse.Namespace) -> list[dict[str, float | str]]:
    """Measure all workloads, in turn."""
    works: list[tuple[int, int]] = []
    for rows in map(int, options.rows.split(",")):
        works += [(rows, 0), (0, rows)] + ([(rows - 1, 1)] if rows > 1 else [])
    found: dict[tuple[int, int], list[dict[str, float]]] = {work: [] for work in works}
    texts: list[tuple[int, ...]] = []
    async with Engine(options.model, device=options.device, max_running_requests=max(map(sum, works))) as engine:
        await measure(engine, 1, 0, 4)
        started = time.perf_counter()
        await measure(engine, 0, 1, 1)
        first = time.perf_counter() - started
        started = time.perf_counter()
        await measure(engine, 0, 1, 1)
        compile_seconds = first - (time.perf_counter() - started)
        for _ in range(options.rounds):
            for work in works:
                figures, written = await measure(engine, *work, options.tokens)
                found[work].append(figures)
                texts = written or texts
        mask = mask_microseconds(engine, texts)
    table: list[dict[str, float | str]] = []
    for (free, bound), rounds in found.items():
        row: dict[str, float | str] = {"free_rows": free, "bound_rows": bound}
        for name in ("all_tokens_per_second", "free_row_tokens_per_second", "bound_row_tokens_per_second"):
            row[name] = round(statistics.median(r[name] for r in rounds), 2) if name in rounds[0] else "-"
        table.append(row | {"mask_us": round(mask, 1), "first_use_seconds": round(compile_seconds, 3)})
    return table


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="What structured output costs.")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    table = asyncio.run(run(parser.parse_args()))
    for row in table:
        print(json.dumps(row), flush=True)
    print("\t".join(table[0]))
    for row in table:
        print("\t".join(str(value) for value in row.values()))


if __name__ == "__main__":
    main()
