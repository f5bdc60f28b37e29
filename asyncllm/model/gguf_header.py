"""The header of a GGUF file: its settings, and where its tensors are.

Runs anywhere, imports no torch; owns nothing once it has returned. Invariant: every count, length and offset is
checked against the size of the file before anything is done with it, so that no file, however broken, takes more
memory or time than its size explains. (The `gguf` package's own reader trusts them.)
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from asyncllm.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GgufHeader", "GgufTensor", "read_gguf_header"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4
_MAX_ALIGNMENT: Final = 2**20
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Say where a tensor is and how it is packed.

    Args:
        type: how its elements are packed into blocks.
        shape: its shape in torch's order (rows first).
        offset: of its first byte in the file.
        size: its bytes.
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Hold what a GGUF file says of itself.

    Args:
        settings: by key, an int, float, bool, str, list of str, or a numpy array of numbers.
        tensors: by GGUF name, in the file's order.
    """

    settings: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header.

    Raises:
        ModelLoadError: the file cannot be read, is no GGUF file, or its header contradicts itself or its size.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except (OSError, ValueError, struct.error) as error:  # ValueError: an empty file, text that is no UTF-8
        raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error


class _Reader:
    """Walks a header once, front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ModelLoadError("no GGUF file: it does not begin with 'GGUF'")
        self._at = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ModelLoadError(f"GGUF version {version} is not implemented; supported are {_VERSIONS}, little-endian")
        tensor_count = self._count("<Q", least_bytes=24)
        setting_count = self._count("<Q", least_bytes=13)
        settings: dict[str, object] = {}
        for _ in range(setting_count):
            key = self._string()
            if key in settings:
                raise ModelLoadError(f"{key} is there twice")
            settings[key] = self._value(key)
        return GgufHeader(settings=settings, tensors=self._tensors(tensor_count, settings))

    def _tensors(self, count: int, settings: dict[str, object]) -> dict[str, GgufTensor]:
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ModelLoadError(f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, not {alignment!r}")
        infos = [self._tensor_info() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in infos:
            if name in tensors:
                raise ModelLoadError(f"tensor {name} is there twice")
            tensors[name] = _tensor(name, shape, number, start + offset)
        for name, tensor in tensors.items():
            if tensor.offset + tensor.size > len(self._data):
                end = tensor.offset + tensor.size
                raise ModelLoadError(f"tensor {name} ends at byte {end} of a file of {len(self._data)} bytes")
        if sum(tensor.size for tensor in tensors.values()) > len(self._data):
            raise ModelLoadError("tensors lie on top of each other")
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise ModelLoadError(f"tensor {name} has {dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(self._scalar("<Q") for _ in range(dims))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _value(self, key: str) -> object:
        kind = self._scalar("<I")
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1).item()

    def _array(self, key: str) -> list[str] | npt.NDArray[Any]:
        kind = self._scalar("<I")
        if kind == _STRING:
            return [self._string() for _ in range(self._count("<Q", least_bytes=8))]
        return self._numbers(key, kind, self._count("<Q", least_bytes=1))

    def _numbers(self, key: str, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in _SCALARS:
            raise ModelLoadError(f"{key} is of value type {kind}, which is not implemented")
        dtype = _SCALARS[kind]
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _string(self) -> str:
        return self._take(self._count("<Q", least_bytes=1)).decode()

    def _count(self, layout: str, *, least_bytes: int) -> int:
        """Read a number of things that follow, each of at least so many bytes."""
        count = self._scalar(layout)
        if count * least_bytes > len(self._data) - self._at:
            raise ModelLoadError(f"a count of {count} at byte {self._at} is more than the file can hold")
        return count

    def _scalar(self, layout: str) -> int:
        value: int
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _take(self, size: int) -> bytes:
        raw = self._data[self._at : self._at + size]
        if len(raw) < size:
            raise ModelLoadError(f"the file ends within the {size} bytes at byte {self._at}")
        self._at += size
        return raw


def _tensor(name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelLoadError(f"tensor {name} is of type {number}, which is not implemented") from None
    elements_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % elements_per_block:
        raise ModelLoadError(
            f"tensor {name} of shape {list(shape)} is not made of whole blocks of {elements_per_block} elements"
        )
    size = math.prod(shape) // elements_per_block * bytes_per_block
    return GgufTensor(type=kind, shape=shape, offset=offset, size=size)
