"""What models write under JSON schemas parses and fits, whatever the model would rather say.

The schemas go over the keywords; the judge is `jsonschema`. A model that would not come to an end by itself is cut by
`max_tokens`, and says so.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import anyio
import jsonschema
import pytest

from asyncllm import Engine, SamplingParams
from helpers.json_schemas import SCHEMAS

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm import Completion
    from helpers.engines import TinyModelFolder

# Texts without a bound of their own: a random model writes on.
ENDLESS: Final = {"string", "minLength", "open pattern", "format email", "anything", "any object", "required unnamed"}
PROMPT: Final = 'Short values as JSON: 1, "a", {"b":2}, [3], null, {"c":"d"}\nOne short value as JSON: '
CHECK: Final = jsonschema.Draft202012Validator.FORMAT_CHECKER


def fits(name: str, text: str) -> bool:
    """Whether a text is JSON that fits the schema of this name."""
    return bool(jsonschema.Draft202012Validator(SCHEMAS[name].schema, format_checker=CHECK).is_valid(json.loads(text)))


async def answers(engine: Engine, prompt: str, **fields: object) -> dict[str, Completion]:
    """Ask for all schemas at once."""
    params = [SamplingParams(json_schema=case.schema, **fields) for case in SCHEMAS.values()]  # type: ignore[arg-type]
    return dict(zip(SCHEMAS, await engine.generate_all([prompt] * len(params), params), strict=True))


def check(completions: dict[str, Completion], *, least: int) -> None:
    """Every whole text fits, and at least so many are whole."""
    whole = {name: made.text for name, made in completions.items() if made.finish_reason == "stop"}
    assert [name for name, text in whole.items() if not fits(name, text)] == []
    assert {made.finish_reason for made in completions.values()} <= {"stop", "length"}
    assert len(whole) >= least, sorted(set(completions) - set(whole))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_model_keeps_to_every_schema(tiny_model: TinyModelFolder, seed: int) -> None:
    async def main() -> None:
        async with Engine(tiny_model(), device="cpu", dtype="float32", cpu_threads=1, debug_checks=True) as engine:
            made = await answers(engine, "The", temperature=1.0, max_tokens=100, seed=seed)
            check(made, least=len(SCHEMAS) - len(ENDLESS) - 8)

    anyio.run(main)


def test_the_demo_model_keeps_to_every_schema(demo_gguf: Path) -> None:
    async def main() -> None:
        async with Engine(demo_gguf, device="cpu", kv_pool_tokens=16384) as engine:
            made = await answers(engine, PROMPT, temperature=1.0, seed=5, max_tokens=32)
            check(made, least=len(SCHEMAS) // 3)  # the others write numbers and lists until they are cut

    anyio.run(main)
