"""The command line: stream one answer to the terminal.

Runs in a process of its own, on asyncio's loop; owns its `Engine`. Standard output gets the text alone, standard
error everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING

from asyncllm.engine import Engine
from asyncllm.errors import AsyncLLMError
from asyncllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.outputs import Completion
    from asyncllm.stream import TokenStream

__all__ = ["main"]

EXIT_INTERRUPTED = 130
"""What shells expect of a program that Ctrl-C stopped."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        params = SamplingParams(  # before the model is loaded: a wrong value is told at once
            max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
        )
        asyncio.run(_stream(options, params))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except AsyncLLMError as error:
        print(f"asyncllm: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m asyncllm", description="Stream a language model's answer to the terminal."
    )
    parser.add_argument("prompt", help="the text to continue, or with --chat the message to answer")
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="folder, .gguf file or name (default: %(default)s)"
    )
    parser.add_argument("--chat", action="store_true", help="answer the prompt as a chat message")
    parser.add_argument("--system", help="with --chat: the system message")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    parser.add_argument("--top-p", type=float, help="keep the likeliest tokens up to this probability")
    parser.add_argument("--seed", type=int, help="make a sampled answer repeatable")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    return parser


async def _stream(options: argparse.Namespace, params: SamplingParams) -> None:
    started = time.perf_counter()
    print(f"loading {options.model} ...", file=sys.stderr)
    # One caller: a small pool of slots keeps what is reserved for others free for a long answer.
    engine = Engine(options.model, device=options.device, dtype=options.dtype, max_running_requests=4)
    async with engine:
        print(f"ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
        async with _request(engine, options, params) as stream:
            async for token in stream:
                print(token, end="", flush=True)
            completion = await stream.result()
    print(flush=True)
    print(_summary(completion), file=sys.stderr)


def _request(engine: Engine, options: argparse.Namespace, params: SamplingParams) -> TokenStream:
    if not options.chat:
        return engine.stream(options.prompt, params)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return engine.chat([*system, {"role": "user", "content": options.prompt}], params)


def _summary(completion: Completion) -> str:
    tokens, timing = completion.usage.completion_tokens, completion.timing
    first = timing.ttft_seconds or 0.0
    line = f"{tokens} tokens, first after {1e3 * first:.0f} ms"
    if timing.itl_mean_seconds:
        line += f", {1 / timing.itl_mean_seconds:.1f} tokens/s"
    return f"{line}, finish reason: {completion.finish_reason}"


if __name__ == "__main__":
    sys.exit(main())
