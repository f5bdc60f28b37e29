"""A request moves only along its table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from asyncllm.request import LEGAL_MOVES, Request, RequestState
from helpers.scheduling import make_request

# Invariant 7, as the design writes it.
TABLE = {
    "PREPARING": "WAITING FINISHED",
    "WAITING": "PREFILLING FINISHED",
    "PREFILLING": "DECODING ENDING FINISHED",
    "DECODING": "PREFILLING PAUSED ENDING FINISHED",  # back, where a step failed
    "PAUSED": "DECODING PREEMPTED FINISHED",
    "ENDING": "FINISHED PREEMPTED",
    "PREEMPTED": "WAITING",
    "FINISHED": "",
}


def test_the_table_of_moves_is_the_designs() -> None:
    written = {RequestState[a]: {RequestState[b] for b in to.split()} for a, to in TABLE.items()}
    assert written == LEGAL_MOVES


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestState, RequestState)))
def test_only_legal_moves_are_made(before: RequestState, after: RequestState) -> None:
    request = make_request(0, 3)
    request.state = before
    if after.name in TABLE[before.name].split():
        request.move(after)
        assert request.state is after
    else:
        with pytest.raises(RuntimeError, match=f"from {before.value} to {after.value}"):
            request.move(after)
        assert request.state is before


def test_the_worst_case_does_not_count_the_last_sampled_token() -> None:
    assert make_request(0, 5, max_tokens=1).worst_case_tokens == 5
    assert make_request(0, 5, max_tokens=8).worst_case_tokens == 12


def test_tokens_are_the_prompt_and_what_was_generated() -> None:
    request = make_request(0, [3, 1, 2])
    assert request.tokens() is request.prompt
    request.generated += [8, 9]
    assert request.tokens().tolist() == [3, 1, 2, 8, 9]
    assert request.tokens().dtype == np.int32
    assert request.prompt.tolist() == [3, 1, 2]


def test_a_request_is_known_by_itself_not_by_its_values() -> None:
    twins: list[Request] = [make_request(0, [1]), make_request(0, [1])]
    assert len(set(twins)) == 2
