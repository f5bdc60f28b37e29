"""The fused path as an engine uses it, on a GPU: graphs, neighbours, memory, other people's CUDA work."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from asyncllm import Engine, SamplingParams
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError
from asyncllm.model.model_config import ModelConfig
from asyncllm.testing.engines import collect_garbage
from helpers.batches import Row, make_batch
from helpers.model_steps import TensorSource, make_reference, reference_logits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import TinyModel
    from transformers import PreTrainedModel

    from asyncllm import Completion
    from asyncllm.model.cuda.cuda_runner import CUDARunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

GPU = torch.device("cuda:0")
SLOTS, PAGE_SIZE, COLUMNS = 80, 64, 4
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "max_position_embeddings": PAGE_SIZE * COLUMNS}
SETTINGS = {"device": "cuda", "dtype": "bfloat16", "kv_pool_tokens": 4096, "max_running_requests": 16, "seed": 3}


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", **SHAPE)


def make_engine(folder: Path, **changes: object) -> Engine:
    return Engine(folder, **(SETTINGS | changes))  # type: ignore[arg-type]  # it has a backend's argument too


def make_runner(**settings: object) -> CUDARunner:
    """Put a runner in front of a reference model."""
    from asyncllm.model.cuda.open_fused import open_fused

    reference = make_reference("qwen3", SHAPE)
    config = EngineConfig(
        model="none",
        max_running_requests=SLOTS,
        kv_pool_tokens=SLOTS * COLUMNS * PAGE_SIZE,
        page_size=PAGE_SIZE,
        step_token_budget=352,
        **settings,  # type: ignore[arg-type]
    )
    runner, _ = open_fused(
        config,
        ModelConfig.from_hf(reference.config.to_dict()),
        TensorSource(reference.state_dict()),
        device=GPU,
        dtype=torch.bfloat16,
        progress=lambda _stage, _done, _total: None,
    )
    return runner


def run_everything(runner: CUDARunner) -> list[tuple[int, ...]]:
    """Prefill all slots in mixed steps, then decode with each number of rows: the odd ones first, as they come."""
    found = []
    for slot in range(SLOTS):
        table = [(slot, column, slot * COLUMNS + column) for column in range(COLUMNS)]
        rows = [Row(each, 3 + each % 50, [-1]) for each in range(slot)]
        batch = make_batch(slot, [*rows, Row(slot, 0, [5 + slot] * (3 + slot % 50))], table=table)
        found.append(runner.launch(batch).result().token_ids)
    counts = [3, 5, 7, *range(1, SLOTS + 1)]
    steps = [
        runner.launch(make_batch(SLOTS + number, [Row(each, 60 + number, [-1]) for each in range(count)]))
        for number, count in enumerate(counts[:2])
    ]
    for number, count in enumerate(counts[2:], start=2):
        found.append(steps.pop(0).result().token_ids)
        rows = [Row(each, 60 + number, [-1]) for each in range(count)]
        steps.append(runner.launch(make_batch(SLOTS + number, rows)))
    return found + [step.result().token_ids for step in steps]


@pytest.mark.parametrize("invariant", [False, True])
def test_graphs_give_the_bits_of_eager_steps_at_every_number_of_rows(invariant: bool) -> None:
    """Keys and values hold what every layer computed of every token, so their bits are those of all of it."""
    outcomes = []
    for graphs in (True, False):
        runner = make_runner(cuda_graphs=graphs, batch_invariant=invariant)
        assert bool(len(runner._graphs)) is graphs
        tokens = run_everything(runner)
        assert runner._model is not None
        outcomes.append((tokens, runner._model.pages.kv[:, :, :-1].cpu()))
        runner.close()
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_a_page_copy_comes_before_the_step_that_reads_it() -> None:
    runner = make_runner()
    prompt = list(range(2, 60))
    runner.launch(make_batch(0, [Row(0, 0, prompt)], table=[(0, 0, 0)])).result()
    original = runner.launch(make_batch(1, [Row(0, len(prompt), [7])])).result()
    copied = runner.launch(make_batch(2, [Row(1, len(prompt), [7])], table=[(1, 0, 8)], copies=[(0, 8)])).result()
    assert copied.token_ids == original.token_ids
    assert runner._model is not None
    assert torch.equal(runner._model.pages.kv[:, :, 8], runner._model.pages.kv[:, :, 0])
    runner.close()


def greedy_until_unclear(model: PreTrainedModel, prompt: list[int], tokens: tuple[int, ...]) -> int:
    """Return how many tokens agree before the reference's two best are nearly alike; fail if they differ earlier."""
    sequence = list(prompt)
    for place, token in enumerate(tokens):
        logits = reference_logits(model, sequence)[-1]
        best = logits.topk(2)
        if token != int(best.indices[0]):
            gap = float(best.values[0] - best.values[1])
            assert gap < 0.05 * float(logits.std()), f"token {place}: {token}, not {int(best.indices[0])}, by {gap}"
            return place
        sequence.append(token)
    return len(tokens)


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    """Up to where the reference's two best tokens are nearly alike: bfloat16 may choose the other one then."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[7, 9, 30], list(range(20, 120)), [5] * 64, [250]]
    with make_engine(folder) as engine:
        assert engine.config.attention_backend == "triton"
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
        for _ in range(2):  # the second time their prefixes are cached
            completions = asyncio.run(engine.generate_all(prompts, params))
            agreed = [
                greedy_until_unclear(model, prompt, completion.token_ids)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
            assert sum(agreed) > len(prompts)  # it is not all unclear
        engine.check_integrity()


def test_with_batch_invariance_neighbours_change_no_token(folder: Path) -> None:
    prompts = [[number + 3] * (1 + 7 * number) for number in range(12)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    with make_engine(folder, batch_invariant=True) as engine:
        together = asyncio.run(engine.generate_all(prompts, params))
        for prompt, completion in zip(prompts, together, strict=True):
            assert asyncio.run(engine.generate(prompt, params)).token_ids == completion.token_ids


def test_seeded_draws_repeat_beside_other_neighbours(folder: Path) -> None:
    """With invariant kernels; a draw depends on seed and position, so neighbours change nothing of it."""
    drawn = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.8, top_k=30, seed=11)
    other = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.2)
    with make_engine(folder, batch_invariant=True) as engine:
        alone = asyncio.run(engine.generate([4, 5, 6], drawn))
        beside = asyncio.run(engine.generate_all([[9] * 20, [4, 5, 6], [8]], [other, drawn, other]))
        assert beside[1].token_ids == alone.token_ids


@pytest.fixture
def own_tensor() -> Iterator[torch.Tensor]:
    """A caller's own CUDA tensor, that must stay as it is."""
    tensor = torch.arange(1000, device=GPU)
    yield tensor
    assert torch.equal(tensor.cpu(), torch.arange(1000))


def test_all_memory_is_back_after_close_also_of_a_failed_opening(folder: Path, own_tensor: torch.Tensor) -> None:
    """Library workspaces are allowed once: they are there after the first close."""
    left = []
    for turn in range(5):
        with make_engine(folder) as engine:
            asyncio.run(engine.generate([5, 6, 7], max_tokens=5, ignore_eos=True))
        del engine
        if turn == 2:
            with pytest.raises(AsyncLLMError), make_engine(folder, kv_pool_tokens=2**32):
                pass
        collect_garbage()
        left.append(torch.cuda.memory_allocated(GPU))
    assert left == [left[0]] * 5
    assert own_tensor.device == GPU


def test_a_callers_own_cuda_work_and_the_opening_do_not_disturb_each_other(folder: Path) -> None:
    """A thread allocates, frees and synchronizes in a loop while graphs are captured and steps run."""
    stop, turns = threading.Event(), 0
    failures: list[BaseException] = []

    def work() -> None:
        nonlocal turns
        try:
            while not stop.is_set():
                product = torch.ones(256, 256, device=GPU) @ torch.ones(256, 256, device=GPU)
                torch.cuda.synchronize(GPU)
                assert float(product[3, 4]) == 256.0
                del product
                torch.cuda.empty_cache()
                turns += 1
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with make_engine(folder) as engine:
            beside = asyncio.run(engine.generate([5, 6, 7], max_tokens=50, ignore_eos=True))
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert turns > 0
    with make_engine(folder) as engine:
        quiet = asyncio.run(engine.generate([5, 6, 7], max_tokens=50, ignore_eos=True))
    assert beside.token_ids == quiet.token_ids


def test_two_engines_run_in_one_process(folder: Path) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)

    async def both(first: Engine, second: Engine) -> list[Completion]:
        return await asyncio.gather(*(each.generate([9, 8, 7], params) for each in (first, second)))

    with make_engine(folder) as first, make_engine(folder) as second:
        completions = asyncio.run(both(first, second))
    assert completions[0].token_ids == completions[1].token_ids


def test_the_pool_takes_what_the_fraction_leaves(folder: Path) -> None:
    """Without a size asked for, within what requests could fill; and a fraction too small is refused by numbers."""
    with make_engine(folder, kv_pool_tokens=None) as engine:
        assert engine.config.kv_pool_tokens == 16 * PAGE_SIZE * COLUMNS  # all that 16 requests could fill
    with (
        pytest.raises(AsyncLLMError, match="memory_fraction"),
        make_engine(folder, kv_pool_tokens=None, memory_fraction=1e-6),
    ):
        pass
