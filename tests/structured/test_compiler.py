"""Which tokens a structure lets follow: what it takes, where it may end, and what it costs to have another."""

from __future__ import annotations

import functools
import json
import random
import threading
from typing import TYPE_CHECKING, Final

import jsonschema
import numpy as np
import pytest

from asyncllm.errors import InvalidRequestError
from asyncllm.structure import Structure
from asyncllm.structured import compiler as compiler_module
from asyncllm.structured.compiler import StructureCompiler
from asyncllm.testing.tokenizer import make_tokenizer
from asyncllm.testing.vocabulary import EOS_TOKEN_ID, VOCAB_SIZE
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.tokenizer import Tokenizer
from helpers.json_schemas import SCHEMAS
from helpers.tiny_tokenizers import SPECIALS, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.structured.grammar_constraint import GrammarConstraint

OTHER_EOS: Final = 2  # a byte that no text here has
UNNAMED: Final = 40  # rows of the model without a token
each_schema: Final = pytest.mark.parametrize("name", list(SCHEMAS))


@functools.cache
def byte_compiler() -> StructureCompiler:
    """Return a compiler for a vocabulary of bytes, with two ids that end a text."""
    return StructureCompiler(make_tokenizer(), eos_token_ids={EOS_TOKEN_ID, OTHER_EOS}, vocab_size=VOCAB_SIZE + UNNAMED)


def allowed(constraint: GrammarConstraint, generated: Sequence[int]) -> set[int]:
    """Return the ids that may follow."""
    mask = constraint.mask(generated)
    assert constraint.failure is None
    assert mask.shape == (-(-(VOCAB_SIZE + UNNAMED) // 32),)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def takes(structure: Structure, text: str) -> bool:
    """Whether a structure lets a text be written byte by byte and ended there."""
    constraint, ids = byte_compiler().compile(structure), list(text.encode())
    for place, token in enumerate(ids):
        if token not in allowed(constraint, ids[:place]):
            return False
    return EOS_TOKEN_ID in allowed(constraint, ids)


def schema(name: str) -> Structure:
    """Return the structure of one of `SCHEMAS`."""
    return Structure("json_schema", json.dumps(SCHEMAS[name].schema))


@each_schema
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["dense", "spaced"])
def test_a_schema_takes_the_values_that_fit_it_and_no_others(name: str, separators: tuple[str, str]) -> None:
    case = SCHEMAS[name]
    for value in case.valid:
        assert takes(schema(name), json.dumps(value, separators=separators, ensure_ascii=False)), value
    for value in case.invalid:
        assert not takes(schema(name), json.dumps(value, separators=separators, ensure_ascii=False)), value


@each_schema
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "gemma"])
def test_whatever_is_written_by_the_masks_parses_and_fits(name: str, kind: str) -> None:
    """Random allowed tokens of vocabularies with long tokens, spaces before words, and byte fallback."""
    tokenizer = _tiny(kind)
    eos = tokenizer.eos_token_ids
    constraint = _tiny_compiler(kind).compile(schema(name))
    draw, ids, before = random.Random(name), list[int](), tokenizer.encode("ab")
    while len(ids) < 60:
        mask = constraint.mask(ids)
        assert constraint.failure is None
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert choices, "there is always a way on"
        assert not set(tokenizer.control_token_ids) - eos & set(choices)
        if eos & set(choices) and (draw.random() < 0.5 or len(choices) == len(eos)):
            break
        ids.append(draw.choice([token for token in choices if token not in eos]))
    else:
        return  # a text that has no end by itself, such as a string
    detokenizer = Detokenizer(tokenizer, before, skip_special_tokens=True)
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    jsonschema.validate(json.loads(text), SCHEMAS[name].schema, jsonschema.Draft202012Validator)


@functools.cache
def _tiny(kind: str) -> Tokenizer:
    return Tokenizer(tiny_tokenizer(kind), eos_token_ids=[SPECIALS.index("</s>")], bos_token_id=1)


@functools.cache
def _tiny_compiler(kind: str) -> StructureCompiler:
    return StructureCompiler(_tiny(kind), eos_token_ids=_tiny(kind).eos_token_ids, vocab_size=_tiny(kind).vocab_size)


def test_every_id_that_ends_a_text_is_allowed_where_the_structure_is_complete_and_only_there() -> None:
    ids, ends = list(b'{"x": 1}'), {EOS_TOKEN_ID, OTHER_EOS}
    constraint = byte_compiler().compile(schema("required unnamed"))
    found = [allowed(constraint, ids[:place]) & ends for place in range(len(ids) + 1)]
    assert found == [set()] * len(ids) + [ends]


def test_a_number_may_end_and_may_go_on() -> None:
    constraint = byte_compiler().compile(Structure("regex", "[0-9]{1,2}"))
    digits = set(b"0123456789")
    assert allowed(constraint, []) == digits
    assert allowed(constraint, list(b"7")) == digits | {EOS_TOKEN_ID, OTHER_EOS}
    assert allowed(constraint, list(b"71")) == {EOS_TOKEN_ID, OTHER_EOS}


def test_no_special_token_and_no_row_without_a_token_is_ever_part_of_a_text() -> None:
    constraint = byte_compiler().compile(Structure("regex", "(?s:.*)"))
    some = allowed(constraint, list("é<|user|>".encode()))
    assert some - {EOS_TOKEN_ID} <= set(range(256))
    assert ord("<") in some


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (Structure("regex", r"(a|b)+\d"), ["a1", "abba9"], ["1", "ab", "c1", "a1 "]),
        (Structure("regex", r"^a|b$"), ["a", "b"], ["ab", "", "xa"]),
        (Structure("choices", '["red", "reddish", "it\'s \\"é\\""]'), ["red", "reddish", 'it\'s "é"'], ["re", "blue"]),
        (Structure("grammar", 'start: "(" start ")" | "x"'), ["x", "((x))"], ["(x", "", "xx"]),
        (Structure("grammar", 'root ::= "(" root ")" | "x"'), ["x", "((x))"], ["(x", "", "xx"]),
        (
            Structure("grammar", 'start: "<" %json {"type": "integer", "multipleOf": 5} ">"'),
            ["<10>", "<0>"],
            ["<3>", "10"],
        ),
    ],
    ids=["regex", "regex with anchors", "choices", "Lark", "GBNF", "Lark with a schema"],
)
def test_the_other_ways_to_say_it(structure: Structure, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(structure, text)] == []
    assert [text for text in bad if takes(structure, text)] == []


@pytest.mark.parametrize(
    ("structure", "named"),
    [
        (Structure("json_schema", '{"not": {}}'), "not"),
        (Structure("json_schema", '{"type": "strin"}'), "strin"),
        (Structure("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Structure("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (Structure("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum"),
        (Structure("json_schema", '{"pattern": "["}'), "regex"),
        (Structure("json_schema", '{"anyOf": [{}, {"multipleOf": 9999991}]}'), "multipleOf .*100000.* not 9999991"),
        (Structure("json_schema", '{"items": {"multipleOf": 1234.567}}'), "multipleOf .*100000.* not 1234.567"),
        (Structure("grammar", 'start: "a" %json{"multipleOf": 9999991}'), "multipleOf .*100000.* not 9999991"),
        (
            Structure(
                "grammar", 'start: %json {"type": "null"} | x\nx: %json\n {"items": [{"multipleOf": 1234.567}]} "b"'
            ),
            "multipleOf .*100000.* not 1234.567",
        ),
        (Structure("grammar", 'start: %json {"multipleOf": }'), "%json"),
        (Structure("regex", "[0-9"), "unclosed"),
        (Structure("regex", "(?=a)b"), "look-around"),
        (Structure("grammar", "start: missing"), "missing"),
        (Structure("grammar", "no grammar"), "Lark"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(structure: Structure, named: str) -> None:
    for refuse in (byte_compiler().check, byte_compiler().compile):
        with pytest.raises(InvalidRequestError, match=named) as caught:
            refuse(structure)
        assert str(caught.value).startswith(structure.kind)


@pytest.mark.parametrize("divisor", ["1000000", "3e5", "0.000001"])
def test_a_round_divisor_may_be_as_large_or_small_as_one_likes(divisor: str) -> None:
    byte_compiler().check(Structure("json_schema", f'{{"properties": {{"multipleOf": {{"multipleOf": {divisor}}}}}}}'))


def test_white_space_between_the_parts_has_a_bound() -> None:
    assert takes(schema("object"), '{\n  "name": "a",\n  "age": 3\n}')
    assert takes(schema("object"), "{" + " " * 20 + '"name": "a", "age": 3}')
    assert not takes(schema("object"), "{" + " " * 21 + '"name": "a", "age": 3}')


def test_requests_of_one_structure_do_not_touch_each_other() -> None:
    structure = Structure("choices", '["ab", "cd"]')
    first, second = byte_compiler().compile(structure), byte_compiler().compile(structure)
    assert allowed(first, list(b"a")) == {ord("b")}
    assert allowed(second, []) == {ord("a"), ord("c")}
    assert allowed(first, list(b"ab")) == {EOS_TOKEN_ID, OTHER_EOS}
    third = byte_compiler().compiled(structure)
    assert third is not None
    assert allowed(third, list(b"cd")) == {EOS_TOKEN_ID, OTHER_EOS}


def test_the_same_place_may_be_asked_for_twice() -> None:
    constraint = byte_compiler().compile(Structure("choices", '["ab"]'))
    for text in (b"", b"", b"a", b"a", b"ab", b"ab"):
        again = allowed(constraint, list(text))
    assert again == {EOS_TOKEN_ID, OTHER_EOS}


def test_a_structure_is_compiled_once_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_KEPT", 2)
    compiler = StructureCompiler(make_tokenizer(), eos_token_ids={EOS_TOKEN_ID}, vocab_size=VOCAB_SIZE)
    one, two, three = (Structure("choices", json.dumps([text])) for text in ("one", "two", "three"))
    assert compiler.compiled(one) is None
    compiler.compile(one)
    compiler.compile(two)
    assert compiler.compiled(one) is not None
    compiler.compile(three)
    assert compiler.compiled(two) is None, "the one that was used least lately goes"
    assert compiler.compiled(one) is not None
    assert compiler.compiled(three) is not None


def test_many_threads_may_compile_at_once() -> None:
    compiler = StructureCompiler(make_tokenizer(), eos_token_ids={EOS_TOKEN_ID}, vocab_size=VOCAB_SIZE)
    found: list[set[int]] = []

    def compile_some() -> None:
        for number in range(8):
            mask = compiler.compile(Structure("choices", json.dumps([str(number)]))).mask([])
            found.append(set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()))

    threads = [threading.Thread(target=compile_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(sorted, found)) == sorted([ord(str(number))] for number in range(8) for _ in range(4))


def test_a_text_that_does_not_keep_to_it_is_a_failure_that_says_so() -> None:
    constraint = byte_compiler().compile(Structure("choices", '["ab"]'))
    mask = constraint.mask(list(b"x"))
    assert constraint.failure is not None
    assert "structure" in constraint.failure
    assert mask.any(), "the device gets a row that it can sample from"
    assert constraint.mask(list(b"xy")).any()
