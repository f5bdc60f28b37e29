"""Random workloads for a `Driver`: requests that share prefixes, arrive, pause, leave, and end on their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

from asyncllm.request import Request, RequestState
from helpers.driver import DriverSettings, make_request

if TYPE_CHECKING:
    from helpers.driver import Driver

__all__ = ["Answers", "Job", "bounds_of_runs", "check_answers", "jobs", "run_workload"]

Answers = Callable[[Sequence[int], int], list[int]]
"""What a model says to a prompt, whatever runs beside it: (prompt, max_tokens) to tokens."""

_FAMILIES: Final = [[10 + family] * 3 + list(range(30)) for family in range(3)]
_TURNS: Final = 40  # after which everybody has arrived, paused and left


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload.

    Args:
        prompt, max_tokens: the request's.
        arrives: turns before it is submitted.
        leaves: turns after that at which it is cancelled.
        pauses: turns after that at which it is paused, and turns after which it is resumed.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int
    leaves: int | None
    pauses: tuple[int, int] | None


@st.composite
def jobs(draw: st.DrawFn, answers: Answers) -> Job:
    """Draw prompts of few families, so that prefixes meet; some go on with what the model would say."""
    prompt = _FAMILIES[draw(st.integers(0, 2))][: draw(st.integers(1, 20))]
    said = draw(st.sampled_from([0, 0, 0, 1, 4, 7]))
    prompt = [*prompt, *answers(prompt, said)] if said else prompt
    return Job(
        prompt=(*prompt, *draw(st.sampled_from([(), (), (99,), (98, 97)]))),
        max_tokens=draw(st.integers(1, 14)),
        arrives=draw(st.integers(0, 12)),
        leaves=draw(st.none() | st.integers(0, 10)),
        pauses=draw(st.none() | st.tuples(st.integers(1, 6), st.integers(0, 6))),
    )


bounds_of_runs: Final = st.builds(
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
"""Small pools with pages of all kinds of sizes."""


def run_workload(driver: Driver, bounds: DriverSettings, workload: Sequence[Job]) -> list[tuple[Job, Request]]:
    """Run the jobs that fit the pool until nothing is left; return them with their requests."""
    pool_tokens = min(bounds.num_pages, bounds.max_pages_per_request) * bounds.page_size
    pairs = [
        (job, make_request(str(place), job.prompt, job.max_tokens, sequence=place))
        for place, job in enumerate(workload)
        if len(job.prompt) + job.max_tokens - 1 <= pool_tokens
    ]
    turn, busy = 0, True
    while busy or turn < _TURNS:
        for job, request in pairs:
            _act(driver, job, request, turn - job.arrives)
        busy = driver.turn()
        turn += 1
    driver.run()
    return pairs


def _act(driver: Driver, job: Job, request: Request, turn: int) -> None:
    """Do what a job does so many turns after its arrival."""
    if turn == 0:
        driver.submit(request)
    if turn == job.leaves:
        driver.end(request)
    if job.pauses is not None:
        if turn == job.pauses[0] and request.state is RequestState.DECODING:
            driver.scheduler.pause(request)
        if turn >= sum(job.pauses) and request.state is RequestState.PAUSED:
            driver.scheduler.resume(request)


def check_answers(pairs: Sequence[tuple[Job, Request]], answers: Answers) -> None:
    """Check that each request got its own tokens: all of them, or, where it left, the first ones."""
    for job, request in pairs:
        whole = answers(job.prompt, job.max_tokens)
        assert request.state is RequestState.FINISHED
        assert request.generated == whole[: len(request.generated)]
        if job.leaves is None:
            assert request.generated == whole
