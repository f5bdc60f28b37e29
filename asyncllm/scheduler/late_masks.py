"""The masks of a step, made as late as they are needed.

Made on the engine thread, asked by whichever thread runs the step; owns nothing but the masks. Invariant: they are
those that follow the tokens committed when the step was launched, whenever they are asked for: no token of a request
in a step is committed before that step is.

A forward pass needs no mask, choosing its tokens does. A device that asks in between has the masks made by the host
while it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from asyncllm.request import Request

__all__ = ["LateMasks"]

_Ints = npt.NDArray[np.int32]


class LateMasks(Mapping[int, _Ints]):
    """A mask for each sample of a constrained request; which samples those are is known at once.

    Args:
        requests: the constrained requests, by place among the step's samples.
    """

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self._requests = requests
        self._masks: dict[int, _Ints] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[int]:
        return iter(self._requests)

    def __getitem__(self, sample: int) -> _Ints:
        if sample not in self._masks:
            request = self._requests[sample]
            if request.constraint is None:
                raise KeyError(sample)
            self._masks[sample] = request.constraint.mask(request.generated)
        return self._masks[sample]

    def __deepcopy__(self, memo: dict[int, object]) -> dict[int, _Ints]:
        return {sample: self[sample].copy() for sample in self}
