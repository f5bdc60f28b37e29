"""JSON schemas across the keywords, each with values that it takes and values that it does not.

Runs in the tests. Owns nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

__all__ = ["SCHEMAS", "SchemaCase"]


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema.

    Args:
        schema: the schema.
        valid: values that it takes.
        invalid: values that it does not.
    """

    schema: dict[str, Any]
    valid: tuple[object, ...]
    invalid: tuple[object, ...]


def _object(properties: dict[str, Any], *required: str, **more: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
        **more,
    }


_TEXT: Final[dict[str, Any]] = {"type": "string"}
_SHORT: Final[dict[str, Any]] = {"type": "string", "maxLength": 8}
_DIGIT: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": 9}
_TREE: Final[dict[str, Any]] = {
    "$defs": {"node": _object({"value": _DIGIT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})},
    "$ref": "#/$defs/node",
}

SCHEMAS: Final[dict[str, SchemaCase]] = {
    "null": SchemaCase({"type": "null"}, (None,), (0, "null", False)),
    "boolean": SchemaCase({"type": "boolean"}, (True, False), (1, "true", None)),
    "integer": SchemaCase({"type": "integer"}, (0, -7, 123456), (1.5, "1", True)),
    "number": SchemaCase({"type": "number"}, (0, -7.25, 1e-5), ("1", None)),
    "string": SchemaCase(_TEXT, ("", "a\nb", 'quote " and \\', "héé"), (1, None)),
    "types": SchemaCase({"type": ["string", "null"]}, ("a", None), (1, False)),
    "const text": SchemaCase({"const": "yes"}, ("yes",), ("no", "", 1)),
    "const object": SchemaCase({"const": {"a": [1, None]}}, ({"a": [1, None]},), ({"a": [1]}, {})),
    "enum": SchemaCase({"enum": ["red", "green", 3, None]}, ("red", 3, None), ("blue", 4)),
    "minimum": SchemaCase({"type": "integer", "minimum": 18}, (18, 19, 4000), (17, 0, -20)),
    "maximum": SchemaCase({"type": "integer", "maximum": -3}, (-3, -400), (-2, 0, 5)),
    "range": SchemaCase({"type": "integer", "minimum": 95, "maximum": 105}, (95, 100, 105), (94, 106, 1000)),
    "exclusive": SchemaCase({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, (1, 2), (0, 3, -1)),
    "number range": SchemaCase({"type": "number", "minimum": 0, "maximum": 1}, (0, 0.5, 1), (-0.1, 1.01, 2)),
    "multipleOf": SchemaCase({"type": "integer", "multipleOf": 5}, (0, 15, -20), (1, 14)),
    "minLength": SchemaCase({"type": "string", "minLength": 3}, ("abc", "abcd"), ("", "ab")),
    "maxLength": SchemaCase({"type": "string", "maxLength": 3}, ("", "abc", "äöü"), ("abcd",)),
    "pattern": SchemaCase({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, ("AB-123",), ("ab-123", "AB-1234", "")),
    "open pattern": SchemaCase({"type": "string", "pattern": "a[0-9]+b"}, ("a1b", "xxa22byy"), ("ab", "")),
    "format date": SchemaCase({"type": "string", "format": "date"}, ("2024-02-29",), ("yesterday", "2024-2-9")),
    "format date-time": SchemaCase(
        {"type": "string", "format": "date-time"}, ("2024-02-29T12:30:00Z",), ("2024-02-29", "noon")
    ),
    "format uuid": SchemaCase(
        {"type": "string", "format": "uuid"}, ("123e4567-e89b-12d3-a456-426614174000",), ("123", "")
    ),
    "format email": SchemaCase({"type": "string", "format": "email"}, ("a@example.org",), ("nobody", "")),
    "format ipv4": SchemaCase({"type": "string", "format": "ipv4"}, ("127.0.0.1",), ("1.2.3", "a.b.c.d")),
    "object": SchemaCase(
        _object({"name": _TEXT, "age": _DIGIT}),
        ({"name": "a", "age": 3},),
        ({"name": "a"}, {"name": 1, "age": 3}, {"name": "a", "age": 3, "more": 1}, []),
    ),
    "optional": SchemaCase(
        _object({"a": _DIGIT, "b": _DIGIT, "c": _DIGIT}, "b"),
        ({"b": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}),
        ({}, {"a": 1}, {"a": 1, "c": 2}),
    ),
    "all optional": SchemaCase(
        {"type": "object", "properties": {"a": _DIGIT, "b": _DIGIT}, "additionalProperties": False},
        ({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}),
        ({"c": 1}, {"a": "1"}),
    ),
    "additionalProperties": SchemaCase(
        {"type": "object", "properties": {"a": _DIGIT}, "additionalProperties": {"type": "boolean"}, "required": ["a"]},
        ({"a": 1}, {"a": 1, "x": True}),
        ({"x": True}, {"a": 1, "x": 1}),
    ),
    "required unnamed": SchemaCase(
        {"type": "object", "required": ["x"], "additionalProperties": _DIGIT},
        ({"x": 1}, {"x": 1, "y": 2}),
        ({}, {"y": 1}),
    ),
    "patternProperties": SchemaCase(
        {"type": "object", "patternProperties": {"^n_": _DIGIT}, "additionalProperties": False},
        ({}, {"n_a": 1}),
        ({"x": 1}, {"n_a": "1"}),
    ),
    "odd names": SchemaCase(
        _object({'a "b"\n': _DIGIT, "": _DIGIT, "ключ": _DIGIT}), ({'a "b"\n': 1, "": 2, "ключ": 3},), ({"": 1}, {})
    ),
    "array": SchemaCase({"type": "array", "items": _DIGIT}, ([], [1], [1, 2, 3]), ([10], ["1"], {})),
    "minItems": SchemaCase({"type": "array", "items": _DIGIT, "minItems": 2}, ([1, 2], [1, 2, 3]), ([], [1])),
    "maxItems": SchemaCase({"type": "array", "items": _DIGIT, "maxItems": 2}, ([], [1, 2]), ([1, 2, 3],)),
    "prefixItems": SchemaCase(
        {"type": "array", "prefixItems": [_DIGIT, _TEXT], "items": False, "minItems": 2}, ([1, "a"],), (["a", 1], [1])
    ),
    "tuple and rest": SchemaCase(
        {"type": "array", "prefixItems": [_TEXT], "items": _DIGIT, "minItems": 1},
        (["a"], ["a", 1, 2]),
        ([1], ["a", "b"]),
    ),
    "anyOf": SchemaCase({"anyOf": [_DIGIT, {"type": "boolean"}]}, (1, True), ("1", 11)),
    "oneOf": SchemaCase(
        {"oneOf": [_object({"kind": {"const": "a"}, "x": _DIGIT}), _object({"kind": {"const": "b"}})]},
        ({"kind": "a", "x": 1}, {"kind": "b"}),
        ({"kind": "c"}, {"kind": "b", "x": 1}),
    ),
    "allOf": SchemaCase({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, (3, 4, 5), (2, 6)),
    "ref": SchemaCase(
        {"$defs": {"point": _object({"x": _DIGIT, "y": _DIGIT})}, **_object({"a": {"$ref": "#/$defs/point"}})},
        ({"a": {"x": 1, "y": 2}},),
        ({"a": {"x": 1}}, {"a": 1}),
    ),
    "recursion": SchemaCase(
        _TREE,
        ({"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}),
        ({"value": 1}, {"value": 1, "next": 2}),
    ),
    "nested": SchemaCase(
        _object(
            {
                "people": {
                    "type": "array",
                    "items": _object({"name": _SHORT, "tags": {"type": "array", "items": _SHORT}}),
                }
            }
        ),
        ({"people": []}, {"people": [{"name": "a", "tags": ["b", "c"]}]}),
        ({"people": [{"name": "a"}]}, {"people": None}),
    ),
    "minProperties": SchemaCase(
        {"type": "object", "additionalProperties": _DIGIT, "minProperties": 2, "maxProperties": 3},
        ({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
        ({}, {"a": 1}, {"a": 1, "b": 2, "c": 3, "d": 4}),
    ),
    "definitions": SchemaCase(
        {"definitions": {"d": _DIGIT}, "type": "array", "items": {"$ref": "#/definitions/d"}, "maxItems": 3},
        ([], [1, 2]),
        ([10], ["1"]),
    ),
    "ref to itself": SchemaCase(
        _object({"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        ({"child": None}, {"child": {"child": None}}),
        ({"child": 1}, {}),
    ),
    "anyOf beside properties": SchemaCase(
        {
            "type": "object",
            "properties": {"a": _DIGIT, "b": _DIGIT},
            "additionalProperties": False,
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}),
        ({}, {"c": 1}),
    ),
    "annotations": SchemaCase(
        {"title": "t", "description": "d", "default": 3, "examples": [1], "deprecated": True, **_DIGIT},
        (1, 9),
        (10, "1"),
    ),
    "enum of lists": SchemaCase({"enum": [[1, 2], {"a": None}]}, ([1, 2], {"a": None}), ([1], {})),
    "format time": SchemaCase({"type": "string", "format": "time"}, ("12:30:00Z",), ("noon", "12")),
    "format ipv6": SchemaCase({"type": "string", "format": "ipv6"}, ("::1", "fe80::1"), ("1.2.3.4", "x")),
    "anything": SchemaCase({}, (1, "a", None, [1, {"a": []}], {"x": {}}), ()),
    "any object": SchemaCase({"type": "object"}, ({}, {"a": 1}), (1, [])),
}
"""By name; "anything" takes every value."""
