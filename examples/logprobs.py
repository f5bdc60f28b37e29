"""How likely texts are: python examples/logprobs.py; what the model thinks of answers, and of its own words.

`max_tokens=0` with `prompt_logprobs` only scores a prompt. Prompts can be token ids, and logprobs are by token.
"""

from __future__ import annotations

import asyncio

from asyncllm import Engine

QUESTION = "The capital of France is"
ANSWERS = (" Paris", " London", " a banana")


async def score(engine: Engine, answer: str) -> float:
    """Return the mean logprob of the answer's tokens after the question."""
    assert engine.tokenizer is not None
    question, rest = (engine.tokenizer.encode(text) for text in (QUESTION, answer))
    scored = await engine.generate([*question, *rest], max_tokens=0, prompt_logprobs=0)
    logprobs = [each.logprob for each in (scored.prompt_logprobs or ())[len(question) :] if each is not None]
    return sum(logprobs) / len(logprobs)


async def main() -> None:
    """Score the answers at once, then stream one with its alternatives, and one without its favourite word."""
    async with Engine("smollm2-135m-instruct") as engine:
        scores = await asyncio.gather(*(score(engine, answer) for answer in ANSWERS))
        for answer, mean in sorted(zip(ANSWERS, scores, strict=True), key=lambda each: -each[1]):
            print(f"{mean:7.2f} {QUESTION}{answer}")
        async with engine.stream(QUESTION, max_tokens=3, logprobs=2) as stream:
            tokens = [token async for token in stream]
        for token in tokens:
            print(repr(token.text), [(number, round(value, 2)) for number, value in token.top_logprobs or ()])
        print(await engine.generate(QUESTION, max_tokens=12, banned_token_ids=[tokens[0].id], repetition_penalty=1.2))


asyncio.run(main())
