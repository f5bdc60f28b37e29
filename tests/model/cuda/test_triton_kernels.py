"""Each Triton kernel against its plain twin: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import pytest
import torch

from asyncllm.model.cuda.step_layout import Counts
from asyncllm.model.cuda.tuning import DecodeTile, OneRow, PromptTile, Tiled
from asyncllm.model.linear import PlainLinear
from helpers.fused_steps import (
    Sampling,
    make_config,
    make_layout,
    make_pages,
    make_step,
    make_weights,
    random_batch,
)
from helpers.sampling_rules import kept_tokens
from helpers.triton_twins import DEVICE, ON_GPU, both, draw, dtypes, kernels, marks

SHAPES: dict[str, dict[str, object]] = {
    "qwen3": {},
    "no head norm, 3 of 3 heads": {
        "model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 192,
    },
    "9 of 3 heads of 32": {"head_dim": 32, "num_attention_heads": 9, "num_key_value_heads": 3},
    "8 of 1 head of 128": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
}  # fmt: skip

pytestmark = marks
shapes = pytest.mark.parametrize("shape", SHAPES)


def assert_close(got: torch.Tensor, expected: torch.Tensor, *, tolerance: float = 5e-3) -> None:
    """Compare by the norm of the difference: rounding of 16 bits, however large the values are."""
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance, f"relative error {error}"


@dtypes
def test_table_writes_and_the_embedding_of_given_and_of_sampled_tokens(dtype: torch.dtype) -> None:
    config = make_config()
    plain, fast = kernels(config, dtype)
    batch = random_batch([1, 5, 1, 2], writes=[(3, 2, 7), (0, 1, 5), (3, 0, 1)])
    step = make_step(batch, make_layout(batch, rows=8, tokens=16, tiles=8), DEVICE)
    embedding = draw(config.vocab_size, config.hidden_size, dtype=dtype)
    pages, other = make_pages(config, dtype, DEVICE), make_pages(config, dtype, DEVICE)
    plain.write_table(pages, step.table_writes, step.counts)
    fast.write_table(other, step.table_writes, step.counts)
    assert pages.table[3, 2] == 7
    assert torch.equal(pages.table, other.table)
    expected = plain.embed(embedding, step, pages.token_pool)
    assert torch.equal(fast.embed(embedding, step, pages.token_pool), expected)
    assert torch.equal(expected[0], embedding[pages.token_pool[step.slots[0].long()].long()].float())


@dtypes
def test_pages_are_copied_whole_in_every_layer(dtype: torch.dtype) -> None:
    config = make_config()
    plain, fast = kernels(config, dtype)
    pages, other = make_pages(config, dtype, DEVICE), make_pages(config, dtype, DEVICE)
    sources = torch.tensor([3, 9], dtype=torch.int32, device=DEVICE)
    targets = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)
    plain.copy_pages(pages, sources, targets)
    fast.copy_pages(other, sources, targets)
    assert torch.equal(pages.kv, other.kv)
    assert torch.equal(pages.kv[:, :, 0], pages.kv[:, :, 9])


@dtypes
@both
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_the_norm_adds_parts_in_order(dtype: torch.dtype, dependent: bool, parts: int) -> None:
    config = make_config()
    plain, fast = kernels(config, dtype, dependent=dependent)
    residual, weight = draw(5, config.hidden_size), draw(config.hidden_size, dtype=dtype)
    other = residual.clone()
    added = draw(parts, 5, config.hidden_size, dtype=dtype if parts == 1 else torch.float32) if parts else None
    expected = plain.norm(residual, added, weight)
    assert_close(fast.norm(other, added, weight), expected)
    assert_close(other, residual, tolerance=1e-6)


@dtypes
def test_the_last_norm_takes_some_tokens_only(dtype: torch.dtype) -> None:
    config = make_config()
    plain, fast = kernels(config, dtype)
    residual, weight, added = draw(5, 128), draw(128, dtype=dtype), draw(1, 5, 128, dtype=dtype)
    places = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    got = fast.norm(residual.clone(), added, weight, places=places)
    assert_close(got, plain.norm(residual, added, weight, places=places))


@dtypes
@both
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "tile"), [(64, 128, 128), (48, 192, 64), (32, 512, 64)])
def test_products_of_one_row(
    *, dtype: torch.dtype, dependent: bool, bias: bool, outputs: int, inputs: int, tile: int
) -> None:
    config = make_config(hidden_size=inputs)
    plain, fast = kernels(config, dtype, dependent=dependent)
    block = OneRow(rows=4, tile=tile, warps=4)
    linear = PlainLinear(draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype) if bias else None)
    residual, norm, x = draw(1, inputs), draw(inputs, dtype=dtype), draw(1, inputs, dtype=dtype)
    for gate in (False, True):
        assert_close(
            fast.normed_row(residual, norm, linear, block, gate=gate),
            plain.normed_row(residual, norm, linear, block, gate=gate),
        )
    expected, got = draw(1, outputs), draw(1, outputs)
    plain.add_row(expected, x, linear, block)
    fast.add_row(got, x, linear, block)
    assert_close(got, expected, tolerance=1e-4)


@dtypes
@both
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 64), (7, 64), (20, 50)])
def test_products_in_tiles(dtype: torch.dtype, dependent: bool, bias: bool, rows: int, outputs: int) -> None:
    config = make_config()
    plain, fast = kernels(config, dtype, dependent=dependent)
    linear = PlainLinear(draw(outputs, 128, dtype=dtype), draw(outputs, dtype=dtype) if bias else None)
    x = draw(rows, 128, dtype=dtype)
    block = Tiled(block=16, width=16, tile=32)
    assert_close(fast.product(x, linear, block), plain.product(x, linear, block))
    parts = fast.split_product(x, linear, Tiled(block=16, width=16, tile=32, splits=4))
    assert parts.shape == (4, rows, outputs)
    assert_close(parts.sum(0), plain.split_product(x, linear, block).sum(0))
    assert_close(fast.gated_product(x, linear, block), plain.gated_product(x, linear, block), tolerance=1e-2)
    assert_close(fast.gated_product(x, linear, None), plain.gated_product(x, linear, None), tolerance=1e-2)


@dtypes
@both
@shapes
def test_rope_stores_keys_and_values_where_the_table_says(dtype: torch.dtype, dependent: bool, shape: str) -> None:
    config = make_config(**SHAPES[shape])
    plain, fast = kernels(config, dtype, dependent=dependent)
    weights = make_weights(config, dtype, DEVICE)
    pages, other = make_pages(config, dtype, DEVICE), make_pages(config, dtype, DEVICE)
    batch = random_batch([1, 5, 1, 20])
    step = make_step(batch, make_layout(batch, rows=8, tokens=32, tiles=8), DEVICE)
    qkv = draw(32, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, dtype=dtype)
    head_norm, cos_sin = weights.layers[1].head_norm, weights.cos_sin
    expected, got = (
        each.rope_and_store(qkv, head_norm=head_norm, cos_sin=cos_sin, inputs=step, pages=where, layer=1)
        for each, where in ((plain, pages), (fast, other))
    )
    assert_close(got[:27], expected[:27])
    real = slice(0, pages.num_pages)
    assert_close(other.kv[:, :, real], pages.kv[:, :, real], tolerance=1e-3)
    before = make_pages(config, dtype, DEVICE).kv
    assert (other.kv[1, 0, real] != before[1, 0, real]).any(dim=-1).sum() == 27 * config.num_kv_heads
    assert torch.equal(other.kv[0], before[0])


@dtypes
@both
@shapes
@pytest.mark.parametrize(("splits", "least"), [(1, 64), (4, 0), (4, 32)])
@pytest.mark.parametrize("fused", [False, True])
def test_decode_attention(
    *, dtype: torch.dtype, dependent: bool, shape: str, splits: int, least: int, fused: bool
) -> None:
    config = make_config(**SHAPES[shape])
    plain, fast = kernels(config, dtype, dependent=dependent)
    weights = make_weights(config, dtype, DEVICE)
    pages, other = make_pages(config, dtype, DEVICE), make_pages(config, dtype, DEVICE)
    batch = random_batch([1] * 5, seed=3)
    batch.starts[:2] = (0, 1)
    step = make_step(batch, make_layout(batch, rows=8, tokens=8), DEVICE)
    block = DecodeTile(tile=16, splits=splits, warps=4, stages=2, least=least)
    width = config.num_heads + (2 * config.num_kv_heads if fused else 0)
    source = draw(8, width * config.head_dim, dtype=dtype)
    for _ in range(2):  # the counters of the splits are as they were
        if fused:
            head_norm, cos_sin = weights.layers[0].head_norm, weights.cos_sin
            expected, got = (
                each.fused_decode_attention(
                    source, head_norm=head_norm, cos_sin=cos_sin, inputs=step, pages=where, layer=0, block=block
                )
                for each, where in ((plain, pages), (fast, other))
            )
        else:
            expected = plain.decode_attention(source, inputs=step, pages=pages, layer=0, block=block)
            got = fast.decode_attention(source, inputs=step, pages=other, layer=0, block=block)
        assert_close(got[:5], expected[:5])
        assert got.isfinite().all()
    real = slice(0, pages.num_pages)
    assert_close(other.kv[:, :, real], pages.kv[:, :, real], tolerance=1e-3)


@dtypes
@shapes
@pytest.mark.parametrize("page_size", [16, 64])
def test_prompt_attention_beside_rows_of_one_token(dtype: torch.dtype, shape: str, page_size: int) -> None:
    config = make_config(**SHAPES[shape])
    plain, fast = kernels(config, dtype)
    pages = make_pages(config, dtype, DEVICE, page_size=page_size)
    batch = random_batch([1, 70, 1, 2, 33], seed=5)
    batch.starts[1] = 0
    group = 1 << (config.num_heads // config.num_kv_heads - 1).bit_length()
    step = make_step(
        batch, make_layout(batch, rows=8, tokens=128, tiles=24), DEVICE, tile_tokens=PromptTile().block // group
    )
    queries = draw(128, config.num_heads * config.head_dim, dtype=dtype)
    block = DecodeTile(tile=16, splits=2, warps=4, stages=2)
    expected = plain.prompt_attention(queries, inputs=step, pages=pages, layer=1)
    plain.decode_attention(queries, inputs=step, pages=pages, layer=1, block=block, out=expected)
    got = fast.prompt_attention(queries, inputs=step, pages=pages, layer=1)
    fast.decode_attention(queries, inputs=step, pages=pages, layer=1, block=block, out=got)
    assert int(step.counts[Counts.DECODE_ROWS]) == 2
    assert_close(got[:107], expected[:107])


@dtypes
@both
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=0.9, top_p=0.4),
        Sampling(temperature=0.9, top_p=0.5, top_k=20),
        Sampling(temperature=1.0, min_p=0.2, top_p=0.9),
        Sampling(temperature=2.0, top_k=1),
        Sampling(temperature=2.0, top_p=0.0),
    ],
    ids=str,
)
def test_a_drawn_token_is_among_those_that_the_rules_keep(
    dtype: torch.dtype, dependent: bool, sampling: Sampling
) -> None:
    """And it is the plain twin's, which draws by the same number."""
    config = make_config()
    plain, fast = kernels(config, dtype, dependent=dependent)
    pages = make_pages(config, dtype, DEVICE)
    logits = (draw(8, config.vocab_size) * 3).to(dtype)
    for seed in range(6 if ON_GPU else 2):
        batch = random_batch([1] * 6, seed=seed, sampling=sampling)
        step = make_step(batch, make_layout(batch, rows=8, tokens=8), DEVICE)
        results = torch.full((2, 8), -1, dtype=torch.int32, device=DEVICE)
        fast.sample(logits, step, pages.token_pool, results)
        assert results[1].tolist() == [1] * 6 + [-1] * 2
        assert results[0, 6:].tolist() == [-1, -1]
        for row in range(6):
            assert int(results[0, row]) in kept_tokens(logits[row].float(), sampling)
            assert pages.token_pool[step.slots[row].long()] == results[0, row]
        expected = torch.empty_like(results)
        plain.sample(logits, step, pages.token_pool, expected)
        assert torch.equal(results[:, :6], expected[:, :6])  # a small vocabulary is gone through in its order


@dtypes
def test_logits_that_are_not_finite_are_told_and_give_a_token(dtype: torch.dtype) -> None:
    config = make_config()
    _, fast = kernels(config, dtype)
    pages = make_pages(config, dtype, DEVICE)
    logits = draw(4, config.vocab_size, dtype=dtype)
    logits[1, 7] = float("nan")
    logits[2, 9] = float("inf")
    logits[3] = float("nan")
    for temperature in (0.0, 1.0):
        batch = random_batch([1] * 4, sampling=Sampling(temperature=temperature, top_k=4, top_p=0.9))
        step = make_step(batch, make_layout(batch), DEVICE)
        results = torch.empty((2, 4), dtype=torch.int32, device=DEVICE)
        fast.sample(logits, step, pages.token_pool, results)
        assert results[1].tolist() == [1, 0, 0, 0]
        assert ((results[0] >= 0) & (results[0] < config.vocab_size)).all()
