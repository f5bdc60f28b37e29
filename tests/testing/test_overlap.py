"""Overlap changes nothing: on a device that lags as much as it may, tokens are those of one step after another.

Invariants 2, 3 and 6 of the design, on the scripted model; 2 and 3 are checked by `helpers.driver` after every move.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.testing import HashedTokens
from asyncllm.testing.faults import StepFaults
from asyncllm.testing.paged_tokens import PagedTokens
from asyncllm.testing.script import HashScript
from asyncllm.testing.scripted_model import ScriptedModel, ScriptedRunner
from helpers.driver import Driver, DriverSettings
from helpers.lagging_device import LaggingRunner
from helpers.workloads import Job, bounds_of_runs, check_answers, jobs, run_workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

EOS = ScriptedModel.end_token_id
HASHED = HashedTokens(eos_one_in=9)


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedPoison:
    """Poisons the scripted model's pages, in the lagging device's order."""

    runner: LaggingRunner
    tokens: PagedTokens

    def pages(self, pages: npt.NDArray[np.int64]) -> None:
        """See `Poison`."""
        self.runner.device.do_in_order(lambda: self.tokens.poison_pages(pages))

    def slots(self, slots: npt.NDArray[np.int64]) -> None:
        """See `Poison`."""
        self.runner.device.do_in_order(lambda: self.tokens.poison_slots(slots))


@contextlib.contextmanager
def lagging_driver(bounds: DriverSettings, *, overlap: bool) -> Iterator[Driver]:
    tokens = PagedTokens(
        num_pages=bounds.num_pages,
        page_size=bounds.page_size,
        num_slots=bounds.num_slots,
        max_pages_per_request=bounds.max_pages_per_request,
    )
    runner = LaggingRunner(ScriptedRunner(tokens, HashScript(HASHED), StepFaults()))
    with contextlib.closing(runner):
        yield Driver(runner, bounds, overlap=overlap, eos_token_ids={EOS}, poison=ScriptedPoison(runner, tokens))


def answers(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the model says, by the function alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(HASHED(tokens))
    return tokens[len(prompt) :]


@settings(max_examples=120)
@given(bounds=bounds_of_runs, workload=st.lists(jobs(answers), min_size=1, max_size=9), overlap=st.booleans())
def test_every_request_gets_its_own_tokens_and_gives_everything_back(
    bounds: DriverSettings, workload: list[Job], overlap: bool
) -> None:
    with lagging_driver(bounds, overlap=overlap) as driver:
        check_answers(run_workload(driver, bounds, workload), answers)
        driver.check_all_is_back()
