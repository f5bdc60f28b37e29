"""Opening a model: what is left open is chosen, what does not fit is refused, a cancel leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import LLM, EngineConfig
from asyncllm.errors import ConfigurationError, ModelLoadError
from asyncllm.model import hardware
from asyncllm.model.hardware import choose_device, choose_dtype, free_memory_bytes
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.open import TorchBackend
from asyncllm.model.sizing import Memory, Sizes, choose_sizes
from helpers.batches import Row, make_batch
from helpers.gguf_files import write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import TinyModel

    from asyncllm.backend import OpenBackend

GIB = 2**30
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"dtype": "float32", "kv_pool_tokens": 1024, "max_running_requests": 4}


class CancelledError(Exception):
    """What a progress callback raises."""


def ignore(_stage: str, _done: int, _total: int) -> None:
    """Note nothing."""


class OpenModel(Protocol):
    """Opens a model for the time of a test."""

    def __call__(self, model: Path, **fields: Any) -> OpenBackend:  # noqa: ANN401 - fields of EngineConfig
        """Open it with these fields of `EngineConfig`."""


@pytest.fixture
def opened() -> Iterator[OpenModel]:
    """Give a function that opens models, which are closed at the end."""
    runners = []

    def open_model(model: Path, **fields: Any) -> OpenBackend:  # noqa: ANN401 - fields of EngineConfig
        backend = TorchBackend().open(EngineConfig(model=model, **(SMALL | fields)), ignore)
        runners.append(backend.runner)
        return backend

    yield open_model
    for runner in runners:
        runner.close()


def tokens_of(model: Path, **fields: Any) -> list[tuple[int, ...]]:  # noqa: ANN401 - fields of EngineConfig
    prompts = [[5, 77, 31, 9], list(range(20, 60)), [8]]
    with LLM(model, **(SMALL | fields)) as llm:
        completions = llm.generate(prompts, progress=False, max_tokens=12, ignore_eos=True, temperature=0.0)
    return [completion.token_ids for completion in completions]


def test_what_was_chosen_is_told_by_the_names_of_the_settings(tiny_model: TinyModel, opened: OpenModel) -> None:
    backend = opened(tiny_model(), dtype="float32", cpu_threads=1)
    resolved = dict(backend.resolved)
    EngineConfig(model="x", **resolved)  # type: ignore[arg-type]  # that they fit is what it checks
    assert resolved == {
        "device": "cpu",
        "dtype": "float32",
        "load_format": "safetensors",
        "cpu_threads": 1,
        "attention_backend": "cpu",
        "kv_pool_tokens": 1024,
        "page_size": 16,
        "max_model_tokens": 512,
        "step_token_budget": 512,
        "min_prefill_chunk": 64,
    }
    assert (backend.page_size, backend.num_pages, backend.max_model_tokens) == (16, 64, 512)
    assert (backend.step_token_budget, backend.min_prefill_chunk) == (512, 64)
    assert backend.model_config.num_layers == 2


def test_an_opened_model_runs_steps(tiny_model: TinyModel, opened: OpenModel) -> None:
    runner = opened(tiny_model()).runner
    result = runner.launch(make_batch(0, [Row(0, 0, [5, 6, 7])], table=[(0, 0, 3)])).result()
    assert result.finite == (True,)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_file_gives_the_same_tokens_as_the_same_weights_in_safetensors(
    tiny_model: TinyModel, tmp_path: Path, architecture: str
) -> None:
    folder = tiny_model(architecture)
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    tensors = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    write_gguf(tmp_path / "same.gguf", config, tensors)
    assert tokens_of(tmp_path / "same.gguf") == tokens_of(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_matrix_in_the_file_counts_only_if_the_config_does_not_tie_it(
    tiny_model: TinyModel, tmp_path: Path, *, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    if tied:  # some versions of the reference take the file's matrix all the same
        reference.lm_head.weight = reference.model.embed_tokens.weight
    logits = reference(torch.tensor([[5, 77, 31, 9]])).logits[0, -1]
    assert tokens_of(folder)[0][0] == logits.argmax().item()


def test_dummy_weights_depend_on_the_seed_only(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model() / "config.json").read_bytes())
    first = tokens_of(tmp_path, load_format="dummy", seed=5)
    assert first == tokens_of(tmp_path, load_format="dummy", seed=5)
    assert first != tokens_of(tmp_path, load_format="dummy", seed=6)


def test_a_dummy_load_says_so(tiny_model: TinyModel, opened: OpenModel) -> None:
    assert opened(tiny_model(), load_format="dummy").resolved["load_format"] == "dummy"


def test_every_end_of_sequence_that_anyone_names_counts(
    tiny_model: TinyModel, tmp_path: Path, opened: OpenModel
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "max_new_tokens": 33}))
    backend = opened(folder)
    assert backend.tokenizer is not None
    assert backend.tokenizer.eos_token_ids == {2}
    assert backend.eos_token_ids == {2, 5, 7, 9}
    assert backend.generation.max_new_tokens == 33


def test_a_folder_without_a_tokenizer_is_ids_only_and_another_ones_can_be_named(
    tiny_model: TinyModel, tmp_path: Path, opened: OpenModel
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model() / name, tmp_path)
    assert opened(tmp_path).tokenizer is None
    named = opened(tmp_path, tokenizer=tiny_model()).tokenizer
    assert named is not None
    assert named.encode("The capital")


def test_the_demo_model_answers(demo_gguf: Path) -> None:
    with LLM(demo_gguf, **SMALL) as llm:
        (completion,) = llm.generate("The capital of France is", progress=False, max_tokens=4)
    assert completion.text.startswith(" Paris")


class Cancelling:
    """A progress callback that raises at its n-th call."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Note the call, or raise."""
        self.calls.append((stage, done, total))
        if len(self.calls) - 1 == self.at:
            raise CancelledError


def holds_weights_file() -> bool:
    return "model.safetensors" in Path("/proc/self/maps").read_text()


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at what is mapped, in /proc")


@linux
def test_progress_counts_layers_and_a_cancel_at_any_point_leaves_nothing(tiny_model: TinyModel) -> None:
    """No thread, no mapped file; and the cancel's exception passes as it is."""
    config = EngineConfig(model=tiny_model(), **SMALL)
    whole = Cancelling(None)
    TorchBackend().open(config, whole).runner.close()
    assert [call[1:] for call in whole.calls if call[0] == "weights"] == [(0, 2), (1, 2), (2, 2)]
    threads = threading.active_count()
    for at in range(len(whole.calls)):
        with pytest.raises(CancelledError):
            TorchBackend().open(config, Cancelling(at))
        assert threading.active_count() == threads
    assert not holds_weights_file()


@linux
def test_files_are_let_go_once_a_model_is_open(tiny_model: TinyModel, opened: OpenModel) -> None:
    opened(tiny_model())
    assert not holds_weights_file()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "tpu"}, "tpu"),
        ({"attention_backend": "flash_attn2"}, "attention_backend"),
        ({"load_format": "gguf"}, "gguf"),
        ({"max_model_tokens": 513}, "max_model_tokens=513"),
        ({"page_size": 48}, "1008 or 1056"),
        ({"step_token_budget": 67}, "step_token_budget=67"),
        ({"kv_pool_tokens": 2**44}, "kv_pool_tokens"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_or_the_machine_are_refused(
    tiny_model: TinyModel, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises((ConfigurationError, ModelLoadError), match=named):
        TorchBackend().open(EngineConfig(model=tiny_model(), **(SMALL | fields)), ignore)


MODEL = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
)
TOKEN_BYTES = 2 * 4 * 2 * 64 * 4


def sizes(*, free: int | None = 64 * GIB, total: int | None = None, gpu: bool = False, **fields: Any) -> Sizes:  # noqa: ANN401
    config = EngineConfig(model="x", **fields)
    return choose_sizes(config, MODEL, Memory(free=free, total=total), element_bytes=4, best_page_size=256, gpu=gpu)


def test_a_step_holds_all_running_requests_and_a_chunk() -> None:
    assert (sizes().step_token_budget, sizes().min_prefill_chunk) == (512, 64)
    assert sizes(max_running_requests=1000).step_token_budget == 1064
    assert sizes(gpu=True, total=80 * GIB).min_prefill_chunk == 256
    assert sizes(min_prefill_chunk=700).step_token_budget == 956
    with pytest.raises(ConfigurationError, match="step_token_budget=100"):
        sizes(step_token_budget=100)


def test_pages_are_the_backends_best_unless_a_small_pool_on_the_cpu_wants_smaller_ones() -> None:
    assert sizes().page_size == 256
    assert sizes(kv_pool_tokens=65536).page_size == 256
    assert sizes(kv_pool_tokens=4096).page_size == 64
    assert sizes(kv_pool_tokens=1024).page_size == 16
    assert sizes(kv_pool_tokens=128).page_size == 16
    assert sizes(kv_pool_tokens=100).page_size == 4
    assert sizes(kv_pool_tokens=101).num_pages == 101
    assert sizes(kv_pool_tokens=1024, page_size=256).page_size == 256
    assert sizes(kv_pool_tokens=1024, gpu=True, total=80 * GIB).page_size == 256
    with pytest.raises(ConfigurationError, match="768 or 1024"):
        sizes(kv_pool_tokens=1000, gpu=True, total=80 * GIB)


def test_a_pool_that_nobody_asked_for_is_no_larger_than_can_be_used() -> None:
    few = sizes(max_running_requests=2)
    assert few.pool_tokens == 2 * 4096
    assert sizes(max_running_requests=2, max_model_tokens=300).pool_tokens == 2 * 512


def test_on_the_cpu_such_a_pool_takes_a_gibibyte_or_a_quarter_of_what_is_left() -> None:
    assert sizes().pool_tokens == GIB // TOKEN_BYTES // 256 * 256
    tight = sizes(free=GIB)
    assert 0 < tight.pool_tokens * TOKEN_BYTES <= GIB // 4
    assert sizes(free=None).pool_tokens == sizes().pool_tokens


def test_on_a_gpu_weights_activations_and_kv_take_the_fraction_of_all_its_memory() -> None:
    def pool_bytes(free: int, fraction: float) -> int:
        size = sizes(gpu=True, free=free, total=4 * GIB, memory_fraction=fraction, max_running_requests=1000)
        return size.pool_tokens * TOKEN_BYTES

    half, most = pool_bytes(4 * GIB, 0.5), pool_bytes(4 * GIB, 0.9)
    assert most - half == pytest.approx(0.4 * 4 * GIB, rel=0.01)
    assert pool_bytes(3 * GIB, 0.9) == pytest.approx(most - GIB, rel=0.01)  # another program has one


def test_what_does_not_fit_into_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigurationError, match="weights of"):
        sizes(free=10 * 2**20)
    with pytest.raises(ConfigurationError, match=r"kv_pool_tokens=1048576 need 4\.00 GiB.*the most is"):
        sizes(free=2 * GIB, kv_pool_tokens=2**20)


def test_the_context_is_the_models_the_callers_or_what_the_pool_can_hold() -> None:
    assert sizes().max_model_tokens == 4096
    assert sizes(max_model_tokens=100).max_model_tokens == 100
    assert sizes(kv_pool_tokens=1024).max_model_tokens == 1025  # the last token's KV is never written
    assert sizes(kv_pool_tokens=1024, max_model_tokens=2000).max_model_tokens == 2000
    with pytest.raises(ConfigurationError, match=r"max_model_tokens=4097.*4096"):
        sizes(max_model_tokens=4097)


def test_auto_is_bfloat16_where_it_is_multiplied_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("float16", CPU, checkpoint="float32") == torch.float16
    for native, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(hardware, "_multiplies_bfloat16", lambda _device, native=native: native)
        for checkpoint in ("float32", "bfloat16", "float16"):
            assert choose_dtype("auto", CPU, checkpoint=checkpoint) == dtype
        assert choose_dtype("auto", torch.device("cuda:0"), checkpoint="bfloat16") == dtype
        assert choose_dtype("auto", torch.device("cuda:0"), checkpoint="float16") == torch.float16


def test_the_cpu_without_a_gpu_is_the_automatic_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigurationError, match=r"cuda:2.*cpu, cuda:0, cuda:1"):
        choose_device("cuda:2")


def test_free_memory_is_the_systems_or_a_containers_whichever_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, container = tmp_path / "meminfo", tmp_path / "cgroup"
    container.mkdir()
    monkeypatch.setattr(hardware, "_MEMINFO", meminfo)
    monkeypatch.setattr(hardware, "_CONTAINER", container)
    assert free_memory_bytes(CPU) is None
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert free_memory_bytes(CPU) == 4000 * 1024
    (container / "memory.max").write_text("max\n")
    (container / "memory.current").write_text("2000000\n")
    (container / "memory.stat").write_text("anon 1\ninactive_file 300000\nactive_file 200000\n")
    assert free_memory_bytes(CPU) == 4000 * 1024
    (container / "memory.max").write_text("3000000\n")
    assert free_memory_bytes(CPU) == 3000000 - 2000000 + 500000


def test_a_model_is_opened_with_what_its_first_conversation_needs(tiny_model: TinyModel) -> None:
    """The import takes a second, in which the loop of whoever chats first would stand still."""
    program = """
import sys
from asyncllm import LLM
with LLM(sys.argv[1], kv_pool_tokens=256, device="cpu", cpu_threads=1) as llm:
    before = set(sys.modules)
    list(llm.chat([{"role": "user", "content": "a"}], max_tokens=1))
    print(sorted(name for name in set(sys.modules) - before if name.startswith("transformers")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_model())], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.strip() == "[]", done.stderr
