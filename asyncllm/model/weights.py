"""Where a model's tensors come from: the seam between checkpoint formats and the decoder, and safetensors folders.

Runs on the engine thread while it opens; a source owns its open files until it is closed. Invariant: only headers
are read before a tensor is asked for, and then that tensor alone; nothing is ever unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from safetensors import SafetensorError, safe_open

from asyncllm.errors import ModelLoadError
from asyncllm.model.config_values import read_json, short

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["SafetensorsWeights", "WeightSource", "weight_files"]

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES: Final = ("F64", "F32", "F16", "BF16")


class WeightSource(Protocol):
    """A checkpoint's tensors under their canonical names, as "model.layers.0.self_attn.q_proj.weight"."""

    def names(self) -> frozenset[str]:
        """Return the names of all tensors in the checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading the tensor."""

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor: on the CPU, contiguous, floating point, in the checkpoint's dtype (float32 from GGUF).

        It may be a view of the file: copy it, do not change it.

        Raises:
            ModelLoadError: it cannot be read.
        """

    def close(self) -> None:
        """Let the files go. Idempotent; nothing can be read after it."""


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _File(Protocol):
    """What is used of `safe_open`, whose methods have no types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsWeights:
    """The tensors of a folder with model.safetensors, or with an index and its shards.

    Args:
        folder: where the files are.

    Raises:
        ModelLoadError: a file is missing, is broken, or lies outside the folder; or there is none of this format.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, _File] = {}
        self._where: dict[str, str] = {}
        try:
            if (folder / _SINGLE).is_file():
                self._open(folder, [_SINGLE])
            elif (folder / _INDEX).is_file():
                self._open_shards(folder)
            else:
                raise ModelLoadError(_no_weights(folder))
        except BaseException:
            self.close()
            raise

    def names(self) -> frozenset[str]:
        """Return the names of all tensors in the files."""
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from its file's header."""
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor, as a view of the file."""
        file = self._files[self._where[name]]
        if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
            raise ModelLoadError(f"{name} is of type {dtype}; supported are {', '.join(_DTYPES)}")
        return file.get_tensor(name)

    def close(self) -> None:
        """Let the files go."""
        self._files.clear()
        self._where.clear()

    def _open_shards(self, folder: Path) -> None:
        shard_of = _read_index(folder)
        shards = sorted(set(shard_of.values()))
        if missing := [shard for shard in shards if not (folder / shard).is_file()]:
            raise ModelLoadError(f"{folder} lacks {', '.join(missing)}, which {_INDEX} names")
        self._open(folder, shards)
        for name, shard in shard_of.items():
            if self._where.get(name) != shard:
                raise ModelLoadError(f"{name} is not in {shard}, where {_INDEX} puts it")

    def _open(self, folder: Path, files: Iterable[str]) -> None:
        for name in files:
            try:
                file = cast("_File", safe_open(folder / name, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{folder / name} cannot be read: {error}") from error
            self._files[name] = file
            for key in file.keys():  # noqa: SIM118 - no mapping
                if (other := self._where.setdefault(key, name)) != name:
                    raise ModelLoadError(f"{key} is in both {other} and {name}")


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that a folder's weights are in, whether they are there or not.

    Raises:
        ModelLoadError: the folder's index is broken or names a file outside the folder.
    """
    return sorted(set(_read_index(folder).values())) if (folder / _INDEX).is_file() else [_SINGLE]


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor that an index names; all are plain names of .safetensors files."""
    shard_of = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shard_of, dict):
        raise ModelLoadError(f"{folder / _INDEX} has no weight_map")
    for shard in shard_of.values():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ModelLoadError(f"{_INDEX} names {short(shard)}, which is no .safetensors file of its folder")
    return shard_of


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    found = f"; {pickled[0]} is pickled, and unpickling runs whatever is in it" if pickled else ""
    return f"{folder} has neither {_SINGLE} nor {_INDEX}{found}: weights in the safetensors format are needed"
