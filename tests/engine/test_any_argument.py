"""Whatever is passed to a call, it succeeds or raises one of this package's errors, and leaves nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from asyncllm import AsyncLLMError, EngineConfig, SamplingParams
from asyncllm.testing import check_nothing_left, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm import Engine

OPTIONS: Final = ("request_id", "timeout", "priority", "buffer_tokens", "cache_namespace")
FIELDS: Final = (*SamplingParams.__dataclass_fields__, *OPTIONS)

simple = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70000),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from([object(), int, 2**63, 2**64, -(2**63), float("inf"), "\udc80", "\0", complex(1, 1)]),
    st.sampled_from([np.int64(3), np.float32(0.5), np.float16("nan"), np.bool_(True), np.array(3), np.array([1, 2])]),
)
anything = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.integers(-2, 300), st.text(max_size=3)), inner, max_size=3),
        st.sets(st.integers(-2, 300), max_size=3),
    ),
    max_leaves=6,
)
some_settings = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Give an engine, and check in the end that nothing is left of what was asked."""
    with scripted_engine(kv_pool_tokens=512) as engine:
        yield engine
        check_nothing_left(engine)


def ask(engine: Engine, prompt: object, **fields: object) -> None:
    """Open a stream and leave it after a token."""
    with contextlib.suppress(AsyncLLMError):
        stream = engine.stream(prompt, **fields)  # type: ignore[arg-type]
        try:
            stream.next_blocking()
        finally:
            stream.close()


@some_settings
@given(name=st.sampled_from(FIELDS), value=anything)
def test_any_value_of_any_argument(engine: Engine, name: str, value: object) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, name: value}
    ask(engine, [1, 2, 3], **fields)


@some_settings
@given(prompt=anything)
def test_any_prompt(engine: Engine, prompt: object) -> None:
    ask(engine, prompt, max_tokens=3)


@some_settings
@given(params=anything)
def test_any_params(engine: Engine, params: object) -> None:
    with contextlib.suppress(AsyncLLMError):
        engine.stream([1], params, max_tokens=2).close()  # type: ignore[arg-type]


@some_settings
@given(
    messages=st.one_of(
        anything, st.lists(st.dictionaries(st.sampled_from(["role", "content"]), anything, max_size=2), max_size=2)
    ),
    options=st.dictionaries(
        st.sampled_from(["tools", "continue_final_message", "template_options"]), anything, max_size=3
    ),
)
def test_any_conversation(engine: Engine, messages: object, options: dict[str, Any]) -> None:
    with contextlib.suppress(AsyncLLMError):
        stream = engine.chat(messages, max_tokens=2, **options)  # type: ignore[arg-type]
        try:
            stream.next_blocking()
        finally:
            stream.close()


@some_settings
@given(fields=st.dictionaries(st.sampled_from(FIELDS[: -len(OPTIONS)]), anything, max_size=3))
def test_any_sampling_params(fields: dict[str, Any]) -> None:
    with contextlib.suppress(AsyncLLMError):
        SamplingParams(**fields)


@some_settings
@given(
    fields=st.dictionaries(
        st.sampled_from([name for name in EngineConfig.__dataclass_fields__ if name != "model"]), anything, max_size=3
    ),
    model=anything,
)
def test_any_setting(fields: dict[str, Any], model: object) -> None:
    with contextlib.suppress(AsyncLLMError):
        EngineConfig(model=model, **fields)  # type: ignore[arg-type]
