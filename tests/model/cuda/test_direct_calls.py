"""The calls that keep the interpreter's lock: what they pass on, and that a refusal is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from asyncllm.model.cuda.direct_calls import DirectCalls, graph_handle

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuEventRecord")


def recorded(calls: list[tuple[object, ...]], *, refused: str | None = None) -> dict[str, Callable[..., int]]:
    """Make functions that note their calls; one of them may refuse."""

    def make(name: str) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            calls.append((name, *arguments))
            return 700 if name == refused else 0

        return call

    return {name: make(name) for name in NAMES}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were made current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def enqueue_all(direct: DirectCalls) -> None:
    """Make each call once."""
    direct.use_device()
    direct.copy_in(20, 10, 64)
    direct.launch(30)
    direct.copy_out(50, 40, 8)
    direct.record(60)


def test_what_is_enqueued_goes_to_the_stream_and_to_its_device(devices: list[int]) -> None:
    calls: list[tuple[object, ...]] = []
    enqueue_all(DirectCalls(recorded(calls), stream=9, device=3))
    assert calls == [
        ("cuMemcpyHtoDAsync_v2", 20, 10, 64, 9),
        ("cuGraphLaunch", 30, 9),
        ("cuMemcpyDtoHAsync_v2", 50, 40, 8, 9),
        ("cuEventRecord", 60, 9),
    ]
    assert devices == [3]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_driver_refuses_is_raised_and_nothing_follows(name: str) -> None:
    calls: list[tuple[object, ...]] = []
    with pytest.raises(RuntimeError, match="700"):
        enqueue_all(DirectCalls(recorded(calls, refused=name), stream=9, device=0))
    assert calls[-1][0] == name


def test_a_torch_that_does_not_tell_a_graphs_handle_is_no_error() -> None:
    class Older:
        pass

    assert graph_handle(Older()) is None  # type: ignore[arg-type]  # what is tested
