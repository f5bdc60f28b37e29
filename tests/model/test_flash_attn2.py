"""The eager path on a GPU: FlashAttention 2, one stream, pinned staging; against float32 on the CPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from asyncllm.errors import ConfigurationError
from asyncllm.model.attention.choice import choose_kernels
from asyncllm.model.decoder import Decoder
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.runner import ModelRunner
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP
from helpers.batches import Row, make_batch
from helpers.model_steps import TensorSource, make_reference, reference_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ON_GPU = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
PAGE_SIZE, COLUMNS = 256, 2
MODEL: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}


def config() -> ModelConfig:
    return ModelConfig.from_hf(make_reference("llama", MODEL).config.to_dict())


def test_a_cpu_takes_no_gpu_kernels_and_says_what_it_takes() -> None:
    with pytest.raises(ConfigurationError, match=r"'flash_attn2' does not run on a CPU; 'native' and 'cpu' do"):
        choose_kernels("flash_attn2", model=config(), device=torch.device("cpu"), dtype=torch.bfloat16)


def test_a_gpu_takes_no_cpu_kernels_and_float32_no_flash_attention() -> None:
    with pytest.raises(ConfigurationError, match="'cpu' does not run on cuda"):
        choose_kernels("cpu", model=config(), device=torch.device("cuda"), dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="float32"):
        choose_kernels("flash_attn2", model=config(), device=torch.device("cuda"), dtype=torch.float32)
    attention, _ops = choose_kernels("auto", model=config(), device=torch.device("cuda"), dtype=torch.float32)
    assert attention.name == "torch"


def run_mixed_steps(reference: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Continue prompts in bfloat16 on the GPU, each coming in three steps after the one before, all launched ahead."""
    from asyncllm.model.cuda_device import CUDADevice

    device = torch.device("cuda")
    decoder = Decoder(
        ModelConfig.from_hf(reference.config.to_dict()),
        TensorSource(reference.state_dict()),
        dtype=torch.bfloat16,
        device=device,
        max_model_tokens=PAGE_SIZE * COLUMNS,
    )
    runner = ModelRunner(
        decoder,
        choose_kernels("flash_attn2", model=decoder.config, device=device, dtype=torch.bfloat16)[0],
        CUDADevice(device),
        num_slots=len(prompts),
        max_step_tokens=512,
        page_size=PAGE_SIZE,
        num_pages=len(prompts) * COLUMNS,
    )
    torch.cuda.synchronize()
    launched, named = [], []
    for step in range(30):
        rows, table = [], []
        for slot, prompt in enumerate(prompts):
            since = step - 3 * slot
            if since == 0:
                rows.append(Row(slot, 0, prompt))
                table += [(slot, column, slot * COLUMNS + column) for column in range(COLUMNS)]
            elif since > 0:
                rows.append(Row(slot, len(prompt) + since - 1, [SAMPLED_LAST_STEP]))
        launched.append(runner.launch(make_batch(step, rows, table=table)))
        named.append([row.slot for row in rows])
    found: list[list[int]] = [[] for _ in prompts]
    for done, slots in zip(launched, named, strict=True):
        result = done.result()
        assert all(result.finite)
        for slot, token in zip(slots, result.token_ids, strict=True):
            found[slot].append(token)
    runner.close()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU and flash-attn")
def test_prompts_and_decoding_rows_in_mixed_steps_give_the_references_tokens_and_all_memory_back() -> None:
    """What is chosen is the reference's best token, or as good as it within bfloat16's rounding."""
    reference = make_reference("qwen3", MODEL)
    generator = torch.Generator("cpu").manual_seed(0)
    prompts = [torch.randint(200, (length,), generator=generator).tolist() for length in (3, 250, 300, 40)]
    found = run_mixed_steps(reference, prompts)
    allocated = torch.cuda.memory_allocated()  # workspaces of torch's libraries, made at their first use
    assert run_mixed_steps(reference, prompts) == found
    assert torch.cuda.memory_allocated() == allocated
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = reference_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert (logits.max(dim=1).values - chosen).max() < 0.05 * logits.abs().max()
        assert (logits.argmax(dim=1) == torch.tensor(tokens)).float().mean() > 0.8
