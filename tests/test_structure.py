"""The ways in which a caller says what a text must be."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from asyncllm import InvalidRequestError, SamplingParams
from asyncllm.structure import Structure

if TYPE_CHECKING:
    from collections.abc import Iterator


class Person(pydantic.BaseModel):
    """A schema as users write one."""

    name: str
    age: int


class NoSchema:
    """What cannot be told as a schema, as pydantic models with fields of arbitrary types."""

    @classmethod
    def model_json_schema(cls) -> object:
        """Raise."""
        raise RuntimeError("no schema for you")


def test_a_schema_is_a_mapping_a_pydantic_class_or_json_and_all_are_the_same() -> None:
    schema = Person.model_json_schema()
    before = json.dumps(schema)
    structures = {SamplingParams(json_schema=given).structure for given in (schema, Person, json.dumps(schema))}
    assert len(structures) == 1
    (structure,) = structures
    assert structure is not None
    assert structure.kind == "json_schema"
    assert json.loads(structure.source) == schema
    assert json.dumps(schema) == before


def test_properties_stay_in_the_order_of_the_schema() -> None:
    structure = SamplingParams(json_schema={"properties": {"z": {}, "a": {}}}).structure
    assert structure is not None
    assert list(json.loads(structure.source)["properties"]) == ["z", "a"]


def test_params_with_a_structure_can_be_replaced_hashed_and_compared() -> None:
    params = SamplingParams(choices=["a", "b"], max_tokens=3)
    again = dataclasses.replace(params, max_tokens=4)
    assert again.structure == params.structure == Structure("choices", '["a", "b"]')
    assert {params, SamplingParams(choices=iter(("a", "b")), max_tokens=3)} == {params}
    schema = SamplingParams(json_schema={"type": "null"})
    assert dataclasses.replace(schema, seed=1).structure == schema.structure


def test_without_one_there_is_none() -> None:
    assert SamplingParams().structure is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"regex": "a", "choices": ["a"]}, "regex and choices"),
        ({"json_schema": {}, "grammar": "start: A"}, "json_schema and grammar"),
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": NoSchema}, "json_schema.*NoSchema.*no schema for you"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema"),
        ({"json_schema": {"const": float("nan")}}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"regex": 1}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"grammar": b"start: A"}, "grammar"),
        ({"choices": []}, "choices"),
        ({"choices": "ab"}, "choices"),
        ({"choices": ["a", ""]}, "choices"),
        ({"choices": ["a", 1]}, "choices"),
        ({"choices": 5}, "choices"),
        ({"choices": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_no_structure_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        SamplingParams(**fields)


def test_choices_are_read_once() -> None:
    def texts() -> Iterator[str]:
        yield "a"

    params = SamplingParams(choices=texts())
    assert params.structure == params.structure == Structure("choices", '["a"]')
