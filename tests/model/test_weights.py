"""Safetensors folders are read tensor by tensor; a folder that is not whole is refused by the name of what is wrong."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from asyncllm.errors import ModelLoadError
from asyncllm.model.checkpoint import Checkpoint
from asyncllm.model.dummy_weights import DummyWeights
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.tensor_names import check_names, tensor_shapes
from asyncllm.model.weights import SafetensorsWeights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import TinyModel

    Tensors = dict[str, torch.Tensor]

INDEX = "model.safetensors.index.json"


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Give a checkpoint that the test may change."""
    return shutil.copytree(tiny_model(), tmp_path / "model")


@pytest.fixture
def sharded(folder: Path) -> Path:
    """Give a checkpoint in three shards with an index, as transformers writes it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="150KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def change(folder: Path, edit: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def take_out(folder: Path, name: str) -> None:
    change(folder, lambda tensors: tensors.__delitem__(name))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        Checkpoint.open(folder, load_format="auto", seed=0)
    return str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_writes_has_the_names_and_shapes_that_are_expected(
    tiny_model: TinyModel, architecture: str
) -> None:
    folder = tiny_model(architecture)
    written = load_file(folder / "model.safetensors")
    assert tensor_shapes(config_of(folder)) == {name: tuple(tensor.shape) for name, tensor in written.items()}
    with Checkpoint.open(folder, load_format="auto", seed=0) as checkpoint:
        assert checkpoint.weights.names() == written.keys()
        assert all(torch.equal(checkpoint.weights.get(name), written[name]) for name in written)


def test_biases_are_expected_where_the_config_has_them(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama", attention_bias=True, mlp_bias=True)
    assert tensor_shapes(config_of(folder)).keys() == load_file(folder / "model.safetensors").keys()


def test_shards_hold_the_same_tensors_as_one_file(tiny_model: TinyModel, sharded: Path) -> None:
    whole, parts = SafetensorsWeights(tiny_model()), SafetensorsWeights(sharded)
    assert parts.names() == whole.names()
    for name in whole.names():
        assert torch.equal(parts.get(name), whole.get(name))
        assert parts.shape(name) == tuple(whole.get(name).shape)


def test_a_tensor_outlives_the_source_that_it_came_from(folder: Path) -> None:
    weights = SafetensorsWeights(folder)
    tensor = weights.get("model.norm.weight")
    weights.close()
    weights.close()
    assert torch.equal(tensor, torch.ones(64))
    assert weights.names() == frozenset()


def test_leaving_a_checkpoint_closes_its_weights(folder: Path) -> None:
    with Checkpoint.open(folder, load_format="auto", seed=0) as checkpoint:
        assert checkpoint.weights.names()
    assert not checkpoint.weights.names()


def test_a_missing_shard_is_named(sharded: Path) -> None:
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refusal(sharded)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "path", ["../outside.safetensors", "/outside.safetensors", "sub/x.safetensors", "a.bin", "", 7, "\0.safetensors"]
)
def test_an_index_names_files_of_its_folder_only(sharded: Path, path: object) -> None:
    shutil.copy(next(sharded.glob("model-*.safetensors")), sharded.parent / "outside.safetensors")
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": path}))
    assert INDEX in refusal(sharded)


def test_a_tensor_must_be_in_the_shard_where_the_index_puts_it(sharded: Path) -> None:
    def move(index: dict[str, Any]) -> None:
        shards = index["weight_map"]
        shards["model.norm.weight"] = next(name for name in shards.values() if name != shards["model.norm.weight"])

    edit_index(sharded, move)
    assert "model.norm.weight is not in" in refusal(sharded)


def test_a_tensor_may_not_be_in_two_shards(sharded: Path) -> None:
    first, last = sorted(sharded.glob("model-*.safetensors"))[::2]
    doubled = load_file(first)
    save_file(load_file(last) | doubled, last)
    assert f"is in both {first.name} and {last.name}" in refusal(sharded)


def test_an_index_without_a_weight_map_is_refused(sharded: Path) -> None:
    edit_index(sharded, lambda index: index.pop("weight_map"))
    assert "weight_map" in refusal(sharded)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return shutil.copy, (self.path / "config.json", self.path / "exploded")


def test_a_folder_with_pickled_weights_only_is_refused_and_nothing_is_unpickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder)))
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message
    assert not (folder / "exploded").exists()


def test_a_folder_without_weights_says_what_is_looked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    take_out(folder, "model.layers.1.mlp.up_proj.weight")
    assert "lacks model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_a_tensor_that_nothing_uses_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "nothing uses model.layers.0.self_attn.q_proj.bias" in refusal(folder)


def test_many_names_are_cut_to_a_readable_message(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({f"extra.{index}": torch.zeros(1) for index in range(30)}))
    assert "and 22 more tensors" in refusal(folder)


def test_buffers_that_everybody_recomputes_are_ignored(folder: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.inv_freq": torch.zeros(8),
        "model.layers.1.self_attn.rotary_emb.cos_cached": torch.zeros(8),
    }
    change(folder, lambda tensors: tensors.update(extra))
    Checkpoint.open(folder, load_format="auto", seed=0).weights.close()


def test_a_tensor_of_another_shape_than_the_config_says_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(1)}))
    message = refusal(folder)
    assert "model.norm.weight" in message
    assert "[1]" in message
    assert "[64]" in message


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_is_there", [True, False])
def test_the_config_decides_whether_embeddings_are_tied(folder: Path, *, tied: bool, head_is_there: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    if not head_is_there:
        take_out(folder, "lm_head.weight")
    if not tied and not head_is_there:
        assert "lacks lm_head.weight" in refusal(folder)
    else:
        with Checkpoint.open(folder, load_format="auto", seed=0) as checkpoint:
            assert checkpoint.config.tie_word_embeddings == tied
            assert ("lm_head.weight" in tensor_shapes(checkpoint.config)) == (not tied)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_come_in_the_checkpoints_dtype(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    assert SafetensorsWeights(folder).get("model.norm.weight").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_tensor_of_no_supported_type_is_named(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(dtype)}))
    with pytest.raises(ModelLoadError, match=r"model.norm.weight is of type"):
        SafetensorsWeights(folder).get("model.norm.weight")


@pytest.mark.parametrize("size", [2**20, 2**40, 2**63])
def test_a_header_of_absurd_size_is_refused(folder: Path, size: int) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + raw[8:])
    assert "model.safetensors" in refusal(folder)


def test_a_header_that_claims_more_than_the_file_has_is_refused(folder: Path) -> None:
    header = {"model.norm.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert "model.safetensors" in refusal(folder)


@pytest.fixture(scope="module")
def mutable(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Give a folder whose weights are written anew for each case, and their bytes."""
    folder = shutil.copytree(tiny_model(), tmp_path_factory.mktemp("mutated") / "model")
    return folder, (folder / "model.safetensors").read_bytes()


@given(cut=st.just(0) | st.integers(0, 20_000), at=st.integers(0, 4_000), byte=st.integers(0, 255))
def test_any_mutated_file_is_read_or_refused(mutable: tuple[Path, bytes], cut: int, at: int, byte: int) -> None:
    folder, original = mutable
    raw = bytearray(original)
    raw[at] = byte
    (folder / "model.safetensors").write_bytes(raw[: len(raw) - cut])
    try:
        with Checkpoint.open(folder, load_format="auto", seed=0) as checkpoint:
            for name in tensor_shapes(checkpoint.config):
                checkpoint.weights.get(name)
    except ModelLoadError:
        pass


def test_dummy_weights_have_every_tensor_and_depend_on_config_and_seed_only(tiny_model: TinyModel) -> None:
    config = config_of(tiny_model("qwen3"))
    one, same, other = DummyWeights(config, seed=1), DummyWeights(config, seed=1), DummyWeights(config, seed=2)
    check_names(config, one.names())
    for name, shape in reversed(tensor_shapes(config).items()):
        assert tuple(one.get(name).shape) == one.shape(name) == shape
        assert torch.equal(one.get(name), same.get(name))
        if not name.endswith("norm.weight"):
            assert not torch.equal(one.get(name), other.get(name))


def test_large_dummy_matrices_have_no_equal_rows() -> None:
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 20_000,
            "hidden_size": 128,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 16,
        }
    )
    weights = DummyWeights(config, seed=3).get("model.embed_tokens.weight")
    assert weights.numel() > 2**21
    assert len(torch.unique(weights, dim=0)) == 20_000
    assert weights.std().item() == pytest.approx(128**-0.5, rel=0.01)


def test_a_dummy_load_needs_a_config_and_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with Checkpoint.open(folder, load_format="dummy", seed=4) as checkpoint:
        assert isinstance(checkpoint.weights, DummyWeights)
