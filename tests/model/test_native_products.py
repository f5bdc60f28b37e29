"""The native products against exact results, and where other products are taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.model.linear import PackedGatedLinear, PackedLinear
from asyncllm.model.native.library import NativeLibrary, NativeUnavailableError, load_native
from asyncllm.model.native.native_ops import NativeLayerOps
from asyncllm.model.native.native_products import NativeGatedLinear, NativeLinear

if TYPE_CHECKING:
    from asyncllm.model.linear import GatedLinear, Linear

ROUNDING = 2**-8  # half of bfloat16's last place, and as much for the order of sums


@pytest.fixture(scope="module")
def ops() -> NativeLayerOps:
    """The kernels, where the processor has a matrix unit."""
    try:
        library = load_native(32, 3)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    if not library.can_multiply:
        pytest.skip("the processor has no matrix unit")
    return NativeLayerOps(library)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(torch.bfloat16)


def assert_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare with float64, up to the rounding of the result and of float32 sums."""
    torch.testing.assert_close(found.double(), exact, rtol=ROUNDING, atol=2**-12 * exact.abs().max().item())


@settings(deadline=None, max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 64, 100]),
    inputs=st.sampled_from([32, 64, 576]),
    outputs=st.sampled_from([1, 16, 17, 32, 47, 96, 200]),
    bias=st.booleans(),
)
def test_a_product_is_exact_up_to_rounding(
    ops: NativeLayerOps, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    weight, x, residual = random(outputs, inputs), random(rows, inputs, seed=1), random(rows, outputs, seed=2)
    added = random(outputs, seed=3) * 9 if bias else None
    linear = ops.linear(weight, added)
    assert isinstance(linear, NativeLinear)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert_near(linear(x), exact)
    assert_near(linear.add_to(residual, x), exact + residual.double())


@settings(deadline=None, max_examples=25)
@given(rows=st.sampled_from([1, 16, 17, 33, 70]), outputs=st.sampled_from([16, 32, 48, 208]), bias=st.booleans())
def test_a_gated_product_is_exact_up_to_rounding(ops: NativeLayerOps, rows: int, outputs: int, bias: bool) -> None:
    gate, up, x = (random(count, 64, seed=seed) for seed, count in enumerate([outputs, outputs, rows]))
    biases = (random(outputs, seed=3), random(outputs, seed=4)) if bias else None
    linear = ops.gated_linear(gate, up, biases)
    assert isinstance(linear, NativeGatedLinear)
    gates, ups = (
        F.linear(x.double(), weight.double(), None if biases is None else biases[index].double())
        for index, weight in enumerate((gate, up))
    )
    assert_near(linear(x), F.silu(gates) * ups)


def test_a_pass_that_does_not_hold_all_rows_misses_none(ops: NativeLayerOps) -> None:
    """Rows of so many inputs go through the weights 32 at a time, though fewer fill a cache."""
    weight, x = random(64, 32768), random(70, 32768, seed=1)
    assert_near(ops.linear(weight)(x), F.linear(x.double(), weight.double()))


def test_a_row_has_the_same_bits_for_every_number_of_rows(ops: NativeLayerOps) -> None:
    linear, gated, x = ops.linear(random(96, 576)), ops.gated_linear(random(96, 576), random(96, 576)), random(120, 576)
    for product in (linear, gated):
        whole = product(x)
        for rows in (1, 2, 15, 16, 17, 32, 33, 64):
            for first in (0, 5, 120 - rows):
                assert torch.equal(product(x[first : first + rows]), whole[first : first + rows])


def test_rows_of_any_strides_are_taken(ops: NativeLayerOps) -> None:
    linear, x = ops.linear(random(64, 64)), random(64, 20)
    assert torch.equal(linear(x.T), linear(x.T.contiguous()))
    wide = random(20, 128)[:, ::2]
    assert torch.equal(linear.add_to(wide, x.T), linear.add_to(wide.contiguous(), x.T))


def test_what_is_not_finite_stays_visible_in_its_row_alone(ops: NativeLayerOps) -> None:
    x = random(20, 64)
    x[3, 5], x[17, 0] = torch.nan, torch.inf
    for product in (ops.linear(random(96, 64)), ops.gated_linear(random(96, 64), random(96, 64, seed=1))):
        finite = product(x).isfinite()
        assert finite.all(dim=1).nonzero().flatten().tolist() == [row for row in range(20) if row not in (3, 17)]
        assert not finite[3].any()


def test_gates_of_any_size_give_what_silu_gives(ops: NativeLayerOps) -> None:
    gates = torch.tensor([-1e30, -500.0, -90.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 90.0, 1e30], device="cpu")
    gate = torch.zeros(16, 32, dtype=torch.bfloat16, device="cpu")
    up = gate.clone()
    gate[:, 0], up[:, 1] = 1.0, 1.0
    x = torch.zeros(len(gates), 32, dtype=torch.bfloat16, device="cpu")
    x[:, 0], x[:, 1] = gates, 1.0
    found = ops.gated_linear(gate, up)(x)[:, 0]
    torch.testing.assert_close(found.double(), F.silu(x[:, 0].double()), rtol=ROUNDING, atol=1e-7)


def test_products_of_torch_beside_it_are_what_they_were(ops: NativeLayerOps) -> None:
    """OneDNN lays out the same tile registers in its own way."""
    weight, x = random(256, 256), random(64, 256, seed=1)
    packed, native = PackedLinear(weight), ops.linear(weight)
    before = packed(x)
    for rows in (1, 17, 40):
        native(x[:rows])
        assert torch.equal(packed(x), before)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 32), (64, 24)])
def test_widths_that_do_not_fill_tiles_are_left_to_other_products(
    ops: NativeLayerOps, inputs: int, outputs: int
) -> None:
    gated: GatedLinear = ops.gated_linear(random(outputs, inputs), random(outputs, inputs, seed=1))
    assert isinstance(gated, PackedGatedLinear)
    linear: Linear = ops.linear(random(outputs, inputs))
    assert isinstance(linear, NativeLinear if inputs % 32 == 0 else PackedLinear)


def test_a_processor_without_a_matrix_unit_is_left_to_other_products() -> None:
    ops = NativeLayerOps(cast("NativeLibrary", SimpleNamespace(can_multiply=False)))
    assert isinstance(ops.linear(random(64, 64)), PackedLinear)
    assert isinstance(ops.gated_linear(random(64, 64), random(64, 64)), PackedGatedLinear)
