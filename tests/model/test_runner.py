"""The runner: steps in order, tokens that only the device knows, failures, closing, other people's torch settings."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from asyncllm.model.attention.cpu import CPUAttention
from asyncllm.model.cpu_device import CPUDevice
from asyncllm.model.decoder import Decoder
from asyncllm.model.model_config import ModelConfig
from asyncllm.model.runner import ModelRunner
from asyncllm.scheduler.batch import SAMPLED_LAST_STEP
from asyncllm.testing.engines import collect_garbage
from helpers.batches import Row, make_batch
from helpers.model_steps import CPU, TensorSource, TinyDecoder, make_reference, reference_logits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

SLOTS, PAGE_SIZE, COLUMNS = 4, 16, 8


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return make_reference()


def make_runner(reference: PreTrainedModel) -> ModelRunner:
    """Put a runner in front of a reference model."""
    config = ModelConfig.from_hf(reference.config.to_dict())
    source = TensorSource(reference.state_dict())
    decoder = Decoder(config, source, dtype=torch.float32, device=CPU, max_model_tokens=PAGE_SIZE * COLUMNS)
    return ModelRunner(
        decoder,
        CPUAttention(torch.float32),
        CPUDevice(),
        num_slots=SLOTS,
        max_step_tokens=64,
        page_size=PAGE_SIZE,
        num_pages=SLOTS * COLUMNS,
    )


@pytest.fixture
def runner(reference: PreTrainedModel) -> Iterator[ModelRunner]:
    runner = make_runner(reference)
    yield runner
    runner.close()


def table(*slots: int) -> list[tuple[int, int, int]]:
    """Give each slot its own pages."""
    return [(slot, column, slot * COLUMNS + column) for slot in slots for column in range(COLUMNS)]


def greedy(reference: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Continue a prompt by the reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_tokens_of_overlapping_steps_are_the_references(runner: ModelRunner, reference: PreTrainedModel) -> None:
    """Every step is launched before the one before is read, so its input is known to the device alone."""
    prompts = {0: [5, 6, 7], 2: [50, 3], 3: [9] * 20}
    rows = [Row(slot, 0, prompt) for slot, prompt in prompts.items()]
    steps = [runner.launch(make_batch(0, rows, table=table(*prompts)))]
    for step in range(1, 12):
        rows = [Row(slot, len(prompt) + step - 1, [SAMPLED_LAST_STEP]) for slot, prompt in prompts.items()]
        rows = rows[step % 3 :] + rows[: step % 3]
        steps.append(runner.launch(make_batch(step, rows)))
    found: dict[int, list[int]] = {slot: [] for slot in prompts}
    for step, launched in enumerate(steps):
        order = list(prompts)[step % 3 if step else 0 :] + list(prompts)[: step % 3 if step else 0]
        result = launched.result()
        assert result.index == step
        assert result.finite == (True,) * 3
        for slot, token in zip(order, result.token_ids, strict=True):
            found[slot].append(token)
    assert found == {slot: greedy(reference, prompt, 12) for slot, prompt in prompts.items()}


def test_a_step_that_samples_nothing_has_no_tokens(runner: ModelRunner, reference: PreTrainedModel) -> None:
    prompt = list(range(30))
    first = runner.launch(make_batch(0, [Row(1, 0, prompt[:10], sample=False)], table=table(1)))
    assert first.result().token_ids == ()
    second = runner.launch(make_batch(1, [Row(1, 10, prompt[10:])]))
    assert list(second.result().token_ids) == greedy(reference, prompt, 1)


def test_a_failed_step_raises_what_is_behind_it_is_not_run_and_the_next_is_right(
    runner: ModelRunner, reference: PreTrainedModel
) -> None:
    runner.launch(make_batch(0, [Row(0, 0, [1, 2, 3])], table=table(0))).result()
    bad = runner.launch(make_batch(1, [Row(0, 3, [10**6])]))
    behind = runner.launch(make_batch(2, [Row(0, 0, [1, 2, 3])]))
    with pytest.raises(IndexError):
        bad.result()
    with pytest.raises(RuntimeError, match="step 2 was not run"):
        behind.result()
    good = runner.launch(make_batch(3, [Row(0, 0, [1, 2, 3])]))
    assert list(good.result().token_ids) == greedy(reference, [1, 2, 3], 1)


def test_a_row_that_is_not_finite_is_told_and_its_neighbour_is_right(reference: PreTrainedModel) -> None:
    broken = make_reference()
    with torch.no_grad():
        broken.model.embed_tokens.weight[77] = torch.nan
    runner = make_runner(broken)
    rows = [Row(0, 0, [5, 77, 6]), Row(1, 0, [5, 6, 7])]
    result = runner.launch(make_batch(0, rows, table=table(0, 1))).result()
    assert result.finite == (False, True)
    assert result.token_ids[1] == greedy(reference, [5, 6, 7], 1)[0]
    # its pages go to the neighbour, as they are
    taken = [(1, column, column) for column in range(COLUMNS)]
    result = runner.launch(make_batch(1, [Row(1, 0, [5, 6, 7])], table=taken)).result()
    assert result.finite == (True,)
    assert result.token_ids[0] == greedy(reference, [5, 6, 7], 1)[0]
    runner.close()


def test_close_ends_what_is_launched_gives_memory_back_and_refuses_more(reference: PreTrainedModel) -> None:
    runner = make_runner(reference)
    step = runner.launch(make_batch(0, [Row(0, 0, [1, 2, 3])], table=table(0)))
    model = runner._model
    assert model is not None
    keys = weakref.ref(model.kv.keys[0])
    del model
    runner.close()
    runner.close()
    assert step.done()
    collect_garbage()
    assert keys() is None
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(make_batch(1, [Row(0, 3, [4])]))


def test_the_callers_torch_settings_change_nothing_and_are_left_alone(reference: PreTrainedModel) -> None:
    """A default dtype of float64, a default device on which nothing can be computed, gradients on."""
    expected = greedy(reference, [5, 6, 7], 4)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        runner = make_runner(reference)
        tokens = list(runner.launch(make_batch(0, [Row(0, 0, [5, 6, 7])], table=table(0))).result().token_ids)
        for step in range(3):
            launched = runner.launch(make_batch(step + 1, [Row(0, 3 + step, [SAMPLED_LAST_STEP])]))
            tokens += launched.result().token_ids
        runner.close()
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device() == torch.device("meta")
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert tokens == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_on_a_thread_with_strange_defaults_gives_the_same_bits(dtype: torch.dtype) -> None:
    """The device's thread has defaults of its own; here the step itself runs under them."""
    model, rows = make_reference("qwen3"), [Row(0, 0, [1, 2, 3]), Row(1, 0, [4])]
    expected = TinyDecoder(model, dtype=dtype).logits(rows)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        found = TinyDecoder(model, dtype=dtype).logits(rows)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
