"""A soak of a minute: nothing is lost, leaked or mixed up under callers that leave, lag, time out and ask wrongly."""

from __future__ import annotations

import asyncio
import warnings

from benchmarks.soak import WAYS_TO_LEAVE, soak


def test_a_load_of_callers_that_behave_badly_leaves_nothing_and_mixes_up_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of streams that are dropped
        report = asyncio.run(soak("scripted", requests=9000, seconds=None, users=60, wave=300, seed=3, checks=True))
    assert report.wrong == []
    assert report.leaks == []
    assert report.requests == 9000
    happened = {*report.outcomes, *report.faults}
    assert happened >= {"read", "read slowly", "refused", *(f"left by {way}" for way in WAYS_TO_LEAVE)}
    assert happened & {"a step raises", "no memory", "not finite"}
