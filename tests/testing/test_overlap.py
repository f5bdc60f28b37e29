"""Overlap changes nothing: on a device that lags as much as it may, tokens are those of one step after another.

Invariants 2, 3 and 6 of the design; the checks of 2 and 3 are in `helpers.driver`, made after every move.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.request import Request, RequestState
from asyncllm.testing import HashedTokens
from asyncllm.testing.faults import StepFaults
from asyncllm.testing.paged_tokens import PagedTokens
from asyncllm.testing.script import HashScript
from asyncllm.testing.scripted_model import ScriptedModel, ScriptedRunner
from helpers.driver import Driver, DriverSettings, make_request
from helpers.lagging_device import LaggingRunner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

EOS = ScriptedModel.end_token_id


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
def lagging_driver(bounds: DriverSettings, hashed: HashedTokens, *, overlap: bool = True) -> Iterator[Driver]:
    tokens = PagedTokens(
        num_pages=bounds.num_pages,
        page_size=bounds.page_size,
        num_slots=bounds.num_slots,
        max_pages_per_request=bounds.max_pages_per_request,
    )
    runner = LaggingRunner(ScriptedRunner(tokens, HashScript(hashed), StepFaults()))
    poison = ScriptedPoison(runner, tokens)
    with contextlib.closing(runner):
        yield Driver(runner, bounds, overlap=overlap, eos_token_ids={EOS}, poison=poison)


def expected_tokens(hashed: HashedTokens, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request generates, whatever runs beside it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(hashed(tokens))
    return tokens[len(prompt) :]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int  # turns before it is submitted
    leaves: int | None  # turns after that at which it is cancelled
    pauses: tuple[int, int] | None  # turns after that at which it is paused and resumed


HASHED = HashedTokens(eos_one_in=9)
FAMILIES = [[10 + family] * 3 + list(range(30)) for family in range(3)]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Prompts of few families, so that prefixes meet; some go on with what the model would say."""
    prompt = FAMILIES[draw(st.integers(0, 2))][: draw(st.integers(1, 20))]
    said = draw(st.sampled_from([0, 0, 0, 1, 4, 7]))
    prompt = [*prompt, *expected_tokens(HASHED, prompt, said)] if said else prompt
    return Job(
        prompt=(*prompt, *draw(st.sampled_from([(), (), (99,), (98, 97)]))),
        max_tokens=draw(st.integers(1, 14)),
        arrives=draw(st.integers(0, 12)),
        leaves=draw(st.none() | st.integers(0, 10)),
        pauses=draw(st.none() | st.tuples(st.integers(1, 6), st.integers(0, 6))),
    )


bounds_of_runs = st.builds(
    DriverSettings,
    num_pages=st.sampled_from([16, 24, 40]),
    page_size=st.sampled_from([1, 3, 4, 16]),
    num_slots=st.integers(1, 5),
    max_pages_per_request=st.just(48),
    step_token_budget=st.sampled_from([8, 13, 40]),
    min_prefill_chunk=st.integers(1, 3),
    prefix_cache=st.sampled_from(["radix", "none"]),
    share_inflight_prefixes=st.booleans(),
)


def run_workload(driver: Driver, bounds: DriverSettings, workload: Sequence[Job]) -> list[tuple[Job, Request]]:
    """Run the jobs that fit, each arriving, pausing and leaving when it says; everything ends."""
    pool_tokens = bounds.num_pages * bounds.page_size
    pairs = [
        (job, make_request(str(place), job.prompt, job.max_tokens, sequence=place))
        for place, job in enumerate(workload)
        if len(job.prompt) + job.max_tokens - 1 <= pool_tokens
    ]
    turn, busy = 0, True
    while busy or turn < 40:
        for job, request in pairs:
            if turn == job.arrives:
                driver.submit(request)
            if job.leaves is not None and turn == job.arrives + job.leaves:
                driver.end(request)
            if job.pauses is not None:
                if turn == job.arrives + job.pauses[0] and request.state is RequestState.DECODING:
                    driver.scheduler.pause(request)
                if turn >= job.arrives + sum(job.pauses) and request.state is RequestState.PAUSED:
                    driver.scheduler.resume(request)
        busy = driver.turn()
        turn += 1
    driver.run()
    return pairs


@settings(max_examples=120)
@given(bounds=bounds_of_runs, workload=st.lists(jobs(), min_size=1, max_size=9), overlap=st.booleans())
def test_every_request_gets_its_own_tokens_and_gives_everything_back(
    bounds: DriverSettings, workload: list[Job], overlap: bool
) -> None:
    with lagging_driver(bounds, HASHED, overlap=overlap) as driver:
        for job, request in run_workload(driver, bounds, workload):
            whole = expected_tokens(HASHED, job.prompt, job.max_tokens)
            assert request.state is RequestState.FINISHED
            assert request.generated == whole[: len(request.generated)]
            if job.leaves is None:
                assert request.generated == whole
        driver.check_all_is_back()
