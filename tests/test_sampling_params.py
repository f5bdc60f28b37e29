"""Values of any type that says the same are kept as Python's own."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from asyncllm.errors import InvalidRequestError
from asyncllm.intake import RequestOptions
from asyncllm.sampling_params import SamplingParams

INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
IDS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("number", [np.int64(5), np.uint8(5), np.array(5)], ids=repr)
def test_integers_of_any_type_are_kept_as_ints(name: str, number: Any) -> None:  # noqa: ANN401  # what is tested
    params = SamplingParams(**{name: number})
    assert params == SamplingParams(**{name: 5})  # type: ignore[arg-type]  # names of fields
    assert type(getattr(params, name)) is int


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2)], ids=repr)
def test_real_numbers_of_any_type_are_kept_as_floats(name: str, number: Any) -> None:  # noqa: ANN401  # the same
    params = SamplingParams(**{name: number})
    assert params == SamplingParams(**{name: 0.5})  # type: ignore[arg-type]  # names of fields
    assert type(getattr(params, name)) is float
    whole = SamplingParams(**{name: np.int8(1)})  # type: ignore[arg-type]  # names of fields
    assert type(getattr(whole, name)) is float


def test_ids_and_biases_of_any_type_are_kept_as_pythons_own() -> None:
    ids = np.array([3, 1], dtype=np.uint16)
    params = SamplingParams(
        stop_token_ids=ids,
        allowed_token_ids=ids,
        banned_token_ids=list(ids),
        logit_bias={np.int32(7): np.float32(0.5), 8: Fraction(-1, 2)},  # type: ignore[arg-type]  # what is tested
    )
    assert all(getattr(params, name) == (3, 1) for name in IDS)
    assert params.biases == ((7, 0.5), (8, -0.5))
    kept = [*params.stop_ids, *(params.allowed_ids or ()), *(params.banned_ids or ()), params.biases[0][0]]
    assert {type(each) for each in kept} == {int}
    assert {type(bias) for _, bias in params.biases} == {float}


def test_request_options_of_any_type_are_kept_as_pythons_own() -> None:
    given: dict[str, Any] = {"timeout": np.float32(0.5), "priority": np.int64(-3), "buffer_tokens": np.int64(4)}
    options = RequestOptions(**given)
    assert options == RequestOptions(timeout=0.5, priority=-3, buffer_tokens=4)
    assert [type(each) for each in dataclasses.astuple(options)[1:4]] == [float, int, int]


@pytest.mark.parametrize("name", [*INTEGERS, *REALS, "timeout", "priority", "buffer_tokens"])
@pytest.mark.parametrize("value", [True, np.bool_(True), "5", 1j, np.array([5, 5]), b"5"], ids=repr)
def test_what_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequestError, match=f"^{name} must be "):
        SamplingParams(**given) if name in SamplingParams.__dataclass_fields__ else RequestOptions(**given)


@pytest.mark.parametrize("name", [*INTEGERS, "buffer_tokens"])
@pytest.mark.parametrize("value", [5.0, np.float64(5.0), Fraction(5)], ids=repr)
def test_a_whole_number_that_is_no_integer_is_refused(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequestError, match=f"^{name} must be an integer"):
        SamplingParams(**given) if name in SamplingParams.__dataclass_fields__ else RequestOptions(**given)


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), 1e39, np.float64(1e39), np.longdouble(1e39), Fraction(10) ** 400],
    ids=lambda v: type(v).__name__,
)
def test_numbers_beyond_float32_are_refused_with_the_bound(name: str, value: Any) -> None:  # noqa: ANN401  # the same
    with pytest.raises(InvalidRequestError, match=f"^{name} must be .* of at most 3.40282e"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [np.float32("nan"), np.float64("inf"), -np.float16("inf")], ids=repr)
@pytest.mark.parametrize("name", REALS)
def test_numbers_that_are_not_finite_are_refused(name: str, value: Any) -> None:  # noqa: ANN401  # the same
    with pytest.raises(InvalidRequestError, match=f"^{name} must be .*not -?(nan|inf)$"):
        SamplingParams(**{name: value})
