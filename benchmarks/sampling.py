"""What each sampling option costs when every row asks for it, against rows that ask for nothing.

    python -m benchmarks.sampling [--device cpu|cuda] [--shape smollm2-135m] [--rows 64] [--prompt 128] [--tokens 32]
        [--rounds 5] [--options NAMES]

Random weights in a published shape; every request generates the same number of tokens, so all runs have the same
steps. (Their distributions are flatter than those of texts: filters keep more.) The options take turns, each between
two runs of rows that ask for nothing: a run is compared with its neighbours alone, so that a machine whose speed
changes does not change the figures, and the median round counts. Prints a JSON line an option and a table: tokens a
second, and how much longer than its neighbours' a step takes, with the least and the most of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncllm import Engine, SamplingParams
from benchmarks.gpu_workloads import SHAPES, write_config

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL: Final = "smollm2-135m"
SMOLLM2_135M: Final = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
NONE: Final = "nothing"
OPTIONS: Final[dict[str, dict[str, object]]] = {
    NONE: {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": dict.fromkeys(range(1000, 1100), 1.5)},
    "allowed_token_ids": {"allowed_token_ids": range(1000, 3000)},
    "banned_token_ids": {"banned_token_ids": range(1000, 1100)},
    "min_tokens": {"min_tokens": 1_000_000, "stop_token_ids": [5]},  # as many as there are: see `params_of`
    "penalties and top_p": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs=0": {"logprobs": 0},
    "logprobs=5": {"logprobs": 5},
    "logprobs=5, processed": {"temperature": 0.8, "top_p": 0.9, "logprobs": 5, "logprobs_mode": "processed"},
    "logits_hook": {"logits_hook": lambda _ids, _logits: None},
}


def params_of(fields: dict[str, object], *, tokens: int, seed: int) -> SamplingParams:
    """Make one request's parameters: greedy, unless the option draws."""
    usual: dict[str, object] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "seed": seed}
    if "min_tokens" in fields:
        fields = fields | {"min_tokens": tokens}
    return SamplingParams(**(usual | fields))  # type: ignore[arg-type]  # names of fields


async def measure(engine: Engine, fields: dict[str, object], prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return the tokens a second of all rows, by the mean time between a row's tokens; prompts are cached."""
    params = [params_of(fields, tokens=tokens, seed=seed) for seed in range(len(prompts))]
    completions = await engine.generate_all(prompts, params)
    return len(prompts) / statistics.fmean(each.timing.itl_mean_seconds or 0.0 for each in completions)


def write_shape(folder: Path, shape: str) -> Path:
    """Write the config.json of a shape into a folder of its own; return the folder."""
    path = write_config(folder, shape) if shape in SHAPES else folder
    if shape == SMALL:
        (path / "config.json").write_text(json.dumps(SMOLLM2_135M), encoding="utf-8")
    return path


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure all options in turns, and print what came of it."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000) for _ in range(arguments.prompt)] for _ in range(arguments.rows)]
    names = list(OPTIONS) if arguments.options is None else [NONE, *arguments.options.split(",")]
    rates: dict[str, list[float]] = {name: [] for name in names}
    longer: dict[str, list[float]] = {name: [] for name in names[1:]}
    async with Engine(
        folder,
        device=arguments.device,
        load_format="dummy",
        dtype="bfloat16",
        max_running_requests=arguments.rows,
        kv_pool_tokens=2 * arguments.rows * (arguments.prompt + arguments.tokens + 64) // 64 * 64,
        seed=0,
    ) as engine:
        for name in names:  # warms up
            await measure(engine, OPTIONS[name], prompts, 4)
        for _ in range(arguments.rounds):
            before = await measure(engine, OPTIONS[NONE], prompts, arguments.tokens)
            for name in names[1:]:
                rate = await measure(engine, OPTIONS[name], prompts, arguments.tokens)
                after = await measure(engine, OPTIONS[NONE], prompts, arguments.tokens)
                rates[name].append(rate)
                rates[NONE].append(after)
                longer[name].append(statistics.fmean((before, after)) / rate - 1)
                before = after
    print(f"\n{'option':>24} {'tokens/s':>10} {'a step takes longer':>20} {'least':>8} {'most':>8}")
    print(f"{NONE:>24} {statistics.median(rates[NONE]):10.0f}")
    for name, found in longer.items():
        rate, shares = statistics.median(rates[name]), [round(each * 100, 1) for each in sorted(found)]
        print(json.dumps({"option": name, "tokens_per_second": round(rate, 1), "longer_percent": shares}))
        print(f"{name:>24} {rate:10.0f} {statistics.median(shares):19.1f}% {shares[0]:7.1f}% {shares[-1]:7.1f}%")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default=SMALL, choices=(SMALL, *SHAPES))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--options", help="comma-separated; all without")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(arguments, write_shape(Path(folder), arguments.shape)))


if __name__ == "__main__":
    main()
