"""Tokenizer files that say anything at all: they load, or are refused by a `ModelLoadError`."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import ModelLoadError
from asyncllm.text.load import load_tokenizer
from helpers.tiny_models import write_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = ("tokenizer.json", "tokenizer_config.json")
WORDS = ("BPE", "ByteLevel", "{{ messages }}", "{% for", "{{ 1/0 }}", "{{ messages[0].content }}", "")

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.text(max_size=4) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a good folder's files hold."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in FILES}


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Name every place in a value, but of long lists and objects only the first few."""
    yield path
    if isinstance(value, dict):
        for key in list(value)[:12]:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 4)):
            yield from places(value[index], (*path, index))


def replace(contents: dict[str, Any], path: tuple[str | int, ...], new: object) -> object:
    """Return a copy of a file's contents with one place replaced."""
    if not path:
        return new
    copy = json.loads(json.dumps(contents))
    holder = copy
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = new
    return copy


@settings(max_examples=150)
@given(data=st.data())
def test_any_mutated_file_is_read_or_refused(contents: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    where = data.draw(st.sampled_from(list(places(contents[name]))))
    text = json.dumps(replace(contents[name], where, data.draw(anything)))
    if data.draw(st.integers(0, 9)) == 0:
        text = text[: data.draw(st.integers(0, len(text)))]
    folder = Path(tempfile.mkdtemp(prefix="asyncllm-test-"))
    try:
        for other in FILES:
            (folder / other).write_text(json.dumps(contents[other]), encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-8")
        try:
            tokenizer = load_tokenizer(folder)
        except ModelLoadError:
            return
        assert tokenizer is not None
        assert all(0 <= token < 2**31 for token in tokenizer.encode("a fox, 12 dogs"))
    finally:
        shutil.rmtree(folder)
