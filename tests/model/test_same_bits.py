"""In float32 on the CPU a request's logits have the same bits alone and in company, chunked and whole.

Nothing here is a tolerance. The wide model has the widths of real ones, where products take other kernels for other
numbers of rows: that is what these tests are about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.batches import Row
from helpers.model_steps import TinyDecoder, make_reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

WIDE: dict[str, object] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 640,
    "initializer_range": 0.05,
}


def prompt(count: int, *, seed: int = 0) -> list[int]:
    """Give random token ids."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(200, (count,), generator=generator, device="cpu").tolist()


def chunked(tiny: TinyDecoder, slot: int, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Compute a prompt in chunks of these lengths, the last one what is left: [tokens, vocab]."""
    logits, start = [], 0
    for length in (*chunks, len(tokens)):
        piece = tokens[start : start + length]
        if piece:
            logits.append(tiny.logits([Row(slot, start, piece)]))
        start += length
    return torch.cat(logits)


@pytest.fixture(scope="module")
def tiny_model() -> PreTrainedModel:
    return make_reference("qwen3")


@pytest.fixture(scope="module")
def wide_model() -> PreTrainedModel:
    return make_reference("llama", WIDE)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@settings(max_examples=25)
@given(chunks=st.lists(st.integers(1, 50), max_size=12))
def test_chunked_is_whole(tiny_model: PreTrainedModel, chunks: list[int]) -> None:
    tiny = TinyDecoder(tiny_model)
    tokens = prompt(128)
    assert torch.equal(chunked(tiny, 1, tokens, chunks), tiny.logits([Row(0, 0, tokens)]))


def test_chunked_is_whole_at_real_widths(wide_model: PreTrainedModel, threads: int) -> None:  # noqa: ARG001
    tiny = TinyDecoder(wide_model, num_slots=2)
    tokens = prompt(600)
    whole = tiny.logits([Row(0, 0, tokens)])
    assert torch.equal(chunked(tiny, 1, tokens, [1, 2, 3, 1, 60, 1, 190, 7, 250, 1, 1]), whole)


def test_alone_is_in_company_at_real_widths(wide_model: PreTrainedModel, threads: int) -> None:  # noqa: ARG001
    """One request decodes from position 500 on beside 0 to 5 others, decoding and in prefill, in changing places."""
    tiny = TinyDecoder(wide_model, num_slots=8)
    tokens = [prompt(640, seed=slot) for slot in range(8)]
    whole = tiny.logits([Row(0, 0, tokens[0])])
    tiny.logits([Row(0, 0, tokens[0][:500])])
    for slot in (1, 2, 3):
        tiny.logits([Row(slot, 0, tokens[slot][: 90 * slot])])
    for step in range(16):
        others = [Row(slot, 90 * slot + step, [tokens[slot][90 * slot + step]]) for slot in (1, 2, 3)]
        others += [Row(slot, 0, tokens[slot][: 13 * slot + step]) for slot in (4, 5)]
        rows = others[: step % 6]
        rows.insert(step % (len(rows) + 1), Row(0, 500 + step, [tokens[0][500 + step]]))
        before = sum(len(row.tokens) for row in rows[: [row.slot for row in rows].index(0)])
        assert torch.equal(tiny.logits(rows)[before], whole[500 + step]), f"with {len(rows) - 1} others"


@settings(max_examples=25)
@given(data=st.data())
def test_alone_is_in_any_ragged_company(tiny_model: PreTrainedModel, data: st.DataObject) -> None:
    tiny = TinyDecoder(tiny_model)
    rows, wanted = [], []
    for slot in data.draw(st.permutations(range(data.draw(st.integers(2, 6))))):
        tokens = prompt(data.draw(st.integers(1, 60)), seed=slot)
        start = data.draw(st.integers(0, len(tokens) - 1))
        wanted.append(tiny.logits([Row(slot, 0, tokens)])[start:])
        if start:
            tiny.logits([Row(slot, 0, tokens[:start])])
        rows.append(Row(slot, start, tokens[start:]))
    assert torch.equal(tiny.logits(rows), torch.cat(wanted))


@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
@pytest.mark.parametrize("shuffled", [True, False])
def test_page_size_and_order_of_pages_change_nothing(
    tiny_model: PreTrainedModel, page_size: int, shuffled: bool
) -> None:
    tokens = prompt(128)
    expected = TinyDecoder(tiny_model, page_size=32).logits([Row(0, 0, tokens)])
    tiny = TinyDecoder(tiny_model, page_size=page_size, shuffled=shuffled)
    assert torch.equal(chunked(tiny, 2, tokens, [37, 1, 50]), expected)


@pytest.mark.parametrize("page_size", [4, 16])
def test_leased_pages_and_a_copied_page_give_what_computing_gives(tiny_model: PreTrainedModel, page_size: int) -> None:
    """A prefix cache's hit: whole pages are shared through the table, the last one is copied before it is used."""
    tiny = TinyDecoder(tiny_model, page_size=page_size)
    tokens = prompt(100)
    whole = tiny.logits([Row(0, 0, tokens)])
    hit = 4 * page_size + page_size // 2  # ends inside the fifth page
    table = [(1, column, int(tiny.pages[0, column])) for column in range(4)]
    copies = [(int(tiny.pages[0, 4]), int(tiny.pages[1, 4]))]
    logits = tiny.logits([Row(1, hit, tokens[hit:])], table=table, copies=copies)
    assert torch.equal(logits, whole[hit:])
    assert torch.equal(tiny.logits([Row(0, 99, tokens[99:])])[0], whole[99])  # and the source is as it was


def test_several_pages_are_copied_at_once_in_every_layer(tiny_model: PreTrainedModel) -> None:
    tiny = TinyDecoder(tiny_model, page_size=32)
    tokens = prompt(128)
    whole = tiny.logits([Row(0, 0, tokens)])
    copies = [(int(tiny.pages[0, column]), int(tiny.pages[3, column])) for column in range(3)]
    assert torch.equal(tiny.logits([Row(3, 96, tokens[96:])], copies=copies), whole[96:])


@pytest.mark.parametrize("padded_rows", [1, 5])
def test_padded_rows_change_nothing(tiny_model: PreTrainedModel, padded_rows: int) -> None:
    tokens = prompt(60)
    plain, padded = TinyDecoder(tiny_model), TinyDecoder(tiny_model, padded_rows=padded_rows)
    for tiny in (plain, padded):
        tiny.logits([Row(0, 0, tokens[:30]), Row(1, 0, tokens[:40])])
    rows = [Row(1, 40, tokens[40:41]), Row(0, 30, tokens[30:])]
    assert torch.equal(padded.logits(rows), plain.logits(rows))


def test_what_lies_past_a_rows_length_is_never_read(tiny_model: PreTrainedModel) -> None:
    """A page is handed on as it was left: its other half may hold anything, numbers that are none included."""
    tiny = TinyDecoder(tiny_model, page_size=128, shuffled=False)
    tokens = prompt(100)
    expected = tiny.logits([Row(0, 0, tokens[:50])])
    with torch.inference_mode():
        for tensor in (*tiny.model.kv.keys, *tiny.model.kv.values):
            tensor.fill_(torch.nan)
    assert torch.equal(tiny.logits([Row(0, 0, tokens[:50])]), expected)
    assert torch.isfinite(tiny.logits([Row(0, 50, tokens[50:51])])).all()
