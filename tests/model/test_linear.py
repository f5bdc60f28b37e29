"""The packed products against `F.linear`, and the fallback where they are not there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from asyncllm.model import linear
from asyncllm.model.linear import PackedGatedLinear, PackedLinear, PlainGatedLinear, PlainLinear, can_pack
from helpers.model_steps import TinyDecoder, make_reference, reference_logits

SHAPES = [(960, 576), (576, 1536), (64, 64), (200, 64), (1024, 2048)]
ROWS = [1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 100, 257]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Give normal numbers."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_packed_products_are_the_plain_ones(rows: int, bias: bool, dtype: torch.dtype) -> None:
    weight, x = random(96, 64, dtype=dtype), random(rows, 64, dtype=dtype, seed=1)
    added = random(96, dtype=dtype, seed=2) if bias else None
    other = random(rows, 96, dtype=dtype, seed=3)
    packed, plain = PackedLinear(weight, added), PlainLinear(weight, added)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(packed(x), F.linear(x, weight, added), rtol=0.0, atol=128 * eps)
    torch.testing.assert_close(packed.add_to(other, x), plain.add_to(other, x), rtol=0.0, atol=128 * eps)
    biases = None if added is None else (added, -added)
    gated, expected = PackedGatedLinear(weight, -weight, biases)(x), PlainGatedLinear(weight, -weight, biases)(x)
    torch.testing.assert_close(gated, expected, rtol=8 * eps, atol=1024 * eps)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_float32_row_has_the_same_bits_for_every_number_of_rows(shape: tuple[int, int]) -> None:
    """One row alone is what oneDNN computes by another kernel, unless it is made two."""
    packed, x = PackedLinear(random(*shape)), random(300, shape[1], seed=1)
    residual = random(300, shape[0], seed=2)
    whole, gated, added = packed(x), packed.silu(x), packed.add_to(residual, x)
    for rows in ROWS:
        for first in (0, 300 - rows):
            part = slice(first, first + rows)
            assert torch.equal(packed(x[part]), whole[part]), f"{rows} rows from {first}"
            assert torch.equal(packed.silu(x[part]), gated[part]), f"{rows} rows from {first}"
            assert torch.equal(packed.add_to(residual[part], x[part]), added[part]), f"{rows} rows from {first}"


def test_a_residual_is_not_changed() -> None:
    residual, x, weight = random(3, 8), random(3, 8, seed=1), random(8, 8, seed=2)
    before = residual.clone()
    for kind in (PackedLinear, PlainLinear):
        kind(weight).add_to(residual, x)
        assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_works_here(dtype: torch.dtype) -> None:
    """The machines of this project have oneDNN; were it not found, everything would be slow without a word."""
    assert can_pack(dtype)


class Broken:
    """Operations that are there, and wrong or not usable."""

    def __init__(self, failure: str) -> None:
        self._failure = failure

    def _reorder_linear_weight(self, weight: torch.Tensor, _rows: int) -> torch.Tensor:
        if self._failure == "raises":
            raise RuntimeError("could not create a primitive")
        return weight

    @property
    def _linear_pointwise(self) -> Broken:
        if self._failure == "missing":
            raise AttributeError("_linear_pointwise")
        return self

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        """Multiply, wrongly."""
        return F.linear(x, weight) + 1

    def binary(self, x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        """Multiply and add, whatever is asked."""
        return F.linear(x, weight) + other


@pytest.mark.parametrize("failure", ["raises", "missing", "wrong"])
def test_where_packing_does_not_work_the_plain_products_are_taken(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_ONEDNN", Broken(failure))
    assert not can_pack(torch.float32)
    model, tokens = make_reference("qwen2"), list(range(40))
    from helpers.batches import Row

    logits = TinyDecoder(model).logits([Row(0, 0, tokens)])
    torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=0.0, atol=1e-4)
