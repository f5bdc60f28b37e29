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

from asyncllm.model.sampler import is_filtered, is_greedy, uniforms

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from asyncllm.scheduler.batch import Batch, Ints

__all__ = ["OptionInputs", "StagedOptions", "stage_options"]

_ALIGNMENT: Final = 64  # bytes, a multiple of every element's size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionInputs:
    """The asking rows' inputs on the device; `asking` rows are numbered in the order of their samples.

    Args:
        places: int64 [asking]: the row of the step's logits.
        slots: int64 [asking].
        plain: int64: the asking rows that are drawn from all tokens.
        filtered: int64: those that are drawn under top-k, top-p or min-p; those in neither are greedy.
        temperatures: float32 [asking].
        top_ps: float32 [asking].
        top_ks: int64 [asking].
        min_ps: float32 [asking].
        uniforms: float32 [asking], 0 <= u < 1.
        mask_rows: int64 [masks]: the asking rows that have a mask.
        masks: int32 [masks, words].
    """

    places: torch.Tensor
    slots: torch.Tensor
    plain: torch.Tensor
    filtered: torch.Tensor
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    uniforms: torch.Tensor
    mask_rows: torch.Tensor
    masks: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedOptions:
    """The asking rows' inputs in host memory.

    Args:
        block: uint8, all of them.
        shapes: of each of `OptionInputs`' fields, the first byte, the dtype and the shape.
    """

    block: torch.Tensor
    shapes: Mapping[str, tuple[int, torch.dtype, tuple[int, ...]]]

    def on_device(self, device: torch.device) -> OptionInputs:
        """Give the inputs as tensors: views of the host memory on the CPU, one copy on a GPU's current stream."""
        whole = self.block.to(device, non_blocking=True)
        tensors = {
            name: whole[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            for name, (start, dtype, shape) in self.shapes.items()
        }
        return OptionInputs(**tensors)


def stage_options(
    batch: Batch, places: npt.NDArray[np.integer], *, vocab_size: int, pinned: bool
) -> StagedOptions | None:
    """Write what a batch's rows ask for; None where none does.

    Args:
        batch: the step.
        places: int [samples]: the row of the step's logits that each sample has.
        vocab_size: columns of the logits.
        pinned: whether a GPU copies from the memory.
    """
    asking = np.asarray(batch.asking, dtype=np.int64)
    if not len(asking):
        return None
    rows = batch.sample_rows[asking]
    temperatures, top_ps = batch.temperatures[asking], batch.top_ps[asking]
    top_ks, min_ps = batch.top_ks[asking], batch.min_ps[asking]
    greedy = is_greedy(temperatures)
    filtered = is_filtered(top_ps, top_ks, min_ps, vocab_size=vocab_size)
    number = {sample: row for row, sample in enumerate(asking.tolist())}
    values: dict[str, npt.NDArray[np.generic]] = {
        "places": places[asking].astype(np.int64),
        "slots": batch.slots[rows].astype(np.int64),
        "plain": np.flatnonzero(~greedy & ~filtered),
        "filtered": np.flatnonzero(~greedy & filtered),
        "temperatures": temperatures,
        "top_ps": top_ps,
        "top_ks": top_ks.astype(np.int64),
        "min_ps": min_ps,
        "uniforms": uniforms(batch.seeds[asking], (batch.starts + batch.query_lens)[rows]),
        "mask_rows": np.asarray([number[sample] for sample in batch.masks], dtype=np.int64),
        "masks": _padded(batch.masks, -(-vocab_size // 32)),
    }
    return _packed(values, pinned=pinned)


def _padded(masks: Mapping[int, Ints], words: int) -> Ints:
    """Put masks below each other: int32 [masks, words]."""
    padded = np.zeros((len(masks), words), dtype=np.int32)
    for row, mask in zip(padded, masks.values(), strict=True):
        row[: len(mask)] = mask[:words]
    return padded


def _packed(values: Mapping[str, npt.NDArray[np.generic]], *, pinned: bool) -> StagedOptions:
    """Write arrays one after the other into new memory."""
    starts = np.cumsum([0, *(-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values.values())]).tolist()
    block = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=pinned)
    array: npt.NDArray[np.uint8] = block.numpy()
    shapes: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
    for (name, value), start in zip(values.items(), starts[:-1], strict=True):
        array[start : start + value.nbytes].view(value.dtype).reshape(value.shape)[...] = value
        shapes[name] = (start, getattr(torch, value.dtype.name), value.shape)
    return StagedOptions(block=block, shapes=shapes)
