"""Plans of steps: whatever the model's shape, only what can compute it; and when the kernels cannot be used at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.config import EngineConfig
from asyncllm.errors import ConfigurationError
from asyncllm.model.cuda.availability import why_not_fused
from asyncllm.model.cuda.tuning import (
    OneRowPlan,
    RowsPlan,
    can_fuse,
    default_step_tokens,
    plan_step,
    row_sizes,
    token_sizes,
)
from asyncllm.model.open import TorchBackend
from helpers.fused_steps import make_config

shapes = st.builds(
    lambda hidden, inner, heads, group, width: make_config(
        vocab_size=499,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads * group,
        num_key_value_heads=heads,
        head_dim=width,
    ),
    st.one_of(st.sampled_from([64, 576, 1024, 4096]), st.integers(1, 5000)),
    st.one_of(st.sampled_from([128, 1536, 3072, 12288]), st.integers(1, 13000)),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from([32, 64, 128]),
)


@given(config=shapes, rows=st.one_of(st.just(1), st.integers(1, 300)), decodes=st.booleans())
def test_no_tile_of_a_plan_is_cut(config: object, rows: int, decodes: bool) -> None:
    """The kernels read whole tiles of weights, so a wrong plan reads beyond them."""
    plan = plan_step(config, rows, decodes=decodes)  # type: ignore[arg-type]
    hidden, inner = config.hidden_size, config.intermediate_size  # type: ignore[attr-defined]
    heads, kv_heads = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))  # type: ignore[attr-defined]
    weights = {
        "qkv": (heads + 2 * kv_heads, hidden),
        "o": (hidden, heads),
        "gate_up": (inner, hidden),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),  # type: ignore[attr-defined]
    }
    for name, (outputs, inputs) in weights.items():
        block = getattr(plan, name)
        if isinstance(plan, OneRowPlan):
            assert outputs % block.rows == 0
            assert inputs % block.tile == 0
        elif block is not None:
            assert outputs % block.width == 0
            assert inputs % (block.splits * block.tile) == 0
    assert isinstance(plan, RowsPlan) or rows == 1


def test_the_published_shapes_are_taken_as_measured() -> None:
    fields = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    small = make_config(**fields, head_dim=128, vocab_size=151936)
    assert isinstance(plan_step(small, 1, decodes=True), OneRowPlan)
    plans = {rows: plan_step(small, rows, decodes=True) for rows in (16, 64, 256)}
    assert all(isinstance(plan, RowsPlan) and plan.down is not None for plan in plans.values())
    assert [plan.dependent for plan in plans.values()] == [False, True, True]


@pytest.mark.parametrize("most", [1, 2, 7, 40, 256, 1000])
def test_sizes_ascend_to_the_most(most: int) -> None:
    for sizes in (row_sizes(most), token_sizes(most)):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


def test_a_larger_model_computes_fewer_tokens_a_step() -> None:
    small = make_config(hidden_size=1024, intermediate_size=3072)
    large = dataclasses.replace(small, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32)
    assert 256 <= default_step_tokens(large, 132) < default_step_tokens(small, 132) == 4096


def test_what_the_kernels_do_not_take_is_named() -> None:
    config = make_config()
    assert can_fuse(config)
    assert not can_fuse(dataclasses.replace(config, head_dim=48))
    assert not can_fuse(dataclasses.replace(config, num_heads=64))
    gpu = torch.device("cuda:0")
    assert "cpu" in str(why_not_fused(config, torch.device("cpu"), torch.bfloat16))
    assert "float32" in str(why_not_fused(config, gpu, torch.float32))
    assert "48" in str(why_not_fused(dataclasses.replace(config, head_dim=48), gpu, torch.bfloat16))


def test_without_a_compiler_there_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr("asyncllm.model.cuda.availability.importlib.util.find_spec", lambda _name: None)
    assert why_not_fused(make_config(), torch.device("cuda:0"), torch.bfloat16) == "Triton is not installed"


def test_asking_for_the_kernels_on_a_cpu_is_refused_with_the_reason(tiny_model: object) -> None:
    folder = tiny_model("qwen3")  # type: ignore[operator]
    config = EngineConfig(model=folder, device="cpu", attention_backend="triton")
    with pytest.raises(ConfigurationError, match=r"Triton's kernels cannot be used: they do not run on cpu"):
        TorchBackend().open(config, lambda _stage, _done, _total: None)
