"""B66, B72: the same tokens give the same text on every way out: stream, whole, batch, samples, chat, blocking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import pytest

from asyncllm import LLM, SamplingParams
from asyncllm.testing import ScriptedModel, check_nothing_left, scripted_engine
from asyncllm.testing.vocabulary import BYTES, SPECIAL_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

ASSISTANT: Final = BYTES + SPECIAL_TOKENS.index("<|assistant|>")
ANSWERS: Final[dict[str, tuple[Sequence[int], str, str]]] = (
    {  # ids, text, and text with special tokens shown
        name: (list(text.encode()), text, text)
        for name, text in {
            "emoji with joiners": "👩\u200d👩\u200d👧\u200d👦 and 👍🏽",
            "flags": "🇩🇪🇫🇷🇯🇵",
            "CJK": "你好世界。日本語",
            "Thai": "สวัสดีชาวโลก",
            "Devanagari": "नमस्ते दुनिया",
        }.items()
    }
    | {
        "half a character": (list("你好".encode()[:-1]), "你\ufffd", "你\ufffd"),
        "special tokens": ([97, ASSISTANT, 98], "ab", "a<|assistant|>b"),
        "special within a character": ([*"好".encode()[:1], ASSISTANT, 98], "\ufffdb", "\ufffd<|assistant|>b"),
    }
)


async def all_ways(ids: Sequence[int], params: SamplingParams) -> list[str]:
    """Ask in each way that has an event loop."""
    async with scripted_engine({}, default=ids) as engine:
        streamed = "".join([str(token) async for token in engine.stream("a", params)])
        whole = (await engine.generate("a", params)).text
        batch = [completion.text for completion in await engine.generate_all(["a", "b"], params)]
        samples = [completion.text for completion in await engine.generate_samples("a", params, n=2)]
        chat = (await engine.chat([{"role": "user", "content": "a"}], params).result()).text
        check_nothing_left(engine)
        return [streamed, whole, *batch, *samples, chat]


@pytest.mark.parametrize("shown", [False, True], ids=["skipped", "shown"])
@pytest.mark.parametrize("name", list(ANSWERS))
def test_every_way_out_gives_the_same_text(name: str, shown: bool) -> None:
    ids, text, whole_text = ANSWERS[name]
    params = SamplingParams(max_tokens=len(ids), skip_special_tokens=not shown)
    expected = whole_text if shown else text
    found = anyio.run(all_ways, ids, params)
    with LLM("scripted", backend=ScriptedModel({}, default=ids), seed=0) as llm:
        found += ["".join(map(str, llm.stream("a", params))), llm.generate(["a"], params)[0].text]
    assert found == [expected] * len(found)
