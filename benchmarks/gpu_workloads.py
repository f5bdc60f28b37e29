"""What the GPU benchmarks run: shapes, prompts and lengths, all from fixed seeds; token ids only, no text.

offline: 256 requests at once, prompts and outputs of 100 to 1,024 tokens, temperature 0.6; the workload that
    nano-vllm and mini-sglang publish.
single: one request, 128 tokens in, 256 out, greedy.
prefix: 128 requests that share 2,048 tokens, with 64 more each, 64 out.
life: 400 requests that arrive over time, prompts of 100 to 1,024 tokens, lengths drawn as real answers have them, 30 %
    left halfway.
crowd: 1,024 requests at once, 64 tokens in, 192 out; for engines opened with `--set max_running_requests=1024`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["SHAPES", "WORKLOADS", "Ask", "figures", "write_config"]

SHAPES: dict[str, dict[str, object]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    Args:
        prompt: token ids.
        max_tokens: what it generates.
        temperature: 0 is greedy.
        start_seconds: when it comes, after the workload's start.
        leave_after: tokens after which its caller leaves; None: never.
    """

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.6
    start_seconds: float = 0.0
    leave_after: int | None = None


def write_config(folder: Path, shape: str) -> Path:
    """Write a config.json of this shape into a folder of its own; return the folder."""
    path = folder / shape
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "vocab_size": 151936,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        **SHAPES[shape],
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, 10000) for _ in range(count)]


def offline(seed: int) -> list[Ask]:
    """Make 256 requests at once."""
    rng = random.Random(seed)
    prompts = [_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
    return [Ask(prompt=prompt, max_tokens=rng.randint(100, 1024)) for prompt in prompts]


def single(seed: int) -> list[Ask]:
    """Make one request."""
    return [Ask(prompt=_ids(random.Random(seed), 128), max_tokens=256, temperature=0.0)]


def prefix(seed: int) -> list[Ask]:
    """Make 128 requests of one prefix."""
    rng = random.Random(seed)
    shared = _ids(rng, 2048)
    return [Ask(prompt=shared + _ids(rng, 64), max_tokens=64) for _ in range(128)]


def life(seed: int) -> list[Ask]:
    """Make 400 requests over about ten seconds, three of ten left halfway."""
    rng = random.Random(seed)
    asks, now = [], 0.0
    for _ in range(400):
        now += rng.expovariate(40.0)
        length = max(8, min(1024, int(rng.lognormvariate(5.3, 0.8))))
        asks.append(
            Ask(
                prompt=_ids(rng, rng.randint(100, 1024)),
                max_tokens=length,
                start_seconds=now,
                leave_after=length // 2 if rng.random() < 0.3 else None,
            )
        )
    return asks


def crowd(seed: int) -> list[Ask]:
    """Make 1,024 short requests at once."""
    rng = random.Random(seed)
    return [Ask(prompt=_ids(rng, 64), max_tokens=192) for _ in range(1024)]


def figures(starts: Sequence[float], stamps: Sequence[Sequence[float]], seconds: float) -> dict[str, float]:
    """Say what a run came to.

    Args:
        starts: when each request began.
        stamps: when each request's tokens came.
        seconds: that the run took.
    """
    gaps = sorted(later - earlier for own in stamps for earlier, later in itertools.pairwise(own))
    firsts = sorted(own[0] - start for own, start in zip(stamps, starts, strict=True))
    tokens = sum(map(len, stamps))
    return {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "ttft_p50_ms": 1e3 * firsts[len(firsts) // 2],
        "ttft_p99_ms": 1e3 * firsts[int(0.99 * (len(firsts) - 1))],
        "itl_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "itl_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        "itl_max_ms": 1e3 * gaps[-1],
    }


WORKLOADS = {"offline": offline, "single": single, "prefix": prefix, "life": life, "crowd": crowd}
