"""The short dtypes' attention: parts that lie together, prefixes that rows share, chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.model.attention.cpu import CPUAttention
from asyncllm.model.attention.interface import AttentionRows

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
PAGES = 64


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend from the last positions in float64: q [queries, heads, dim], k and v [kv_len, kv_heads, dim]."""
    queries, kv_len = q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * HEAD_DIM**-0.5
    future = torch.ones(queries, kv_len, dtype=torch.bool).triu_(kv_len - queries + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(dim=-1), v)


def check(
    table: list[list[int]], query_lens: list[int], kv_lens: list[int], page_size: int, dtype: torch.dtype
) -> None:
    """Compare one step's attention with the exact one; what no row owns is not a number."""
    generator = torch.Generator("cpu").manual_seed(0)
    keys, values = (
        torch.randn(PAGES, page_size, KV_HEADS, HEAD_DIM, generator=generator, device="cpu").to(dtype) for _ in "kv"
    )
    written = torch.zeros(PAGES, page_size, dtype=torch.bool, device="cpu")
    for pages, kv_len in zip(table, kv_lens, strict=True):
        for position in range(kv_len):
            written[pages[position // page_size], position % page_size] = True
    keys[~written], values[~written] = torch.nan, torch.nan
    queries = torch.randn(sum(query_lens), HEADS, HEAD_DIM, generator=generator, device="cpu").to(dtype)
    columns = max(map(len, table))
    rows = AttentionRows(
        query_lens=np.array(query_lens, dtype=np.int32),
        kv_lens=np.array(kv_lens, dtype=np.int32),
        one_token_rows=query_lens.count(1),
        page_size=page_size,
        page_table=torch.tensor([row + [0] * (columns - len(row)) for row in table], dtype=torch.int32, device="cpu"),
        query_starts=torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32, device="cpu"),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device="cpu"),
    )
    with torch.inference_mode():
        out = CPUAttention(dtype).plan(rows)(queries, keys, values)
    assert out.dtype == dtype
    first = 0
    for pages, count, kv_len in zip(table, query_lens, kv_lens, strict=True):
        k, v = (x[torch.tensor(pages)].flatten(0, 1)[:kv_len] for x in (keys, values))
        expected = exact(queries[first : first + count], k, v)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(out[first : first + count].double(), expected, rtol=tolerance, atol=tolerance)
        first += count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("table", "kv_lens"),
    [
        ([[5, 6, 7]], [11]),
        ([[5, 9, 7]], [9]),
        ([[5, 6, 20, 21, 40]], [19]),
        ([[3, 8, 1, 30, 12, 50, 44]], [26]),
        ([[1, 2, 3], [1, 2, 9], [1, 2]], [12, 9, 8]),
        ([[1, 2, 3], [7], [1, 5, 6]], [10, 2, 12]),
        ([[1, 8, 3, 20, 13, 30, 5], [1, 8, 3, 20, 13, 30, 6]], [27, 26]),
        ([[4, 5, 6], [4, 5, 6]], [12, 12]),
        ([[4, 5, 6], [4, 5, 6]], [5, 12]),
    ],
    ids=[
        "together",
        "apart",
        "two runs",
        "more runs than parts",
        "a shared prefix, whole and with own pages",
        "a shared prefix with another row between",
        "a shared prefix of many runs",
        "all shared",
        "what is shared is past one row's length",
    ],
)
def test_rows_of_one_token_attend_exactly_wherever_their_pages_lie(
    table: list[list[int]], kv_lens: list[int], dtype: torch.dtype
) -> None:
    check(table, [1] * len(table), kv_lens, 4, dtype)


@settings(max_examples=60)
@given(data=st.data())
def test_any_step_attends_exactly(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    free = data.draw(st.permutations(range(PAGES)))
    prefix, free = free[:5], free[5:]
    table, kv_lens = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        leased = data.draw(st.integers(0, len(prefix)))
        own = data.draw(st.integers(1, 6))
        table.append([*prefix[:leased], *free[:own]])
        free = free[own:]
        kv_lens.append((len(table[-1]) - 1) * page_size + data.draw(st.integers(1, page_size)))
    one_token = data.draw(st.integers(0, len(table)))
    query_lens = [1] * one_token
    query_lens += [max(2, data.draw(st.integers(1, kv_len))) for kv_len in kv_lens[one_token:]]
    kv_lens = [max(pair) for pair in zip(kv_lens, query_lens, strict=True)]
    table = [
        row if len(row) * page_size >= kv_len else [*row, free.pop()]
        for row, kv_len in zip(table, kv_lens, strict=True)
    ]
    check(table, query_lens, kv_lens, page_size, data.draw(st.sampled_from([torch.bfloat16, torch.float32])))
