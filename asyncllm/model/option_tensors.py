"""What single rows of a step ask for beyond temperature and filters, on its way to the device.

Staged on the engine thread, in memory of its own: few steps have any, so no buffer is kept for it. Invariant: a step
in which no row asks stages nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from asyncllm.model.logits_hooks import Draw, HookedRow
from asyncllm.model.option_outcome import OptionOutcome
from asyncllm.model.sampler import is_filtered, is_greedy, uniforms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from asyncllm.request import LogitOptions
    from asyncllm.scheduler.batch import Batch, Ints

__all__ = ["OptionInputs", "StagedOptions", "stage_options"]

_ALIGNMENT: Final = 64  # bytes, a multiple of every element's size

_DTYPES: Final = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}

Arrays = dict[str, "npt.NDArray[np.generic]"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionInputs:
    """The asking rows' inputs on the device; asking rows are numbered in the order of their samples.

    Pairs of a row and an id are distinct in each list of them.

    Args:
        places: int64 [asking]: the row of the step's logits.
        slots: int64 [asking].
        positions: int64 [asking]: of the token that is chosen.
        plain: int64: the asking rows that are drawn from all tokens.
        filtered: int64: those that are drawn under top-k, top-p or min-p; those in neither are greedy.
        temperatures: float32 [asking].
        top_ps: float32 [asking].
        top_ks: int64 [asking].
        min_ps: float32 [asking].
        uniforms: float32 [asking], 0 <= u < 1.
        masked: int64 [masks]: the asking rows that have a mask.
        masks: int32 [masks, words].
        restricted: int64: the asking rows that have allowed ids.
        allowed_at: int64 [n]: the asking row of each of `allowed_ids`.
        allowed_ids: int64 [n].
        bias_at: int64 [n].
        bias_ids: int64 [n].
        biases: float32 [n].
        banned_at: int64 [n].
        banned_ids: int64 [n].
        penalized: int64 [penalized]: the asking rows that have penalties.
        generated_from: int64 [penalized]: the position of the first generated token.
        repetition, presence, frequency: float32 [penalized].
        history_slots, history_columns, history_tokens: int64 [n]: what the device lacks of histories.
        raw_scored: int64: the asking rows whose logprobs are asked for, before all options.
        scored: int64: those whose logprobs are asked for after all options.
        hooked: int64: those whose logits a hook may change; their logprobs are found where it runs.
        prompt_places: int64 [scores]: query tokens of the step whose next token's logprob is asked for.
        prompt_targets: int64 [scores]: that token.
    """

    places: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    plain: torch.Tensor
    filtered: torch.Tensor
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    uniforms: torch.Tensor
    masked: torch.Tensor
    masks: torch.Tensor
    restricted: torch.Tensor
    allowed_at: torch.Tensor
    allowed_ids: torch.Tensor
    bias_at: torch.Tensor
    bias_ids: torch.Tensor
    biases: torch.Tensor
    banned_at: torch.Tensor
    banned_ids: torch.Tensor
    penalized: torch.Tensor
    generated_from: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    history_slots: torch.Tensor
    history_columns: torch.Tensor
    history_tokens: torch.Tensor
    raw_scored: torch.Tensor
    scored: torch.Tensor
    hooked: torch.Tensor
    prompt_places: torch.Tensor
    prompt_targets: torch.Tensor


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(OptionInputs))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedOptions:
    """The asking rows' inputs in host memory, and what the host needs to know of them.

    Args:
        block: uint8, all of them.
        shapes: of each of `OptionInputs`' fields that is not empty, the first byte, the dtype and the shape.
        longest: tokens of the longest history.
        counts: whether any row's penalties need to know how often a token was generated.
        outcome: takes what the device finds out.
    """

    block: torch.Tensor
    shapes: Mapping[str, tuple[int, torch.dtype, tuple[int, ...]]]
    longest: int
    counts: bool
    outcome: OptionOutcome

    def on_device(self, device: torch.device) -> OptionInputs:
        """Give the inputs as tensors: views of the host memory on the CPU, one copy on a GPU's current stream."""
        whole = self.block.to(device, non_blocking=True)
        tensors = dict.fromkeys(_FIELDS, whole[:0].view(torch.int64))
        for name, (start, dtype, shape) in self.shapes.items():
            tensors[name] = whole[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        return OptionInputs(**tensors)


def stage_options(
    batch: Batch,
    *,
    places: npt.NDArray[np.integer],
    row_starts: npt.NDArray[np.integer],
    vocab_size: int,
    pinned: bool,
    edits: bool = True,
) -> StagedOptions | None:
    """Write what a batch's rows ask for; None where none does.

    Args:
        batch: the step.
        places: int [samples]: the row of the step's logits that each sample has.
        row_starts: int [rows]: the place of each row's first query token in the step.
        vocab_size: columns of the logits.
        pinned: whether a GPU copies from the memory.
        edits: whether to write what changes logits, too; without, what is told beside tokens alone.
    """
    samples = batch.asking
    if not samples and not batch.prompt_scores:
        return None
    row_of_sample = {sample: row for row, sample in enumerate(samples)}
    options = {row_of_sample[sample]: asked for sample, asked in batch.options.items()}
    rows = batch.sample_rows[samples]
    positions = (batch.starts + batch.query_lens)[rows]
    penalized = {row: asked for row, asked in options.items() if asked.penalizes}
    hooked = [row for row, asked in options.items() if asked.hook is not None]
    told = {row: asked for row, asked in options.items() if asked.logprobs is not None and asked.hook is None}
    raw = [row for row, asked in told.items() if not asked.processed_logprobs]
    processed = [row for row, asked in told.items() if asked.processed_logprobs]
    values: Arrays = {
        "places": places[samples],
        "slots": batch.slots[rows],
        "positions": positions,
        **_draws(batch, samples, positions, vocab_size),
        "raw_scored": _ints(raw),
        "scored": _ints(processed),
        "hooked": _ints(hooked),
        **_prompt_scores(batch, row_starts),
    }
    if edits:
        masks = {row_of_sample[sample]: mask for sample, mask in batch.masks.items()}
        values |= _masks(masks, options, vocab_size) | _edits(options, positions) | _penalties(penalized)
        values |= _histories(batch)
    block, shapes = _packed(values, pinned=pinned)
    return StagedOptions(
        block=block,
        shapes=shapes,
        longest=max((int(positions[row]) for row in penalized), default=0),
        counts=any(each.presence_penalty != 0.0 or each.frequency_penalty != 0.0 for each in penalized.values()),
        outcome=OptionOutcome(
            samples=[(samples[row], told[row].logprobs or 0) for row in (*raw, *processed)],
            prompts=batch.prompt_scores,
            hooked=[
                HookedRow(
                    sample=samples[row],
                    tokens=batch.histories[samples[row]],
                    options=options[row],
                    draw=Draw(
                        temperature=float(values["temperatures"][row]),
                        top_p=float(values["top_ps"][row]),
                        top_k=int(values["top_ks"][row]),
                        min_p=float(values["min_ps"][row]),
                        uniform=float(values["uniforms"][row]),
                    ),
                )
                for row in hooked
            ],
        ),
    )


def _draws(batch: Batch, samples: Sequence[int], positions: Ints, vocab_size: int) -> Arrays:
    temperatures, top_ps = batch.temperatures[samples], batch.top_ps[samples]
    top_ks, min_ps = batch.top_ks[samples], batch.min_ps[samples]
    greedy = is_greedy(temperatures)
    filtered = is_filtered(top_ps, top_ks, min_ps, vocab_size=vocab_size)
    return {
        "plain": np.flatnonzero(~greedy & ~filtered),
        "filtered": np.flatnonzero(~greedy & filtered),
        "temperatures": temperatures,
        "top_ps": top_ps,
        "top_ks": top_ks,
        "min_ps": min_ps,
        "uniforms": uniforms(batch.seeds[samples], positions),
    }


def _edits(options: Mapping[int, LogitOptions], positions: Ints) -> Arrays:
    """List what single ids of single rows get: to stay alone, to be added, to be banned."""
    allowed = {row: asked.allowed_ids for row, asked in options.items() if asked.allowed_ids is not None}
    biased = {row: asked for row, asked in options.items() if len(asked.bias_ids)}
    early = {row: asked.late_ids for row, asked in options.items() if positions[row] < asked.first_end}
    allowed_at, allowed_ids = _pairs(allowed)
    bias_at, bias_ids = _pairs({row: asked.bias_ids for row, asked in biased.items()})
    banned_at, banned_ids = _pairs(early)
    return {
        "restricted": _ints(allowed),
        "allowed_at": allowed_at,
        "allowed_ids": allowed_ids,
        "bias_at": bias_at,
        "bias_ids": bias_ids,
        "biases": np.concatenate([_NO_FLOATS, *(asked.biases for asked in biased.values())]),
        "banned_at": banned_at,
        "banned_ids": banned_ids,
    }


def _penalties(penalized: Mapping[int, LogitOptions]) -> Arrays:
    asked = list(penalized.values())
    return {
        "penalized": _ints(penalized),
        "generated_from": _ints(each.prompt_tokens for each in asked),
        "repetition": np.asarray([each.repetition_penalty for each in asked], dtype=np.float32),
        "presence": np.asarray([each.presence_penalty for each in asked], dtype=np.float32),
        "frequency": np.asarray([each.frequency_penalty for each in asked], dtype=np.float32),
    }


def _histories(batch: Batch) -> Arrays:
    slots = batch.slots[batch.sample_rows]
    at, tokens = _pairs({int(slots[sample]): tokens for sample, tokens in batch.histories.items()})
    columns = [np.arange(len(tokens)) for tokens in batch.histories.values()]
    return {
        "history_slots": at,
        "history_columns": np.concatenate([_NO_INTS, *columns]),
        "history_tokens": tokens,
    }


def _prompt_scores(batch: Batch, row_starts: npt.NDArray[np.integer]) -> Arrays:
    targets = [scores.targets for scores in batch.prompt_scores.values()]
    places = [row_starts[row] + np.arange(len(each.targets)) for row, each in batch.prompt_scores.items()]
    return {
        "prompt_places": np.concatenate([_NO_INTS, *places]),
        "prompt_targets": np.concatenate([_NO_INTS, *targets]),
    }


_NO_INTS: Final = np.zeros(0, dtype=np.int64)
_NO_FLOATS: Final = np.zeros(0, dtype=np.float32)


def _ints(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _pairs(ids: Mapping[int, Ints]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return all ids one after the other, and before them the key that each belongs to."""
    keys = np.repeat(_ints(ids), [len(each) for each in ids.values()])
    return keys, np.concatenate([_NO_INTS, *ids.values()])


def _masks(structures: Mapping[int, Ints], options: Mapping[int, LogitOptions], vocab_size: int) -> Arrays:
    """Put masks below each other; a row that has two may be what both allow."""
    own = {row: asked.mask for row, asked in options.items() if asked.mask is not None}
    rows = sorted(structures.keys() | own.keys())
    masks = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
    for padded, row in zip(masks, rows, strict=True):
        if (mask := structures.get(row)) is not None:
            padded[: len(mask)] = mask[: len(padded)]
        if row in own:
            padded[:] = own[row] if mask is None else padded & own[row]
    return {"masked": _ints(rows), "masks": masks}


def _packed(
    values: Mapping[str, npt.NDArray[np.generic]], *, pinned: bool
) -> tuple[torch.Tensor, dict[str, tuple[int, torch.dtype, tuple[int, ...]]]]:
    """Write what is not empty into new memory, one after the other: where each is; integers as int64, but for masks."""
    arrays = {name: value for name, value in values.items() if value.size}
    for name, value in arrays.items():
        if value.dtype not in _DTYPES or (value.dtype == np.int32 and name != "masks"):
            arrays[name] = value.astype(np.int64)
    size = sum(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values())
    block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    memory: npt.NDArray[np.uint8] = block.numpy()
    shapes: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
    start = 0
    for name, array in arrays.items():
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        shapes[name] = (start, _DTYPES[array.dtype], array.shape)
        start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return block, shapes
