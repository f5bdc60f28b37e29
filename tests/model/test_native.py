"""The native kernels against exact results and their plain twins, and the ways in which they are not to be had."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import ConfigurationError
from asyncllm.model.attention.choice import choose_kernels
from asyncllm.model.attention.interface import AttentionRows
from asyncllm.model.layer_ops import PlainLayerOps
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.native.library import NativeLibrary, NativeUnavailableError, load_native
from asyncllm.model.native.native_attention import NativeAttention
from asyncllm.model.native.native_ops import NativeLayerOps
from asyncllm.model.rope import RotaryTables
from asyncllm.model.rope_config import RopeConfig
from helpers.batches import Row
from helpers.model_steps import TinyDecoder, make_reference, reference_logits

if TYPE_CHECKING:
    from pathlib import Path

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
PAGES = 96
CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    """The kernels of this file's shape, where the machine has a compiler."""
    try:
        return load_native(HEAD_DIM, HEADS // KV_HEADS)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["tiles", "vectors"])
def attending(request: pytest.FixtureRequest, library: NativeLibrary) -> NativeLibrary:
    """The kernels with attention on the matrix unit, where there is one, and without."""
    if request.param == "tiles" and not library.can_attend_tiles:
        pytest.skip("the processor has no matrix unit")
    chosen = copy.copy(library)
    chosen.can_attend_tiles = request.param == "tiles"
    return chosen


def make_config(head_dim: int = HEAD_DIM) -> ModelConfig:
    """Describe a model of this width."""
    return ModelConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_type="default", theta=10000.0),
        max_position_embeddings=128,
        eos_token_ids=frozenset(),
    )


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(BF16)


class Pages:
    """Keys and values in shuffled pages; what no row owns is not a number."""

    def __init__(self, kv_lens: list[int], page_size: int) -> None:
        counts = [-(-length // page_size) for length in kv_lens]
        pool = np.random.default_rng(0).permutation(sum(counts) + 1).astype(np.int32)
        ends = np.cumsum(counts)
        self.page_size = page_size
        self.table = np.zeros((len(kv_lens), max(counts)), dtype=np.int32)
        self.keys, self.values = (random(sum(counts) + 1, page_size, KV_HEADS, HEAD_DIM, seed=i) for i in (1, 2))
        for row, (end, count, length) in enumerate(zip(ends, counts, kv_lens, strict=True)):
            self.table[row, :count] = pool[end - count : end]
            self.keys[self.table[row, count - 1], (length - 1) % page_size + 1 :] = torch.nan
            self.values[self.table[row, count - 1], (length - 1) % page_size + 1 :] = torch.nan
        self.keys[pool[-1]], self.values[pool[-1]] = torch.nan, torch.nan

    def row(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's keys and values, float64 [length, heads, head_dim]."""
        pages = torch.from_numpy(self.table[row, : -(-length // self.page_size)].astype(np.int64))
        return tuple(  # type: ignore[return-value]
            side[pages].flatten(0, 1)[:length].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
            for side in (self.keys, self.values)
        )


def attend(
    library: NativeLibrary, pages: Pages, queries: torch.Tensor, query_lens: list[int], kv_lens: list[int]
) -> torch.Tensor:
    rows = AttentionRows(
        query_lens=np.array(query_lens, dtype=np.int32),
        kv_lens=np.array(kv_lens, dtype=np.int32),
        one_token_rows=query_lens.count(1),
        page_size=pages.page_size,
        page_table=torch.from_numpy(pages.table[: len(kv_lens)]),
        query_starts=torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32, device="cpu"),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device="cpu"),
    )
    with torch.inference_mode():
        return NativeAttention(library).plan(rows)(queries, pages.keys, pages.values)


@settings(deadline=None, max_examples=30)
@given(
    kv_lens=st.lists(st.integers(1, 1300), min_size=1, max_size=6),
    chunks=st.lists(st.tuples(st.integers(2, 50), st.integers(0, 80)), max_size=2),
    page_size=st.sampled_from([1, 16, 50, 256]),
)
def test_attention_is_exact_up_to_rounding_for_any_lengths_and_pages(
    attending: NativeLibrary, kv_lens: list[int], chunks: list[tuple[int, int]], page_size: int
) -> None:
    query_lens = [1] * len(kv_lens) + [queries for queries, _ in chunks]
    lens = kv_lens + [queries + before for queries, before in chunks]
    pages = Pages(lens, page_size)
    queries = random(sum(query_lens), HEADS, HEAD_DIM)
    out = attend(attending, pages, queries, query_lens, lens)
    first = 0
    for row, (count, length) in enumerate(zip(query_lens, lens, strict=True)):
        k, v = pages.row(row, length)
        scores = torch.einsum("qhd,khd->hqk", queries[first : first + count].double(), k) * HEAD_DIM**-0.5
        future = torch.ones(count, length, dtype=torch.bool).triu_(length - count + 1)
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(dim=-1), v)
        torch.testing.assert_close(out[first : first + count].double(), expected, rtol=0.03, atol=0.03)
        first += count


def test_a_row_has_the_same_bits_alone_and_beside_others(attending: NativeLibrary) -> None:
    lens = [700, 3, 1200, 64, 513]
    pages, queries = Pages(lens, 16), random(5, HEADS, HEAD_DIM)
    together = attend(attending, pages, queries, [1] * 5, lens)
    alone = attend(attending, pages, queries[:1], [1], lens[:1])
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("page_size", [50, 64, 256])
def test_rows_that_share_pages_have_the_bits_that_each_has_alone(attending: NativeLibrary, page_size: int) -> None:
    """More rows than read a part together; some share two parts, one a part and some of the next, one none."""
    lens = [560, 513, 800, 530, 600, 512, 700, 515, 516, 517, 518, 519, 300, 90]
    pages, queries = Pages(lens, page_size), random(len(lens), HEADS, HEAD_DIM)
    for row, length in enumerate(lens[:-1]):
        if row != 2:
            shared = 512 // page_size if length >= 512 else -(-length // page_size)
            pages.table[row, :shared] = pages.table[2, :shared]
    together = attend(attending, pages, queries, [1] * len(lens), lens)
    for row, length in enumerate(lens):
        alone = copy.copy(pages)
        alone.table = pages.table[row : row + 1]
        assert torch.equal(together[row], attend(attending, alone, queries[row : row + 1], [1], [length])[0])


def test_a_prompt_has_the_same_bits_however_it_is_cut(library: NativeLibrary) -> None:
    if not library.can_attend_tiles:
        pytest.skip("the processor has no matrix unit")
    pages, queries = Pages([200], 16), random(200, HEADS, HEAD_DIM)
    whole = attend(library, pages, queries, [200], [200])
    for first, last in ((0, 2), (2, 75), (75, 200), (64, 128), (190, 200)):
        part = attend(library, pages, queries[first:last], [last - first], [last])
        assert torch.equal(part, whole[first:last])


def test_what_comes_later_or_belongs_to_nobody_changes_nothing(library: NativeLibrary) -> None:
    """Its weight is zero, not just small; and nothing that is not finite is multiplied by it."""
    if not library.can_attend_tiles:
        pytest.skip("the processor has no matrix unit")
    pages, queries = Pages([100], 128), random(100, HEADS, HEAD_DIM)
    keys, values = (torch.full((2, 128, KV_HEADS, HEAD_DIM), torch.nan, dtype=BF16, device="cpu") for _ in "kv")
    keys[1], values[1] = pages.keys[pages.table[0, 0]], pages.values[pages.table[0, 0]]
    pages.keys, pages.values, pages.table = keys, values, np.ones((1, 1), dtype=np.int32)
    before = attend(library, pages, queries, [100], [100])
    values[1, 90:100] = 3e38
    assert torch.equal(attend(library, pages, queries, [100], [100])[:90], before[:90])
    assert before.isfinite().all()


def test_scores_of_any_size_give_finite_results(attending: NativeLibrary) -> None:
    pages = Pages([900], 64)
    pages.keys *= 300
    queries = random(1, HEADS, HEAD_DIM) * 300
    out = attend(attending, pages, queries, [1], [900])
    k, v = pages.row(0, 900)
    scores = torch.einsum("hd,khd->hk", queries[0].double(), k) * HEAD_DIM**-0.5
    expected = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v)
    torch.testing.assert_close(out[0].double(), expected, rtol=0.03, atol=0.03)


def test_what_is_not_finite_stays_visible(attending: NativeLibrary) -> None:
    pages = Pages([40], 64)
    pages.values[pages.table[0, 0], 7] = torch.nan
    assert attend(attending, pages, random(1, HEADS, HEAD_DIM), [1], [40]).isnan().all()
    x = random(3, 64)
    x[1, 5] = torch.inf
    normed = NativeLayerOps(attending).rms_norm(x, random(64), 1e-5)
    assert normed[1, 5].isnan()
    assert normed[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (200, 576), (5, 70)])
def test_the_norm_is_exact_up_to_rounding(library: NativeLibrary, rows: int, width: int) -> None:
    x, weight = random(rows, width) * 7, random(width, seed=1)
    exact = x.double() / (x.double().square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = NativeLayerOps(library).rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 * 1.01, atol=0.0)  # half of the last place


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_rope_and_the_store_do_what_the_plain_twin_does(library: NativeLibrary, tokens: int, normed: bool) -> None:
    rope_config = RopeConfig(rope_type="default", theta=10000.0)
    qkv = random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    norm = random(HEADS + KV_HEADS, HEAD_DIM, seed=3) if normed else None
    positions = torch.arange(tokens, device="cpu") * 3
    cells = torch.randperm(PAGES * 16, generator=torch.Generator("cpu").manual_seed(1), device="cpu")[:tokens]
    results = []
    for dtype, ops in ((torch.float32, PlainLayerOps()), (BF16, NativeLayerOps(library))):
        # the tables of both are bfloat16's, so that only the kernels differ
        rope = RotaryTables(rope_config, head_dim=HEAD_DIM, max_positions=1024, dtype=BF16, device=CPU)
        rope.cos, rope.sin = rope.cos.to(dtype), rope.sin.to(dtype)
        keys, values = (torch.zeros(PAGES, 16, KV_HEADS, HEAD_DIM, dtype=dtype, device="cpu") for _ in "kv")
        places = ops.at(rope, positions, cells)
        queries = places.rotate_and_store(qkv.to(dtype), None if norm is None else norm.to(dtype), 1e-5, keys, values)
        results.append((queries.float(), keys.float(), values.float()))
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_on_the_kernels_stays_near_float32(library: NativeLibrary, architecture: str) -> None:
    """Prompt in two chunks, then token by token; beside another request."""
    fields: dict[str, object] = {
        "hidden_size": 192,
        "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    model = make_reference(architecture, fields | {"initializer_range": 0.05})
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 60).tolist()
    tiny = TinyDecoder(model, dtype=BF16, kernels=(NativeAttention(library), NativeLayerOps(library)))
    found = [tiny.logits([Row(0, 0, tokens[:20])]), tiny.logits([Row(0, 20, tokens[20:40]), Row(1, 0, tokens)])[:20]]
    found += [tiny.logits([Row(1, len(tokens) - 1, tokens[-1:]), Row(0, at, [tokens[at]])])[1:] for at in range(40, 60)]
    expected = reference_logits(model, tokens)
    assert (torch.cat(found).float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_choice_falls_to_plain_torch_without_a_compiler_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    load_native.cache_clear()
    with caplog.at_level(logging.WARNING, logger="asyncllm"):
        attention, ops = choose_kernels("auto", model=make_config(), device=CPU, dtype=BF16)
    assert attention.name == "cpu"
    assert isinstance(ops, PlainLayerOps)
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'broken on purpose' >&2\nexit 3\n")
    compiler.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    load_native.cache_clear()
    with pytest.raises(NativeUnavailableError, match="broken on purpose"):
        load_native(HEAD_DIM, 1)
    assert list(scratch.iterdir()) == []


def test_asked_for_by_name_the_kernels_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"'native'.*bfloat16, not float32"):
        choose_kernels("native", model=make_config(), device=CPU, dtype=torch.float32)
    with pytest.raises(ConfigurationError, match="head_dim=24 is not a multiple of 16"):
        choose_kernels("native", model=make_config(head_dim=24), device=CPU, dtype=BF16)


@pytest.mark.usefixtures("library")
def test_the_same_kernels_are_built_once_in_a_process() -> None:
    load_native.cache_clear()
    first = load_native(HEAD_DIM, HEADS // KV_HEADS)
    assert load_native(HEAD_DIM, HEADS // KV_HEADS) is first


@pytest.mark.usefixtures("library")
def test_no_second_openmp_runtime_is_loaded() -> None:
    program = """
import pathlib, torch
def runtimes():
    files = {pathlib.PurePath(word) for word in pathlib.Path("/proc/self/maps").read_text().split() if "/" in word}
    return {file for file in files if file.name.startswith(("libgomp", "libomp", "libiomp"))}
from asyncllm.model.native.library import load_native
before = runtimes()
load_native(32, 3)
assert before and runtimes() == before, (before, runtimes())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
