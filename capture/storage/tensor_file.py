"""Writes and reads safetensors files with torch only.

The format is public and simple: 8 bytes with the length of the header, a JSON header, then the
tensors (https://github.com/huggingface/safetensors, "Format"). The safetensors library is not used,
because its writer requires numpy, and its reader computes no checksum while reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.errors import DatasetError
from capture.storage import checksums, plain_files
from capture.storage.json_data import parsed, required

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}

_DtypeAndShape = tuple[torch.dtype, tuple[int, ...]]

_LONGEST_HEADER = 1 << 20
"""Maximum size of a header in bytes. The header of a recorded call has about 2,000 bytes."""


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> str:
    """Write contiguous CPU tensors to `path` and return the file's checksum (see `checksums`).

    The first chunk, which contains the header, is written last, so that an incomplete file has no
    header.
    """
    chunks = checksums.chunked(_parts(tensors, metadata))
    descriptor = plain_files.create(path)
    try:

        def store(index: int) -> bytes:
            _write_at(descriptor, index * checksums.CHUNK, chunks[index])
            return checksums.digest(chunks[index])

        digests = checksums.in_threads(store, range(1, len(chunks)))
        return checksums.combined([store(0), *digests])
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, offset: int, pieces: list[memoryview]) -> None:
    for piece in pieces:
        while piece.nbytes:
            written = os.pwritev(descriptor, [piece], offset)
            piece, offset = piece[written:], offset + written


def _parts(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    # Tensors with the widest elements come first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype}, strides {tensor.stride()}, cannot be stored")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        yield _memory(tensor)


class TensorFile:
    """An open safetensors file with a checked header; the tensors are not read yet."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Read the header."""
        self.path = path
        self.nbytes = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        with plain_files.refusing(path):
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if not 2 <= length <= min(self.nbytes - 8, _LONGEST_HEADER):
                raise DatasetError(
                    f"not a readable safetensors file (header of {length} bytes)", path
                )
            self._head = os.pread(descriptor, 8 + length, 0)
        try:
            if len(self._head) != 8 + length:
                raise ValueError("became shorter while it was read")
            self.metadata, self.tensors = _checked(
                parsed(self._head[8:]), self.nbytes - len(self._head)
            )
        except ValueError as error:
            raise DatasetError(f"not a readable safetensors file ({error})", path) from error

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, nbytes: int | None = None) -> Iterator[TensorFile]:
        """Open a file; if `nbytes` is given, check that the file has this size."""
        with plain_files.opened(path) as descriptor:
            found = os.fstat(descriptor).st_size
            if nbytes is not None and found != nbytes:
                raise DatasetError(f"{found} bytes, but {nbytes} were recorded", path)
            yield cls(path, descriptor)

    def read(self, checksum: str | None = None) -> dict[str, Tensor]:
        """Read all tensors with several threads; if `checksum` is given, compare it."""
        tensors = self._empty()
        chunks = checksums.chunked([memoryview(self._head), *map(_memory, tensors.values())])

        def fill(index: int) -> bytes:
            self._fill(index * checksums.CHUNK, chunks[index])
            return checksums.digest(chunks[index]) if checksum is not None else b""

        with plain_files.refusing(self.path):
            digests = checksums.in_threads(fill, range(len(chunks)))
        if checksum is not None and checksums.combined(digests) != checksum:
            raise DatasetError("altered since it was recorded (checksum differs)", self.path)
        return tensors

    def _empty(self) -> dict[str, Tensor]:
        try:
            return {
                name: torch.empty(shape, dtype=dtype, device="cpu")
                for name, (dtype, shape) in self.tensors.items()
            }
        except RuntimeError as error:
            raise DatasetError(
                f"its {self.nbytes} bytes do not fit into memory", self.path
            ) from error

    def _fill(self, offset: int, pieces: list[memoryview]) -> None:
        """Read from `offset` of the file into consecutive pieces of memory."""
        for piece in pieces:
            if piece.readonly:  # the header, which has already been read
                offset += piece.nbytes
                continue
            while piece.nbytes:
                count = os.preadv(self._descriptor, [piece], offset)
                if not count:
                    raise DatasetError("became shorter while it was read", self.path)
                piece, offset = piece[count:], offset + count


def _checked(header: Any, nbytes: int) -> tuple[dict[str, str], dict[str, _DtypeAndShape]]:
    """Return the metadata and tensors that a header describes, in the order of the file."""
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    metadata = required({"__metadata__": {}, **header}, "__metadata__", dict[str, str])
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _TORCH_DTYPES.get(required(entry, "dtype", str))
        shape, offsets = (_counts(entry, each) for each in ("shape", "data_offsets"))
        if dtype is None or len(offsets) != 2:
            raise ValueError(f"tensor of dtype {entry['dtype']!r:.40}, offsets {offsets[:3]}")
        found.append((*offsets, name, dtype, shape))
    found.sort(key=lambda item: item[:2])
    end = 0
    for begin, this_end, _, dtype, shape in found:
        if begin != end or this_end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError("tensors that overlap, leave gaps or have another size")
        end = this_end
    if end != nbytes:
        raise ValueError(f"{nbytes} bytes of tensors, but {end} are described")
    return metadata, {name: (dtype, shape) for _, _, name, dtype, shape in found}


def _counts(entry: dict[str, Any], name: str) -> tuple[int, ...]:
    value = entry.get(name)
    if not isinstance(value, list) or len(value) > 8:
        raise ValueError(f"no {name}")
    if not all(type(each) is int and 0 <= each < 2**48 for each in value):
        raise ValueError(f"{name} out of range")
    return tuple(value)


def _memory(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's memory; the tensor must outlive the view."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))
