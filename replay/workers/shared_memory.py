"""Tensors handed to another process, in a file that both map into their memory.

The file stays: each output overwrites the last, in pages that are there already.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.storage.header import dtype_name

ALIGNMENT = 64
"""Bytes; of every tensor's start."""
CHUNK_BYTES = 2**20


class Outbox:
    """Where tensors are put for another process, which has read them before the next are put.

    Args:
        directory: for the file, which several processes may use in turns.
    """

    def __init__(self, directory: str) -> None:
        self._file = _MappedFile(Path(directory) / "tensors")

    def put(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Copy tensors there, of any device and strides; the plain data that `Inbox.take` wants.

        Raises:
            OSError: there is no room for them.
        """
        described: dict[str, list[Any]] = {}
        end = 0
        for name, tensor in tensors.items():
            described[name] = [dtype_name(tensor.dtype), list(tensor.shape), end]
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._file.grow(end)
        for name, tensor in tensors.items():
            self._file.tensor(*described[name]).copy_(tensor)
        return {"path": str(self._file.path), "bytes": end, "tensors": described}


class Inbox:
    """Reads what another process has put into its `Outbox`."""

    def __init__(self) -> None:
        self._file: _MappedFile | None = None

    def take(self, message: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Copies on `device`, given what `Outbox.put` returned.

        Raises:
            OSError, ValueError: they are not there.
        """
        path = Path(message["path"])
        if self._file is None or self._file.path != path:
            self._file = _MappedFile(path)
        self._file.map(message["bytes"])
        return {
            name: self._file.tensor(*entry).to(device, copy=True)
            for name, entry in message["tensors"].items()
        }


class _MappedFile:
    """A file that only grows, and its mapping."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | None = None

    def grow(self, size: int) -> None:
        """Make it at least that long, and map it.

        With zeros: a hole would end the process that fills it when the disk is full.
        """
        if self._memory is not None and len(self._memory) >= size:
            return
        with self.path.open("ab") as file:
            while file.tell() < size:
                file.write(bytes(CHUNK_BYTES))
        self.map(size)

    def map(self, size: int) -> None:
        """Map the whole of it, unless so many bytes are mapped already."""
        if size and (self._memory is None or len(self._memory) < size):
            with self.path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)

    def tensor(self, dtype: str, shape: list[int], offset: int) -> Tensor:
        """The tensor there, not a copy."""
        kind: torch.dtype = getattr(torch, dtype)
        elements = math.prod(shape)
        if elements == 0:
            return torch.empty(shape, dtype=kind)
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=kind, count=elements, offset=offset).view(shape)
