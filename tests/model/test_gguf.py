"""GGUF files give the tensors and the shape of the same model in safetensors; broken and unknown ones are refused."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from asyncllm.errors import ModelLoadError
from asyncllm.model import gguf_weights
from asyncllm.model.checkpoint import Checkpoint
from asyncllm.model.gguf_config import llama3_frequency_factors
from asyncllm.model.gguf_header import read_gguf_header
from asyncllm.model.gguf_weights import GgufWeights
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.tensor_names import check_names, tensor_shapes
from helpers.gguf_files import gguf_name, write_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from conftest import TinyModel

    Arrays = Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


def arrays_of(folder: Path) -> Arrays:
    return {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


def write(
    tmp_path: Path,
    folder: Path,
    *,
    kind: str = "F32",
    settings: Mapping[str, object] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(path, config_of(folder), arrays_of(folder), kind=kind, settings=settings, extra=extra)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        Checkpoint.open(path, load_format="auto", seed=0)
    assert path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
    ids=str,
)
def test_a_file_gives_shape_and_tensors_of_the_same_model_in_safetensors(
    tiny_model: TinyModel, tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    folder = tiny_model(architecture, **fields)
    weights = GgufWeights(write(tmp_path, folder))
    expected, found = config_of(folder), weights.config
    for name in ("head_dim", "num_layers", "num_heads", "num_kv_heads", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.rope, found.context_tokens) == (expected.rope, expected.context_tokens)
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    check_names(found, weights.names())
    for name, values in arrays_of(folder).items():
        assert np.array_equal(weights.get(name).numpy(), values), name


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("alignment", [1, 2, 64])
def test_tensors_are_found_at_any_alignment(tiny_model: TinyModel, tmp_path: Path, kind: str, alignment: int) -> None:
    folder, key = tiny_model("qwen2", **WIDE), "a" * 8  # so that the header ends at an odd byte
    path = write(tmp_path, folder, kind=kind, settings={"general.alignment": alignment, "general.name": key})
    offsets = [tensor.offset for tensor in read_gguf_header(path).tensors.values()]
    assert all(offset % alignment == 0 for offset in offsets)
    assert any(offset % 2 for offset in offsets) == (alignment == 1)
    weights = GgufWeights(path)
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in weights.names():
        tensor = by_name[gguf_name(name)]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(weights.get(name).numpy(), expected), name


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_is_unpacked_to_what_it_means(
    tiny_model: TinyModel, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices that end within rows, against `gguf` unpacking the whole file's data at once."""
    monkeypatch.setattr(gguf_weights, "_SLICE_ELEMENTS", 768)
    path = write(tmp_path, tiny_model("qwen2", **WIDE), kind=kind)  # qwen2: no rows change places
    weights = GgufWeights(path)
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in weights.names():
        tensor = by_name[gguf_name(name)]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert weights.get(name).dtype == torch.float32
        assert weights.shape(name) == expected.shape
        assert np.array_equal(weights.get(name).numpy(), expected), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_are_what_transformers_reads_from_the_same_file(
    tiny_model: TinyModel, tmp_path: Path, architecture: str
) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = tiny_model(architecture, **WIDE)
    path = write(tmp_path, folder, kind="Q4_1", settings={f"{architecture}.vocab_size": 384})
    like = AutoModelForCausalLM.from_pretrained(folder)
    reference = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=like)["tensors"]
    weights = GgufWeights(path)
    for name in tensor_shapes(weights.config):
        assert torch.equal(weights.get(name), torch.as_tensor(reference[name])), name


def test_the_demo_model_has_all_that_its_config_needs(demo_gguf: Path) -> None:
    with Checkpoint.open(demo_gguf, load_format="auto", seed=0) as checkpoint:
        config = checkpoint.config
        assert (config.architecture, config.num_layers, config.vocab_size) == ("llama", 30, 49152)
        assert (config.rope.theta, config.max_position_embeddings) == (100000.0, 8192)
        assert config.tie_word_embeddings
        assert config.eos_token_ids == {2}
        assert checkpoint.weights.get("model.norm.weight").shape == (576,)


def test_a_large_tensor_is_unpacked_in_slices_so_that_other_threads_run(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def record(part: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = gguf.dequantize(part, kind)
        sizes.append(values.size)
        return values

    monkeypatch.setattr(gguf_weights, "dequantize", record)
    weights = GgufWeights(write(tmp_path, tiny_model("llama", **WIDE | {"vocab_size": 4096}), kind="Q8_0"))
    weights.get("model.embed_tokens.weight")
    assert sum(sizes) == 4096 * 256
    assert max(sizes) <= 2**18


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_where_the_file_has_no_output_matrix(
    tiny_model: TinyModel, tmp_path: Path, *, tied: bool
) -> None:
    with Checkpoint.open(
        write(tmp_path, tiny_model(tie_word_embeddings=tied)), load_format="auto", seed=0
    ) as checkpoint:
        assert checkpoint.config.tie_word_embeddings == tied
        assert ("lm_head.weight" in checkpoint.weights.names()) == (not tied)


def test_the_ends_of_sequence_of_file_and_turn_are_both_taken(tiny_model: TinyModel, tmp_path: Path) -> None:
    settings = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 1,
    }
    config = GgufWeights(write(tmp_path, tiny_model(), settings=settings)).config
    assert config.eos_token_ids == {2, 7}
    assert config.bos_token_id == 1


def test_the_dtype_is_that_of_the_matrices(tiny_model: TinyModel, tmp_path: Path) -> None:
    for kind, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32"), ("F32", "float32")):
        assert GgufWeights(write(tmp_path, tiny_model(), kind=kind)).config.dtype == dtype


def test_linear_and_yarn_rope_come_from_the_settings(tiny_model: TinyModel, tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    rope = GgufWeights(write(tmp_path, tiny_model(), settings=linear)).config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 2.0)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    rope = GgufWeights(write(tmp_path, tiny_model(), settings=yarn)).config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    none = {"llama.rope.scaling.type": "none"}
    assert GgufWeights(write(tmp_path, tiny_model(), settings=none)).config.rope.rope_type == "default"


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_rope_is_known_by_its_factors(tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = tiny_model("llama", head_dim=64, rope_parameters=LLAMA3)
    expected = config_of(folder).rope
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(folder), "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / scaled).numpy()
    assert np.allclose(factors, llama3_frequency_factors(expected, 64), rtol=1e-5)
    path = write(tmp_path, folder, extra={"rope_freqs.weight": factors})
    weights = GgufWeights(path)
    assert weights.config.rope == expected
    check_names(weights.config, weights.names())
    write(tmp_path, folder, extra={"rope_freqs.weight": factors * 1.01})
    assert "rope_freqs.weight" in refusal(path)
    write(tmp_path, folder, extra={"rope_freqs.weight": factors[:4]})
    assert "rope_freqs.weight" in refusal(path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"general.architecture": "gemma2"}, "gemma2"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"llama.attention.head_count_kv": [2, 2]}, "num_key_value_heads"),
        ({"llama.block_count": None}, "num_hidden_layers"),
        ({"llama.embedding_length": "x"}, "hidden_size"),
        ({"split.count": 2}, "split"),
        ({"tokenizer.ggml.eos_token_id": 384}, "eos_token_id"),
        ({"llama.block_count": 3}, "lacks model.layers.2"),
        ({"llama.feed_forward_length": 64}, "mlp"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(
    tiny_model: TinyModel, tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    path = tmp_path / "model.gguf"
    settings = dict(settings)
    architecture = settings.pop("general.architecture", None)
    write(tmp_path, tiny_model(), settings=settings)
    if isinstance(architecture, str):
        raw = path.read_bytes()
        old = struct.pack("<Q", 5) + b"llama"
        path.write_bytes(raw.replace(old, struct.pack("<Q", len(architecture)) + architecture.encode(), 1))
    with pytest.raises(ModelLoadError, match=named.replace(".", r"\.")):
        Checkpoint.open(path, load_format="auto", seed=0)


def test_a_type_that_is_not_implemented_is_refused_by_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.scales": np.zeros(32, dtype=np.int8)}
    path = write(tmp_path, tiny_model(), extra=extra)
    assert "blk.0.attn_q.scales is of type I8" in refusal(path)


def test_a_tensor_that_nothing_uses_is_named_as_the_file_does(tiny_model: TinyModel, tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(32, dtype=np.float32)}
    path = write(tmp_path, tiny_model(), extra=extra)
    with pytest.raises(ModelLoadError, match=r"nothing uses blk\.0\.attn_sinks\.weight"):
        Checkpoint.open(path, load_format="auto", seed=0)


def test_nothing_is_read_after_the_end(tiny_model: TinyModel, tmp_path: Path) -> None:
    weights = GgufWeights(write(tmp_path, tiny_model()))
    weights.close()
    weights.close()
    with pytest.raises(ModelLoadError, match="closed"):
        weights.get("model.norm.weight")


class Header:
    """Writes a GGUF header by hand, so that it can lie."""

    def __init__(self, *, version: int = 3, tensors: int = 0, settings: int = 0) -> None:
        self.raw = b"GGUF" + struct.pack("<IQQ", version, tensors, settings)

    def setting(self, key: bytes, kind: int, value: bytes) -> Header:
        """Add a setting; `value` is all that follows its type."""
        self.raw += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
        return self

    def tensor(self, name: bytes, dims: list[int], kind: int, offset: int) -> Header:
        """Add a tensor's entry."""
        self.raw += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        self.raw += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
        return self


HUGE = struct.pack("<Q", 2**60)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "cannot be read"),
        (b"GGU", "does not begin"),
        (b"safetensors", "does not begin"),
        (b"GGUF", "cannot be read"),
        (Header(version=1).raw, "version 1"),
        (Header(version=3 << 24).raw, "version"),
        (Header(tensors=2**60).raw, "more than the file can hold"),
        (Header(settings=2**60).raw, "more than the file can hold"),
        (Header(settings=1).raw + HUGE, "more than the file can hold"),
        (Header(settings=1).setting(b"k", 8, HUGE).raw, "more than the file can hold"),
        (Header(settings=1).setting(b"k", 9, struct.pack("<I", 0) + HUGE).raw, "more than the file can hold"),
        (Header(settings=1).setting(b"k", 9, struct.pack("<I", 8) + HUGE).raw, "more than the file can hold"),
        (Header(settings=1).setting(b"k", 9, struct.pack("<IQ", 10, 4) + bytes(8)).raw, "ends within"),
        (Header(settings=1).setting(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(64)).raw, "value type 9"),
        (Header(settings=1).setting(b"k", 77, bytes(64)).raw, "value type 77"),
        (Header(settings=2).setting(b"k", 0, b"x").setting(b"k", 0, b"x").raw, "twice"),
        (Header(settings=1).setting(b"\xff", 0, bytes(16)).raw, "cannot be read"),
        (Header(settings=1).setting(b"general.alignment", 4, struct.pack("<I", 3)).raw, "alignment"),
        (Header(settings=1).setting(b"general.alignment", 4, struct.pack("<I", 0)).raw, "alignment"),
        (Header(tensors=1).tensor(b"t", [2**40, 2**40], 0, 0).raw, "ends at byte"),
        (Header(tensors=1).tensor(b"t", [64], 0, 2**60).raw, "ends at byte"),
        (Header(tensors=1).tensor(b"t", [8], 0, 0).raw, "ends at byte"),
        (Header(tensors=1).tensor(b"t", [1] * 5, 0, 0).raw, "5 dimensions"),
        (Header(tensors=1).tensor(b"t", [], 0, 0).raw + bytes(8), "0 dimensions"),
        (Header(tensors=1).tensor(b"t", [31], 2, 0).raw + bytes(64), "whole blocks of 32"),
        (Header(tensors=1).tensor(b"t", [0], 0, 0).raw + bytes(64), "whole blocks"),
        (Header(tensors=1).tensor(b"t", [8], 999, 0).raw + bytes(64), "type 999"),
        (Header(tensors=2).tensor(b"t", [1], 0, 0).tensor(b"t", [1], 0, 0).raw + bytes(64), "twice"),
        (Header(tensors=2).tensor(b"t", [60], 0, 0).tensor(b"u", [60], 0, 0).raw + bytes(256), "on top of each other"),
    ],
    ids=repr,
)
def test_a_header_that_does_not_fit_its_file_is_refused_before_memory_is_taken(
    tmp_path: Path, raw: bytes, said: str
) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=said) as caught:
            read_gguf_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "lies.gguf" in str(caught.value)
    assert peak < 2**20


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        read_gguf_header(tmp_path / "none.gguf")


@pytest.fixture(scope="module")
def mutable(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Give a file that is written anew for each case, and its bytes."""
    folder = tmp_path_factory.mktemp("mutated")
    settings = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.tokens": [f"<{index}>" for index in range(384)],
        "tokenizer.ggml.scores": [0.5] * 384,
    }
    path = write(folder, tiny_model(), settings=settings)
    return path, path.read_bytes()


def header_bytes(raw: bytes) -> int:
    """Return where the first tensor's data may begin at the latest; no setting comes after it."""
    return raw.index(b"blk.1.ffn_down.weight") + 256


@given(data=st.data())
def test_any_mutated_file_is_read_or_refused_within_the_memory_of_its_size(
    mutable: tuple[Path, bytes], data: st.DataObject
) -> None:
    path, original = mutable
    raw = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_bytes(original)))
        change = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f"]))
        raw[at : at + len(change)] = change
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with Checkpoint.open(path, load_format="auto", seed=0) as checkpoint:
            for name in tensor_shapes(checkpoint.config):
                checkpoint.weights.get(name)
    except ModelLoadError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2**24


def test_a_dummy_load_takes_the_files_shape_and_none_of_its_tensors(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write(tmp_path, tiny_model())
    with Checkpoint.open(path, load_format="dummy", seed=1) as checkpoint:
        shutil.rmtree(tmp_path)
        assert checkpoint.config.num_layers == 2
        assert checkpoint.weights.get("model.embed_tokens.weight").shape == (384, 64)
