"""The decoder against transformers: every architecture, every rope type, every position."""

from __future__ import annotations

import pytest
import torch

from asyncllm.errors import ConfigurationError
from asyncllm.model.tensor_names import tensor_shapes
from helpers.batches import Row
from helpers.model_steps import TinyDecoder, make_reference, reference_logits

TOLERANCE = 1e-4  # of logits of about 10; most cases differ by 1e-5

ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama with one head a key head": ("llama", {"num_key_value_heads": 4}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "llama",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
    "mistral with its own head_dim": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "attention_factor": 1.3,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    "yarn not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
}


def tokens_of(count: int, *, seed: int = 0) -> list[int]:
    """Give random token ids of the tiny models' vocabulary."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(200, (count,), generator=generator, device="cpu").tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_at_every_position_of_the_context_are_those_of_transformers(name: str) -> None:
    architecture, fields = ARCHITECTURES[name]
    model = make_reference(architecture, fields)
    tokens = tokens_of(128)
    logits = TinyDecoder(model).logits([Row(3, 0, tokens)])
    torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_type_is_computed_as_transformers_does_up_to_the_end_of_the_context(name: str) -> None:
    model = make_reference("llama", {"rope_parameters": ROPES[name]})
    tokens = tokens_of(128, seed=1)
    logits = TinyDecoder(model).logits([Row(0, 0, tokens)])
    torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=0.0, atol=TOLERANCE)


def test_each_rope_type_differs_from_the_default_one() -> None:
    """Otherwise the test above would hold for a decoder that ignores the setting."""
    tokens = tokens_of(128, seed=1)
    plain = reference_logits(make_reference("llama"), tokens)
    for name in ("linear", "llama3", "yarn"):
        stretched = reference_logits(make_reference("llama", {"rope_parameters": ROPES[name]}), tokens)
        assert (stretched - plain).abs().max() > 0.1, name


def test_dynamic_rope_beyond_its_context_is_refused_by_name() -> None:
    model = make_reference("llama", {"rope_parameters": ROPES["dynamic"]})
    with pytest.raises(ConfigurationError, match=r"max_model_tokens=129 with rope_type='dynamic'.*at most 128"):
        TinyDecoder(model, max_model_tokens=129)


def test_a_tied_model_never_reads_an_output_matrix() -> None:
    model = make_reference("llama", {"tie_word_embeddings": True})
    assert "lm_head.weight" not in TinyDecoder(model).source.asked


def test_each_tensor_is_read_once() -> None:
    tiny = TinyDecoder(make_reference("qwen3", {"attention_bias": True}))
    assert sorted(tiny.source.asked) == sorted(tensor_shapes(tiny.config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    """Bias and head shapes that float32 does not take apart: a rough bound, far below what a wrong term gives."""
    model = make_reference("qwen2", {"initializer_range": 0.05})
    tokens = tokens_of(64)
    logits = TinyDecoder(model, dtype=dtype).logits([Row(0, 0, tokens)])
    expected = reference_logits(model, tokens)
    assert logits.dtype == dtype
    assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama with all biases", "smollm2", "qwen3"])
def test_a_loaded_model_holds_nothing_of_its_source(name: str) -> None:
    """Files are closed after loading, and what is mapped from them is gone."""
    model = make_reference(*ARCHITECTURES[name])
    tokens = tokens_of(20)
    tiny = TinyDecoder(model)
    expected = tiny.logits([Row(0, 0, tokens)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert torch.equal(tiny.logits([Row(0, 0, tokens)]), expected)


def test_loading_stops_where_the_caller_says_so() -> None:
    from asyncllm.model.decoder import Decoder
    from asyncllm.model.model_config import ModelConfig
    from helpers.model_steps import TensorSource

    model = make_reference()
    source = TensorSource(model.state_dict())

    def stop(done: int, total: int) -> None:
        raise InterruptedError(f"{done} of {total}")

    with pytest.raises(InterruptedError, match="1 of 2"):
        Decoder(
            ModelConfig.from_hf(model.config.to_dict()),
            source,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_tokens=16,
            on_layer=stop,
        )
    assert not any(name.startswith("model.layers.1") for name in source.asked)
