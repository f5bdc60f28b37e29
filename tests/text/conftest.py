"""Tokenizers that the tests of this folder share; nothing changes them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from asyncllm.model.gguf_header import read_gguf_header
from asyncllm.text.gguf_tokenizer import gguf_tokenizer
from asyncllm.text.tokenizer import Tokenizer
from helpers.tiny_tokenizers import tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import tokenizers


@pytest.fixture(scope="session")
def raw_tokenizer() -> Callable[[str], tokenizers.Tokenizer]:
    """Give the tokenizers of `helpers.tiny_tokenizers` by name, each trained once."""
    return functools.cache(tiny_tokenizer)


@pytest.fixture(scope="session")
def tokenizer(raw_tokenizer: Callable[[str], tokenizers.Tokenizer]) -> Callable[[str], Tokenizer]:
    """Give this package's tokenizers over them; a name may end with " + clean-up"."""

    @functools.cache
    def make(name: str) -> Tokenizer:
        return Tokenizer(
            raw_tokenizer(name.removesuffix(" + clean-up")),
            eos_token_ids=[2],
            bos_token_id=1,
            clean_up_spaces=name.endswith(" + clean-up"),
        )

    return make


@pytest.fixture(scope="session")
def demo_settings(demo_gguf: Path) -> dict[str, object]:
    """Give the settings of the demo model's GGUF file."""
    return read_gguf_header(demo_gguf).settings


@pytest.fixture(scope="session")
def demo_tokenizer(demo_settings: dict[str, object]) -> Tokenizer:
    """Give the demo model's tokenizer."""
    tokenizer = gguf_tokenizer(demo_settings)
    assert tokenizer is not None
    return tokenizer
