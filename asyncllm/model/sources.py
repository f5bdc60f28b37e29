"""From a model's name to files on this machine.

Runs on the engine thread while it opens; owns nothing, what is fetched stays in the user's caches. Invariant: only
JSON, text, tokenizer and safetensors files are ever asked of a hub, nothing that is pickled or executed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import huggingface_hub

from asyncllm.errors import ConfigurationError, ModelLoadError
from asyncllm.model.demo_model import DEMO_MODEL, fetch_demo_model
from asyncllm.model.weights import weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.backend import Progress
    from asyncllm.config import LoadFormat

__all__ = ["find_model", "find_tokenizer"]

_STAGE: Final = "download"
_SMALL_FILES: Final = ["*.json", "*.txt", "*.model", "*.jinja"]
_NOT_NEEDED: Final = ["*/*"]  # folders of a hub's repository hold the same model in other forms


def find_model(
    name: str | os.PathLike[str], *, revision: str | None, load_format: LoadFormat, progress: Progress
) -> Path:
    """Return the folder or the .gguf file that holds a model, fetching it if need be.

    Args:
        name: the demo model's name, a folder, a .gguf file, or a name on the hub, in this order. What must be a
            path is given as one: "./name" or a `Path`.
        revision: of a hub's repository.
        load_format: what is wanted of it; "dummy" fetches no weights.
        progress: told of the stage "download", in files or bytes; may raise to cancel it.

    Raises:
        ModelLoadError: there is no such thing, or it cannot be fetched.
        ConfigurationError: it is not of that format.
    """
    if name == DEMO_MODEL:
        path = fetch_demo_model(progress)
    else:
        path = _local(name) or _fetch(os.fspath(name), revision, progress, weights=load_format != "dummy")
    if path.is_dir() and (load_format == "gguf" or not (path / "config.json").is_file()):
        path = _only_gguf(path)
    if path.is_file() and load_format == "safetensors":
        raise ConfigurationError(f"load_format='safetensors', but {path} is a GGUF file; leave it at 'auto'")
    return path


def find_tokenizer(name: str | os.PathLike[str], *, progress: Progress) -> Path:
    """Return the folder or the .gguf file that holds a tokenizer, named as a model is.

    Raises:
        ModelLoadError: there is no such thing, or it cannot be fetched.
    """
    if name == DEMO_MODEL:
        return fetch_demo_model(progress)
    return _local(name) or _fetch(os.fspath(name), None, progress, weights=False)


def _local(name: str | os.PathLike[str]) -> Path | None:
    """Return the path that a name is, or None if it can only be a name on the hub."""
    try:
        path = Path(name).expanduser()
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            return path
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not permitted, an unknown user's home
        raise ModelLoadError(f"{name!r} cannot be looked for: {error}") from error
    if is_file:
        raise ModelLoadError(f"{path} is neither a folder nor a .gguf file")
    must_be_path = not isinstance(name, str) or path.is_absolute() or name.startswith((".", "~"))
    if must_be_path or path.suffix == ".gguf" or len(path.parts) > 2:  # noqa: PLR2004 - a hub's names: owner/name
        raise ModelLoadError(f"there is no file or folder {path}")
    return None


def _only_gguf(folder: Path) -> Path:
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if len(found) != 1:
        several = f"several .gguf files ({', '.join(found)}); name one" if found else "no config.json and no .gguf file"
        raise ModelLoadError(f"{folder} has {several}")
    return folder / found[0]


def _fetch(name: str, revision: str | None, progress: Progress, *, weights: bool) -> Path:
    """Have the hub's client put a repository's files into its cache; cached ones need no network."""
    progress(_STAGE, 0, 1)
    with _hub_errors(name):
        folder = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=_SMALL_FILES, ignore_patterns=_NOT_NEEDED
            )
        )
    files = weight_files(folder) if weights else []
    for done, file in enumerate(files):
        progress(_STAGE, done, len(files))
        with _hub_errors(name):
            huggingface_hub.hf_hub_download(name, file, revision=folder.name)  # the snapshot's commit
    progress(_STAGE, 1, 1)
    return folder


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn what the hub's client raises: no network, no such name, no such file."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{name!r} is no file or folder, and it cannot be fetched as a name on the hub, with its weights in the "
            f"safetensors format: {error}"
        ) from error
