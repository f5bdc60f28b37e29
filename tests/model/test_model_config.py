"""config.json of either transformers layout becomes the right shape, or is refused by name."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.errors import ModelLoadError
from asyncllm.model.generation_config import read_generation_config
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.rope_config import RopeConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
    "torch_dtype": "bfloat16",
    "rope_theta": 5000.0,
    "hidden_act": "silu",
}
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 32},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
}


def config_of(architecture: str = "llama", **changes: object) -> dict[str, Any]:
    """Return a config.json's content; a change to `...` takes the key out."""
    config = copy.deepcopy(LLAMA) | OTHERS.get(architecture, {}) | changes
    return {key: value for key, value in config.items() if value is not ...}


def refusal(**changes: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.from_hf(config_of(str(changes.pop("architecture", "llama")), **changes))
    return str(caught.value)


def test_a_llama_config_is_read_field_by_field() -> None:
    assert ModelConfig.from_hf(config_of()) == ModelConfig(
        architecture="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        rope=RopeConfig(theta=5000.0, original_max_position_embeddings=256),
        max_position_embeddings=256,
        eos_token_ids=frozenset({2, 7}),
        bos_token_id=1,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_writes_is_read_as_transformers_means_it(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        architecture,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=None,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
    )
    config.save_pretrained(tmp_path)
    read = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    model = AutoModelForCausalLM.from_config(config)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert read.head_dim == attention.head_dim
    assert read.qkv_bias == (attention.q_proj.bias is not None)
    assert read.o_bias == (attention.o_proj.bias is not None)
    assert read.mlp_bias == (mlp.up_proj.bias is not None)
    assert read.qk_norm == hasattr(attention, "q_norm")
    assert read.rms_norm_eps == model.model.norm.variance_epsilon
    assert (read.rope.rope_type, read.rope.factor, read.rope.theta) == ("linear", 2.0, 700.0)
    assert (read.num_layers, read.num_heads, read.num_kv_heads, read.vocab_size) == (2, 4, 2, 96)


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [
        ("llama", (True, True, True)),
        ("mistral", (False, False, False)),
        ("qwen2", (True, False, False)),
        ("qwen3", (True, True, False)),
    ],
)
def test_biases_follow_the_settings_that_an_architecture_knows(architecture: str, biases: tuple[bool, ...]) -> None:
    config = ModelConfig.from_hf(config_of(architecture, attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


def test_head_dim_may_differ_from_hidden_size_by_heads() -> None:
    assert ModelConfig.from_hf(config_of(head_dim=32)).head_dim == 32
    assert ModelConfig.from_hf(config_of("mistral", head_dim=None)).head_dim == 16


def test_an_old_llama_has_as_many_key_heads_as_query_heads() -> None:
    assert ModelConfig.from_hf(config_of(num_key_value_heads=...)).num_kv_heads == 4
    assert "num_key_value_heads" in refusal(architecture="mistral", num_key_value_heads=...)


ROPES: list[tuple[dict[str, Any], RopeConfig]] = [
    ({}, RopeConfig()),
    ({"rope_type": "default"}, RopeConfig()),
    ({"rope_type": "linear", "factor": 2}, RopeConfig(rope_type="linear", factor=2.0)),
    ({"rope_type": "dynamic", "factor": 4.0}, RopeConfig(rope_type="dynamic", factor=4.0)),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=64),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "truncate": False,
        },
        RopeConfig(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            truncate=False,
            attention_factor=0.1 * math.log(4.0) + 1,
        ),
    ),
]


def layout_4(rope: dict[str, Any], theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_scaling": rope or None}


def layout_4_old(rope: dict[str, Any], theta: float) -> dict[str, Any]:
    old = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    return {"rope_theta": theta, "rope_scaling": old or None}


def layout_5(rope: dict[str, Any], theta: float) -> dict[str, Any]:
    return {"rope_theta": ..., "rope_parameters": rope | {"rope_theta": theta}}


@pytest.mark.parametrize("layout", [layout_4, layout_4_old, layout_5])
@pytest.mark.parametrize(("rope", "expected"), ROPES, ids=[str(rope.get("rope_type")) for rope, _ in ROPES])
def test_each_rope_type_is_read_from_each_layout(
    rope: dict[str, Any], expected: RopeConfig, layout: Callable[[dict[str, Any], float], dict[str, Any]]
) -> None:
    import dataclasses

    original = 64 if "original_max_position_embeddings" in rope else 256
    expected = dataclasses.replace(expected, theta=777.0, original_max_position_embeddings=original)
    assert ModelConfig.from_hf(config_of(**layout(rope, 777.0))).rope == expected


@pytest.mark.parametrize(
    "extra",
    [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": 0.7}, {"attention_factor": 1.5}, {"factor": 1.0}],
    ids=str,
)
def test_yarns_attention_factor_is_what_transformers_makes_it(extra: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 777.0} | extra
    reference = LlamaConfig(rope_parameters=dict(rope), max_position_embeddings=256)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](reference, "cpu")
    assert ModelConfig.from_hf(config_of(rope_parameters=rope)).rope.attention_factor == pytest.approx(factor)


def test_the_context_grows_with_rope_scaling_where_the_config_does_not_count_it() -> None:
    def context(**rope: object) -> int:
        return ModelConfig.from_hf(config_of(rope_scaling=rope)).context_tokens

    assert context(rope_type="default") == 256
    assert context(rope_type="linear", factor=2.5) == 640
    assert context(rope_type="dynamic", factor=4.0) == 256
    assert context(rope_type="yarn", factor=4.0, original_max_position_embeddings=256) == 1024
    assert context(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) == 256


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "gpt2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": ..., "architectures": ...}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"rope_type": ["default"]}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "low_fr",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 32}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"eos_token_id": 320}, "eos_token_id"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"architecture": "mistral", "sliding_window": ..., "max_position_embeddings": 8192}, "sliding_window"),
        ({"architecture": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "sliding_window"),
        ({"architecture": "qwen3", "head_dim": ...}, "head_dim"),
    ],
    ids=str,
)
def test_what_is_not_implemented_or_makes_no_sense_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(**changes)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", {"sliding_window": 256}),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 32}),
        ("qwen3", {"max_window_layers": 0, "sliding_window": 32}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 32}),
        ("qwen3", {"layer_types": ["full_attention"] * 3, "use_sliding_window": True, "sliding_window": 32}),
        ("llama", {"quantization_config": None, "use_mrope": False, "partial_rotary_factor": 1.0}),
    ],
    ids=str,
)
def test_an_option_that_changes_nothing_is_no_reason_to_refuse(architecture: str, changes: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(config_of(architecture, **changes)).architecture == architecture


def test_from_hf_changes_nothing_that_it_is_given() -> None:
    config = config_of(rope_scaling={"type": "linear", "factor": 2.0})
    before = copy.deepcopy(config)
    ModelConfig.from_hf(config)
    assert config == before


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("llama3") | st.just("yarn"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ROPE_KEYS = ("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale")
extra_keys = st.sampled_from(
    ["rope_scaling", "rope_parameters", "dtype", "layer_types", "use_sliding_window", "head_dim"]
)
rope_values = anything | st.sampled_from(["default", "linear", "dynamic", 1, 2.0, 1e300, 10**400, 0])


@given(
    architecture=st.sampled_from(["llama", *OTHERS]),
    changes=st.dictionaries(st.sampled_from(sorted(LLAMA)) | extra_keys, anything, max_size=3),
    removed=st.sets(st.sampled_from(sorted(LLAMA)), max_size=2),
    rope=st.none() | st.dictionaries(st.sampled_from(ROPE_KEYS), rope_values),
)
def test_any_mutated_config_is_read_or_refused(
    architecture: str, changes: dict[str, Any], removed: set[str], rope: dict[str, Any] | None
) -> None:
    config = config_of(architecture, **changes)
    config = {key: value for key, value in config.items() if key not in removed}
    if rope is not None:
        config["rope_scaling"] = rope
    try:
        read = ModelConfig.from_hf(config)
    except ModelLoadError:
        return
    assert read.num_heads % read.num_kv_heads == 0
    assert read.context_tokens >= 1
    assert all(math.isfinite(value) for value in (read.rope.theta, read.rope.factor, read.rope.attention_factor))


def write_generation(folder: Path, **fields: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))


def test_without_do_sample_generation_is_greedy(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, vocab_size=9).defaults.temperature == 0.0
    write_generation(tmp_path, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, max_new_tokens=77, eos_token_id=[2, 5])
    read = read_generation_config(tmp_path, vocab_size=9)
    defaults = read.defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.0, 0.9, 20, 0.1)
    assert defaults.max_new_tokens == 77
    assert read.eos_token_ids == {2, 5}


def test_with_do_sample_what_is_left_out_is_what_transformers_takes(tmp_path: Path) -> None:
    from transformers import GenerationConfig as Reference

    write_generation(tmp_path, do_sample=True, eos_token_id=5)
    read = read_generation_config(tmp_path, vocab_size=9)
    reference = Reference.from_pretrained(tmp_path)
    reference.update(**reference._get_default_generation_params(), defaults_only=True)
    assert read.defaults.temperature == reference.temperature
    assert read.defaults.top_p == reference.top_p
    assert read.defaults.top_k == reference.top_k
    assert read.defaults.max_new_tokens is None
    assert read.eos_token_ids == {5}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_p": 1.5}, "top_p"),
        ({"do_sample": True, "temperature": -1}, "temperature"),
        ({"do_sample": 1}, "do_sample"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"eos_token_id": 9}, "eos_token_id"),
        ({"top_k": "x"}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"suppress_tokens": [9]}, "suppress_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
    ],
    ids=str,
)
def test_a_senseless_generation_config_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    write_generation(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=named):
        read_generation_config(tmp_path, vocab_size=9)


def test_penalty_suppressed_ids_and_least_length_are_read(tmp_path: Path) -> None:
    write_generation(tmp_path, repetition_penalty=1.1, suppress_tokens=[7, 2], min_new_tokens=3)
    defaults = read_generation_config(tmp_path, vocab_size=9).defaults
    assert (defaults.repetition_penalty, defaults.suppress_token_ids, defaults.min_new_tokens) == (1.1, (2, 7), 3)


def test_a_setting_that_is_not_applied_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_generation(tmp_path, typical_p=0.9, num_beams=1)
    read_generation_config(tmp_path, vocab_size=9)
    assert [record.getMessage() for record in caplog.records] == [
        "generation_config.json: typical_p=0.9 is not applied"
    ]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ' + "9" * 5000 + "}", "[" * 100_000, "\udcff"])
def test_a_broken_json_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match="generation_config"):
        read_generation_config(tmp_path, vocab_size=9)
