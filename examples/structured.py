"""Text that fits: python examples/structured.py; a schema, a pattern, choices or a grammar say what it must be.

The model decides within them. The schema is that of a pydantic class here.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, Field

from asyncllm import Engine


class Recipe(BaseModel):
    """What the model is to write."""

    name: str = Field(max_length=30)
    vegetarian: bool
    minutes: int = Field(ge=1, le=240)
    ingredients: list[str] = Field(min_length=2, max_length=3)


async def main() -> None:
    """Ask in each way, all at once."""
    question = [{"role": "user", "content": "Give me a recipe for a quick soup."}]
    async with Engine("smollm2-135m-instruct") as engine:
        recipe, minutes, yes_or_no, sums = await asyncio.gather(
            engine.chat(question, json_schema=Recipe, max_tokens=160).result(),
            engine.generate("A soup takes this many minutes:", regex=" [1-9][0-9]?", max_tokens=8),
            engine.generate("Is a tomato soup red? Answer:", choices=[" yes", " no"], max_tokens=8),
            engine.generate("One and two: ", grammar='start: NUM " + " NUM " = " NUM \nNUM: /[1-9]/', max_tokens=12),
        )
    print(recipe.text)
    if recipe.finish_reason == "stop":  # else max_tokens has cut it
        print(repr(Recipe.model_validate_json(recipe.text)))
    print(f"minutes:{minutes.text}; red:{yes_or_no.text}; {sums.text}")


asyncio.run(main())
