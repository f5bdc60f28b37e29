"""From a structure to what masks tokens, for one model.

Runs in any thread: quick checks and copies where a call is made, compiling on worker threads. Owns the compiled
structures. Invariant: what is kept is never advanced, requests get copies.

llguidance does the work. On 52 schemas (tests/helpers/json_schemas.py, both separators) it took every value that fits
and no other, and it names the keywords that it lacks; xgrammar took values that do not fit under three of them
(`allOf`, a `required` name without a property, `anyOf` beside properties) and refused some that do under four. A mask
takes 40 microseconds on average (4 where a state comes again) against 5, compiling 0.6 ms against 1.9, and it needs no
package beside it, where the other needs torch, triton and one more: 8 MB installed against 17 and these. What it
costs: the first structure of a model has the vocabulary read, 0.15 seconds for 50,000 tokens, in which the library
keeps Python's lock.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import functools
import json
import re
import threading
from typing import TYPE_CHECKING, Final

from asyncllm.errors import InvalidRequestError
from asyncllm.structured.grammar_constraint import GrammarConstraint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from llguidance import LLMatcher, LLTokenizer

    from asyncllm.structure import Structure
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["StructureCompiler"]

_KEPT: Final = 64
"""Compiled structures; each takes a few kilobytes, and more as it is used."""

# Between JSON's parts. Without a bound some models write white space for ever.
_WHITE_SPACE: Final = r"[ \n\t]{1,20}"

_LARGEST_DIVISOR: Final = 100_000
"""Digits of a `multipleOf` without zeros around them, as a number: each unit is a state, a kilobyte."""

_ANY_TEXT: Final = "\n"


class StructureCompiler:
    """The structures of one model's requests.

    Args:
        tokenizer: the model's.
        eos_token_ids: tokens that end a text, at least one: allowed where a structure may end, and only there.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, *, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocab_size = vocab_size
        self._checked = functools.lru_cache(maxsize=_KEPT)(_checked_grammar)
        self._compiled: collections.OrderedDict[Structure, LLMatcher] = collections.OrderedDict()
        self._compiled_lock = threading.Lock()  # held for O(1)
        self._vocabulary_lock = threading.Lock()  # held while the vocabulary is read
        self._own_tokenizer: LLTokenizer | None = None

    def check(self, structure: Structure) -> None:
        """Check a structure by itself: a millisecond for one of usual size, nothing for one that was seen lately.

        Raises:
            InvalidRequestError: says what is wrong with it.
        """
        self._checked(structure)

    def compiled(self, structure: Structure) -> GrammarConstraint | None:
        """Return a constraint if that takes no time to speak of; None if `compile` has work to do first."""
        with self._compiled_lock:
            matcher = self._compiled.get(structure)
            if matcher is None:
                return None
            self._compiled.move_to_end(structure)
            return self._constraint(matcher)

    def compile(self, structure: Structure) -> GrammarConstraint:
        """Return a constraint, compiled if need be; the first for a model reads the vocabulary too.

        Raises:
            InvalidRequestError: says what is wrong with the structure.
        """
        constraint = self.compiled(structure)
        if constraint is None:
            matcher = self._matcher(structure)
            constraint = self._constraint(matcher)
            self._keep(structure, matcher)
        return constraint

    def _constraint(self, matcher: LLMatcher) -> GrammarConstraint:
        return GrammarConstraint(matcher.deep_copy(), mask_words=-(-self._vocab_size // 32))

    def _matcher(self, structure: Structure) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer  # noqa: PLC0415  # only where a request asks for structure

        with self._vocabulary_lock:
            if self._own_tokenizer is None:
                self._own_tokenizer = LLTokenizer(
                    _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0]),  # type: ignore[arg-type]
                    eos_token=self._eos_token_ids,
                )
        limits = LLParserLimits(verbose_errors=False)  # errors are shown to the caller
        matcher = LLMatcher(self._own_tokenizer, self._checked(structure), log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequestError(f"{structure.kind} cannot be used: {matcher.get_error()}")
        return matcher

    def _keep(self, structure: Structure, matcher: LLMatcher) -> None:
        with self._compiled_lock:
            self._compiled[structure] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)


class _Vocabulary:
    """A tokenizer as llguidance asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        tokens = tokenizer.token_bytes()[:vocab_size]
        self.eos_token_id = eos_token_id
        self.tokens = tokens + [b""] * (vocab_size - len(tokens))  # a model's rows without a token are never allowed
        self.special_token_ids = sorted(id_ for id_ in tokenizer.control_token_ids if id_ < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Tokenize what a structure leaves no choice about, as the middle of a text.

        Some tokenizers put a space before a text: then it is taken as the end of a longer one. No tokens if that does
        not do: then nothing is forced.
        """
        for before in ("", _ANY_TEXT):
            skipped = len(self._tokenizer.encode(before, add_special_tokens=False))
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)[skipped:]
            if b"".join([self.tokens[token_id] for token_id in ids if token_id < len(self.tokens)]) == text.encode():
                return ids
        return []


def _checked_grammar(structure: Structure) -> str:
    """Put a structure in llguidance's terms."""
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415  # only where a request asks for structure

    try:
        match structure.kind:
            case "json_schema":
                _check_divisors(_decoder.decode(structure.source))
                grammar = LLMatcher.grammar_from_json_schema(
                    structure.source, overrides={"whitespace_pattern": _WHITE_SPACE}
                )
            case "choices":
                grammar = grammar_from("choice", structure.source)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(structure.source)
            case "grammar":
                for schema in _embedded_schemas(structure.source):
                    _check_divisors(schema)
                grammar = grammar_from("grammar", structure.source)
        fault = LLMatcher.validate_grammar(grammar)
    except (ValueError, RecursionError) as error:
        fault = str(error)
    if fault:
        raise InvalidRequestError(f"{structure.kind} cannot be used: {fault}")
    return grammar


_decoder: Final = json.JSONDecoder(parse_int=decimal.Decimal, parse_float=decimal.Decimal)


def _embedded_schemas(grammar: str) -> Iterator[object]:
    """Find the schemas in a grammar in Lark's syntax; those that are no JSON are the library's to refuse."""
    for start in re.finditer(r"%json\s*", grammar):
        with contextlib.suppress(ValueError):
            yield _decoder.raw_decode(grammar, start.end())[0]


def _check_divisors(schema: object) -> None:
    """Refuse a `multipleOf` that would take minutes and gigabytes to compile, which no limit of the library's ends."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            divisor = part.get("multipleOf")
            if isinstance(divisor, decimal.Decimal):
                digits = "".join(map(str, divisor.as_tuple().digits)).strip("0")
                if int(digits or 0) > _LARGEST_DIVISOR:
                    raise ValueError(
                        f"multipleOf must have at most the digits of {_LARGEST_DIVISOR}, zeros around them aside, "
                        f"not {divisor}"
                    )
            pending += part.values()
        elif isinstance(part, list):
            pending += part
