"""Tables on the device of what requests ask of their logits: written once a request, read by every step.

Runs on the engine thread; owns the tables, whose writes are enqueued on the current stream. Invariant: a row that a
step in flight reads is written behind that step, since both go through one stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.request import LogitOptions
    from asyncllm.scheduler.batch import Ints

__all__ = ["NO_ROW", "AdditionRows", "CountRows"]

NO_ROW: Final = -1

_IN_PROMPT: Final = -0x8000
_MOST_COUNTED: Final = 0x7FFF


class _Table:
    """Rows on the device; twice as many when they do not do.

    Args:
        width: columns.
        dtype: of its values.
        device: where it lives.

    Attributes:
        values: [rows, width]; another tensor once a write has moved it.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((1, width), dtype=dtype, device=device)

    def write(self, row: int, values: npt.NDArray[np.generic]) -> None:
        """Write a row."""
        if row >= len(self.values):
            grown = self.values.new_zeros((max(row + 1, 2 * len(self.values)), self.values.shape[1]))
            grown[: len(self.values)] = self.values
            self.values = grown
        host = torch.from_numpy(values)
        if self.values.is_cuda:
            host = host.pin_memory()  # kept by torch until it is read
        self.values[row].copy_(host, non_blocking=True)


class AdditionRows:
    """What is added to the logits of a request: biases, and -inf for what it may not choose. Equal ones share a row.

    Args:
        vocab_size: columns.
        device: where they live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._table = _Table(vocab_size, torch.float32, device)
        self._rows: dict[tuple[bytes | None, ...], int] = {}
        self._keys: dict[int, tuple[bytes | None, ...]] = {}
        self._users: dict[int, int] = {}
        self._free: list[int] = []
        self._made = 0

    @property
    def values(self) -> torch.Tensor:
        """float32 [rows, vocab]."""
        return self._table.values

    def take(self, asked: LogitOptions, *, late_ids: Ints) -> int:
        """Return the row of what a request asks, written if there was none; `NO_ROW` if it asks for nothing of it.

        Args:
            asked: of it biases, allowed ids and mask.
            late_ids: ids that it may not choose beside.
        """
        if not (len(asked.bias_ids) or len(late_ids) or asked.allowed_ids is not None or asked.mask is not None):
            return NO_ROW
        parts = (asked.bias_ids, asked.biases, asked.allowed_ids, asked.mask, late_ids)
        key = tuple(None if part is None else part.tobytes() for part in parts)
        row = self._rows.get(key)
        if row is None:
            row = self._free[-1] if self._free else self._made
            self._table.write(row, self._filled(asked, late_ids))  # may find no memory: nothing has changed then
            if self._free:
                self._free.pop()
            else:
                self._made += 1
            self._rows[key], self._keys[row], self._users[row] = row, key, 0
        self._users[row] += 1
        return row

    def give_back(self, row: int) -> None:
        """Take note that a request needs its row no more."""
        if row == NO_ROW:
            return
        self._users[row] -= 1
        if not self._users[row]:
            del self._rows[self._keys.pop(row)], self._users[row]
            self._free.append(row)

    def _filled(self, asked: LogitOptions, late_ids: Ints) -> npt.NDArray[np.float32]:
        added = np.zeros(self._vocab_size, dtype=np.float32)
        if asked.mask is not None:
            allowed = np.unpackbits(asked.mask.view(np.uint8), bitorder="little")[: self._vocab_size]
            added[: len(allowed)][allowed == 0] = -np.inf
            added[len(allowed) :] = -np.inf
        if asked.allowed_ids is not None:
            others = np.ones(self._vocab_size, dtype=np.bool_)
            others[asked.allowed_ids] = False
            added[others] = -np.inf
        added[asked.bias_ids] += asked.biases
        added[late_ids] = -np.inf
        return added


class CountRows:
    """How often each token was generated, and which are in the prompt; a row a slot that ever had penalties.

    Args:
        vocab_size: columns.
        device: where they live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._table = _Table(vocab_size, torch.int16, device)
        self._rows: dict[int, int] = {}

    @property
    def values(self) -> torch.Tensor:
        """int16 [rows, vocab], see `OptionTables.counts`."""
        return self._table.values

    def row(self, slot: int) -> int:
        """Return a slot's row."""
        return self._rows.setdefault(slot, len(self._rows))

    def write(self, slot: int, tokens: Ints, *, prompt_tokens: int) -> None:
        """Count what a request has so far: int32 [tokens], its prompt first."""
        counts = np.bincount(tokens[prompt_tokens:], minlength=self._vocab_size).clip(max=_MOST_COUNTED)
        found = counts.astype(np.int16)
        found[tokens[:prompt_tokens]] |= np.int16(_IN_PROMPT)
        self._table.write(self.row(slot), found)
