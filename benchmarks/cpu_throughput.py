"""asyncllm beside its peers on the CPU, in turn, in one run.

    python -m benchmarks.cpu_throughput --asyncllm PYTHON MODEL [--openvino PYTHON MODEL] [--vllm PYTHON MODEL]
        [--llama-cpp PYTHON MODEL] [--transformers PYTHON MODEL] [--dtype bfloat16] [--rounds 3]
        [--workloads W1,W2,W3,W4]

PYTHON is the interpreter in which that engine is installed, MODEL what it loads; benchmarks/README.md says how to
make both. Each round starts each engine once, so that they meet the machine in the same moods. Prints a JSON line a
round and workload, then a table of medians and of ratios to each peer.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.workloads import MEANING, NAMES

SCRIPTS = {
    "asyncllm": "asyncllm_stream.py",
    "openvino": "openvino_stream.py",
    "vllm": "vllm_cpu.py",
    "llama-cpp": "llama_cpp_batch.py",
    "transformers": "transformers_generate.py",
}
FIGURES = ("tokens_per_second", "ttft_mean_ms", "itl_mean_ms", "itl_p95_ms")
ROOT = Path(__file__).parent.parent


def run_once(
    engine: str, python: str, model: str, options: argparse.Namespace, round_number: int
) -> list[dict[str, object]]:
    """Run one engine's process; returns its lines, none if it fails."""
    script = ROOT / "benchmarks" / "peers" / SCRIPTS[engine]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [python, str(script), model, options.dtype, options.workloads, str(round_number)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{engine} failed: {done.stderr[-2000:]}", file=sys.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        print(json.dumps(line), flush=True)
    return lines


def table(lines: list[dict[str, object]], names: list[str]) -> str:
    """Medians by workload and engine, and our ratio to each."""
    values: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    engines: dict[str, None] = {}
    for line in lines:
        engines[str(line["engine"])] = None
        for figure in FIGURES:
            values[str(line["workload"]), str(line["engine"]), figure].append(float(str(line[figure])))
    rows = []
    for name in names:
        rows.append(f"\n{name}: {MEANING[name]}")
        rows.append(
            f"{'engine':18}{'tokens/s':>10}{'min':>8}{'max':>8}{'TTFT ms':>10}{'ITL ms':>9}{'p95':>8}{'ours':>8}"
        )
        for engine in engines:
            speeds = values[name, engine, "tokens_per_second"]
            if not speeds:
                continue
            ours = values[name, "asyncllm", "tokens_per_second"]
            ratio = statistics.median(ours) / statistics.median(speeds)
            others = (statistics.median(values[name, engine, figure]) for figure in FIGURES[1:])
            first, gap, late = others
            rows.append(
                f"{engine:18}{statistics.median(speeds):10.1f}{min(speeds):8.1f}{max(speeds):8.1f}"
                f"{first:10.0f}{gap:9.1f}{late:8.1f}{ratio:7.2f}x"
            )
    return "\n".join(rows)


def main() -> None:
    """Run all rounds and print the table."""
    parser = argparse.ArgumentParser(description="CPU throughput beside peers, in one run.")
    for engine in SCRIPTS:
        parser.add_argument(f"--{engine}", nargs=2, metavar=("PYTHON", "MODEL"), required=engine == "asyncllm")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(NAMES))
    options = parser.parse_args()
    lines = []
    for round_number in range(options.rounds):
        for engine in SCRIPTS:
            chosen = getattr(options, engine.replace("-", "_"))
            if chosen is not None:
                python, model = chosen
                lines += run_once(engine, python, model, options, round_number)
    print(table(lines, options.workloads.split(",")))


if __name__ == "__main__":
    main()
