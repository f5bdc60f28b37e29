"""Whether tokens were drawn from a distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["assert_drawn_from"]


def assert_drawn_from(expected: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> None:
    """Compare how often each token came with how often it should, both [vocab], by a chi-square test.

    Tokens of fewer than five expected draws are taken together; what cannot come must not have come.
    """
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert degrees >= 1, "the case must leave something to chance"
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5
